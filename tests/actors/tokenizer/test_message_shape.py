"""Messages for templates that know neither tools nor the developer role."""

from actors.tokenizer.message_shape import MessageShape

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def test_a_template_that_knows_all_gets_all_as_it_is():
    messages = [{"role": "developer", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    shape = MessageShape("{{ tools }} {{ tool_calls }} developer")
    assert shape.fit(messages, [TOOL]) == messages


def test_tools_are_described_in_the_system_message():
    shape = MessageShape("{{ messages }}")
    alone = shape.fit([{"role": "user", "content": "Hi"}], [TOOL])
    assert [message["role"] for message in alone] == ["system", "user"]
    assert '{"type": "function", "function": {"name": "f"}}' in alone[0]["content"]
    beside = shape.fit([{"role": "developer", "content": "Be kind."}], [TOOL])
    assert len(beside) == 1
    assert beside[0]["role"] == "system"
    assert beside[0]["content"].startswith("Be kind.\n\n")


def test_calls_and_results_are_written_into_the_texts():
    shape = MessageShape("{{ messages }}")
    messages = [
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    said, result = shape.fit(messages, None)
    assert said["content"] == 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert result == {"role": "user", "tool_call_id": "1", "content": "<tool_response>\n42\n</tool_response>"}
