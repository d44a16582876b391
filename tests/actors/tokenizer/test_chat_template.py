"""Rendering against transformers' own, on templates in the manner of the well-known families."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.model_files import read_model_files
from actors.tokenizer.chat_template import ChatTemplate, TemplateError
from actors.tokenizer.text_tokenizer import load_tokenizer

LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if message.role == 'user' %}{%- set ns.last_query = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last_query %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% set role = 'model' %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
{{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

PHI = """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
'}}{% generation %}{{ message['content'] + '<|end|>
' }}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = false -%}{%- endif -%}
{%- set ns = namespace(system_prompt='', is_first=true) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set ns.system_prompt = ns.system_prompt + ('' if ns.is_first else '\\n\\n') + message['content'] -%}
    {%- set ns.is_first = false -%}
  {%- endif -%}
{%- endfor -%}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages | rejectattr('role', 'equalto', 'system') -%}
  {%- if message['role'] == 'user' -%}
    {{ '<｜User｜>' + message['content'] }}
  {%- elif message['role'] == 'assistant' -%}
    {{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
    {%- if message['tool_calls'] is defined -%}{{ message.tool_calls | tojson(indent=2) }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}"""

FAMILIES = {"llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI, "deepseek": DEEPSEEK}
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}  # those of the tiny model

USER = {"role": "user", "content": 'Où est <Paris> & "Rome"? 😀\n'}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIn France."}
SYSTEM = {"role": "system", "content": "  Be brief. "}
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
    ],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "title": "<é>"}}}]
CHATS = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, CALL, USER],
    [USER, ANSWER],
]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model, local_files_only=True)


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("family", [*FAMILIES, "demo"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False, "date_string": "1 May"}, {"tools": TOOLS}], ids=str)
def test_same_as_transformers(
    reference: Any, chat: list[dict[str, Any]], family: str, prompt: bool, options: dict[str, Any]
) -> None:
    source = FAMILIES.get(family, reference.chat_template)
    template = ChatTemplate(source, TOKENS)
    if family == "gemma" and chat[0]["role"] == "system":
        with pytest.raises(TemplateError, match="System role not supported"):
            template.render(chat, add_generation_prompt=prompt, **options)
        return
    expected = reference.apply_chat_template(
        chat, chat_template=source, tokenize=False, add_generation_prompt=prompt, **options
    )
    assert template.render(chat, add_generation_prompt=prompt, **options) == expected
    assert expected


def test_the_demo_models_ids(tiny_model: Path, reference: Any) -> None:
    files = read_model_files(tiny_model)
    assert files.chat_template is not None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = ChatTemplate(files.chat_template, files.special_tokens).render(chat)
    ids = load_tokenizer(tiny_model).encode(text, add_special_tokens=False)
    assert ids == reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


ECHO = ChatTemplate("{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}", {})


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_contents_are_never_escaped_or_interpreted(text: str) -> None:
    assert ECHO.render([{"role": "user", "content": text}]) == f"[user|{text}]"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
def test_contents(content: Any, text: str) -> None:
    assert ECHO.render([{"role": "user", "content": content}]) == f"[user|{text}]"


def test_content_may_be_absent() -> None:
    assert ECHO.render([{"role": "assistant"}]) == "[assistant|]"


def test_messages_are_left_as_they_are() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": None}
    defined = "{{ messages[0].tool_calls is defined }} {{ messages[0].name is defined }}"
    assert ChatTemplate(defined, {}).render([message]) == "False False"
    assert message == {"role": "assistant", "content": None, "tool_calls": None, "name": None}


def test_arguments_of_tool_calls_may_be_json_text(reference: Any) -> None:
    function = {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'}
    call = {**CALL, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    template = ChatTemplate(QWEN, TOKENS)
    assert template.render([USER, call]) == template.render([USER, CALL])


@pytest.mark.parametrize("arguments", ['{"city": "Zü', "hello", "[1]", "[" * 5000])
def test_a_conversation_goes_on_behind_a_call_that_was_cut_off(arguments: str) -> None:
    function = {"name": "weather", "arguments": arguments}
    call = {**CALL, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    said = {
        **CALL,
        "tool_calls": [{**call["tool_calls"][0], "function": {**function, "arguments": {"arguments": arguments}}}],
    }
    template = ChatTemplate(QWEN, TOKENS)
    assert template.render([USER, call]) == template.render([USER, said])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "messages must hold at least one"),
        (["hi"], r"messages\[0\] must be an object with role and content, not a text"),
        ([{"content": "hi"}], r"messages\[0\] must have a role"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\] must have a role"),
        (
            [USER, {"role": "user", "content": 3}],
            r"messages\[1\]\.content must be a text or a list of parts, not a num",
        ),
        ([{"role": "user", "content": {"text": "hi"}}], r"content must be .* not an object"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\]\.content\[0\] must be .* not 'image_url'",
        ),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\] must be .* not a text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            r"content\[0\]\.text must be a text, not null",
        ),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\]\.tool_calls must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            r"tool_calls\[0\] must be an object with a function",
        ),
    ],
)
def test_wrong_messages_are_named(messages: list[Any], error: str) -> None:
    with pytest.raises(TemplateError, match=error):
        ECHO.render(messages)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('only user and assistant, please') }}", "only user and assistant, please"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "can't render"),
        ("{{ ''.__class__.__mro__ }}", "can't render"),
        ("{% for i in range(10000000) %}{% endfor %}", "range"),
    ],
)
def test_errors_of_a_template_are_told(source: str, error: str) -> None:
    with pytest.raises(TemplateError, match=error):
        ChatTemplate(source, {}).render([USER])


def test_wrong_roles_are_told_as_the_template_says() -> None:
    with pytest.raises(TemplateError, match="Conversation roles must alternate"):
        ChatTemplate(MISTRAL, TOKENS).render([USER, USER])


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(TemplateError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})


def test_options_of_the_client() -> None:
    template = ChatTemplate(
        "{{ self_ }}{{ tools | length }}{{ add_generation_prompt }}{{ bos_token }}", {"bos_token": "<s>"}
    )
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": False, "self_": "x", "self": 1}
    assert template.render([USER], **options) == "x1False<s>"
    with pytest.raises(TemplateError, match="messages"):
        template.render([USER], messages=[])


def test_the_clock_is_passed_in() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert template.render([USER]) == "26 July 2024"


def test_a_render_leaves_nothing_behind() -> None:
    template = ChatTemplate(QWEN, TOKENS)
    first = template.render([USER], enable_thinking=False)
    assert template.render([SYSTEM, USER]) != first
    assert template.render([USER], enable_thinking=False) == first


@pytest.mark.parametrize("family", [*FAMILIES, "demo"])
def test_a_last_message_is_continued_as_transformers_does(reference: Any, family: str) -> None:
    source = FAMILIES.get(family, reference.chat_template)
    chat = [USER, {"role": "assistant", "content": "e In France, e"}]  # an e is also in the marks behind it
    expected = reference.apply_chat_template(chat, chat_template=source, tokenize=False, continue_final_message=True)
    rendered = ChatTemplate(source, TOKENS).render(chat, continue_final_message=True)
    assert rendered == expected
    assert rendered.endswith("e In France, e")


@pytest.mark.parametrize("last", [{"role": "assistant", "content": ""}, CALL])
def test_only_a_text_can_be_continued(last: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="continued"):
        ChatTemplate(QWEN, TOKENS).render([USER, last], continue_final_message=True)
    with pytest.raises(TemplateError, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}", TOKENS).render([USER, ANSWER], continue_final_message=True)
