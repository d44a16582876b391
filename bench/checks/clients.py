"""Checks with the client libraries people really use: openai, anthropic, litellm, langchain, and openai's npm package.

Every one asks a server of ours as its own documentation says, and gets what it would get elsewhere.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai

from bench.ask import post
from bench.checks.node import install_npm
from bench.checks.report import Report
from bench.harness import ROOT, RunningServer

PAINT: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["colour", "coats"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "paint", "description": "Paint", "parameters": PAINT}}
ASK: list[Any] = [{"role": "user", "content": "Say something."}]
NPM = ROOT / "bench" / "clients"


def is_paint(text: str | None) -> bool:
    """Whether a text is JSON as `PAINT` wants it."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"colour", "coats"} and value["colour"] in ("red", "green")


def _validates(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def openai_client(server: RunningServer, **options: Any) -> openai.OpenAI:
    """The `openai` package, without a proxy."""
    http = openai.DefaultHttpxClient(trust_env=False, timeout=120)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, **{"max_retries": 0, **options})


def anthropic_client(server: RunningServer) -> anthropic.Anthropic:
    """The `anthropic` package, without a proxy."""
    http = anthropic.DefaultHttpxClient(trust_env=False, timeout=120)
    return anthropic.Anthropic(base_url=server.url, api_key="none", http_client=http, max_retries=0)


def by_openai_chat(report: Report, server: RunningServer) -> None:
    """Chat with the `openai` package: options, n, logprobs, tools, structured output, errors."""
    with openai_client(server) as client:
        model = client.models.list().data[0].id
        report.expect(client.models.retrieve(model).id == model, "models.retrieve finds the model")
        base: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": 200}

        chosen = client.chat.completions.create(
            **{**base, "max_tokens": 6}, n=3, seed=7, temperature=1, logprobs=True, top_logprobs=2
        )
        texts = [choice.message.content for choice in chosen.choices]
        usage = chosen.usage
        report.expect(len(texts) == 3 and len(set(texts)) > 1, "n=3 gives three choices", texts)
        report.expect(usage is not None and usage.completion_tokens <= 18, "usage counts all choices", usage)
        logprobs = chosen.choices[0].logprobs
        tops = [] if logprobs is None else [len(token.top_logprobs) for token in logprobs.content or ()]
        report.expect(set(tops) == {2}, "each token has two top_logprobs", tops)
        again = client.chat.completions.create(**{**base, "max_tokens": 6}, n=3, seed=7, temperature=1)
        report.expect([one.message.content for one in again.choices] == texts, "a seed repeats its choices")

        form: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": PAINT, "strict": True}}
        text = client.chat.completions.create(**base, response_format=form).choices[0].message.content
        report.expect(is_paint(text), "response_format json_schema holds", text)
        regex = {"structured_outputs": {"regex": r"[a-c]{3}-\d"}}
        text = client.chat.completions.create(**base, extra_body=regex).choices[0].message.content or ""
        report.expect(len(text) == 5 and text[3] == "-", "structured_outputs.regex holds", text)

        for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
            forced: Any = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
            answer = client.chat.completions.create(**base, **forced).choices[0]
            calls: Any = answer.message.tool_calls or []
            ok = len(calls) == 1 and calls[0].function.name == "paint" and is_paint(calls[0].function.arguments)
            report.expect(ok, f"tool_choice {choice} calls the tool", answer.to_dict())
            with client.chat.completions.stream(**base, **forced) as stream:
                kinds = Counter(event.type for event in stream)
                last = stream.get_final_completion().choices[0].message.tool_calls or []
            report.expect(
                len(last) == 1
                and is_paint(last[0].function.arguments)
                and kinds["tool_calls.function.arguments.delta"] > 1,
                f"tool_choice {choice} streams the arguments in pieces",
                dict(kinds),
            )
        wrote: Any = {
            "regex": r'<tool_call>\n\{"name": "paint", "arguments": \{"colour": "red", "coats": 2\}\}\n</tool_call>'
        }
        answer = client.chat.completions.create(**base, tools=[TOOL], extra_body={"structured_outputs": wrote}).choices[
            0
        ]
        calls = answer.message.tool_calls or []
        ok = len(calls) == 1 and is_paint(calls[0].function.arguments) and answer.finish_reason == "tool_calls"
        report.expect(ok, "tool_choice auto finds the call in the text", answer.to_dict())
        result = [*ASK, answer.message.to_dict(), {"role": "tool", "tool_call_id": calls[0].id, "content": "done"}]
        reply = client.chat.completions.create(**{**base, "messages": result, "max_tokens": 4}, tools=[TOOL])
        report.expect(reply.usage is not None, "the result of a tool is taken")
        try:
            client.chat.completions.create(
                **base, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
            )
            report.expect(False, "an unsupported schema is refused")
        except openai.BadRequestError as error:
            report.expect(
                "not" in str(error) and error.param is not None, "an unsupported schema is refused by name", error.body
            )


def by_openai_options(report: Report, server: RunningServer) -> None:
    """Every option of sampling with the `openai` package, each by an effect that only it can have; and completions."""
    colours = post(f"{server.url}/tokenize", {"prompt": " red green blue white black brown"}).body["tokens"]
    red = str(colours[0])
    with openai_client(server) as client:
        base: dict[str, Any] = {"model": model_name(server), "messages": ASK, "max_tokens": 12, "temperature": 0}
        kept: dict[str, Any] = {"ignore_eos": True}

        def say(more: dict[str, Any] | None = None, **options: Any) -> str:
            given = {**base, **options, "extra_body": kept | (more or {})}
            return client.chat.completions.create(**given).choices[0].message.content or ""

        best = say()
        held: dict[str, Any] = {"logit_bias": {red: 80}}
        report.expect(say(**held) == " red" * 12, "logit_bias decides")
        rivals: dict[str, Any] = {"logit_bias": {str(token): 80 for token in colours}}
        plain = say(**rivals).split()
        for name in ("frequency_penalty", "presence_penalty"):
            penalty: dict[str, Any] = {name: 2.0}
            words = say(**rivals, **penalty).split()
            report.expect(len(set(words)) > len(set(plain)), f"{name} turns to other tokens", [plain, words])
        words = say({"repetition_penalty": 100.0}, **rivals).split()
        report.expect(len(set(words)) == len(words), "repetition_penalty forbids to repeat", words)
        wild: dict[str, Any] = {"temperature": 2, "seed": 3}
        report.expect(say(**wild) != best, "a temperature of 2 is not greedy")
        report.expect(say({"top_k": 1}, **wild) == best, "top_k of 1 is greedy")
        report.expect(say({"min_p": 1.0}, **wild) == best, "min_p of 1 is greedy")
        report.expect(say(**wild, top_p=1e-6) == best, "a tiny top_p is greedy")
        excluded = say({"xtc_probability": 1.0, "xtc_threshold": 0.0}, temperature=1, seed=3)
        report.expect(excluded != best, "xtc excludes the likely")
        text = say({"min_tokens": 3, "stop_token_ids": [int(red)], "ignore_eos": False}, **held)
        report.expect(text != "" and " red" not in text, "stop_token_ids end a text, behind min_tokens", text)
        stop = best[3:5]
        ended = client.chat.completions.create(**base, stop=[stop, "never"], extra_body=kept).choices[0]
        ok = ended.message.content == best[: best.find(stop)] and ended.finish_reason == "stop"
        report.expect(ok, "stop ends a text before it", [best, stop, ended.message.content])
        for kind, value in {
            "choice": ["north", "south"],
            "grammar": 'start: "a" "b"+ "c"',
            "regex": "[x-z]{4}",
        }.items():
            text = say({"structured_outputs": {kind: value}, "ignore_eos": False}, max_tokens=60)
            ok = {"choice": text in ("north", "south"), "regex": len(text) == 4}.get(kind, text.startswith("ab"))
            report.expect(ok, f"structured_outputs.{kind} holds", text)
        text = say({"ignore_eos": False}, max_tokens=100, response_format={"type": "json_object"})
        report.expect(text.lstrip().startswith("{"), "response_format json_object begins an object", text)

        many = client.completions.create(
            model=base["model"], prompt=["One", "Two"], n=2, max_tokens=2, echo=True, seed=1, extra_body=kept
        )
        texts = [choice.text for choice in many.choices]
        ok = len(texts) == 4 and texts[0].startswith("One") and texts[3].startswith("Two")
        report.expect(ok, "completions of two prompts, twice each, with echo", texts)
        columns = client.completions.create(
            model=base["model"], prompt="One", max_tokens=3, logprobs=2, temperature=0, extra_body=kept
        )
        logprobs = columns.choices[0].logprobs
        report.expect(logprobs is not None and len(logprobs.tokens or ()) == 3, "completions have logprobs", logprobs)


def by_openai_responses(report: Report, server: RunningServer) -> None:
    """The Responses API with the `openai` package."""
    with openai_client(server) as client:
        model = client.models.list().data[0].id
        first = client.responses.create(model=model, input="Hello", max_output_tokens=6, temperature=0)
        report.expect(
            first.status in ("completed", "incomplete") and bool(first.output_text),
            "create gives a text",
            first.to_dict(),
        )
        report.expect(client.responses.retrieve(first.id).output_text == first.output_text, "retrieve gives it again")
        second = client.responses.create(
            model=model, input="And?", previous_response_id=first.id, max_output_tokens=6, temperature=0
        )
        one, two = first.usage, second.usage
        ok = one is not None and two is not None and two.input_tokens > one.input_tokens + 4
        report.expect(ok, "previous_response_id brings the conversation")
        form: Any = {"format": {"type": "json_schema", "name": "paint", "schema": PAINT}}
        text = client.responses.create(model=model, input="Paint", text=form, max_output_tokens=200).output_text
        report.expect(is_paint(text), "text.format json_schema holds", text)
        tool: Any = {"type": "function", **TOOL["function"], "strict": True}
        with client.responses.stream(
            model=model,
            input="Paint",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=200,
        ) as stream:
            kinds = [event.type for event in stream]
            calls = [item for item in stream.get_final_response().output if item.type == "function_call"]
        report.expect(len(calls) == 1 and is_paint(calls[0].arguments), "a function is called", kinds)
        client.responses.delete(first.id)
        try:
            client.responses.retrieve(first.id)
            report.expect(False, "a deleted response is gone")
        except openai.NotFoundError:
            report.expect(True, "a deleted response is gone")


def by_anthropic(report: Report, server: RunningServer) -> None:
    """Messages with the `anthropic` package."""
    with anthropic_client(server) as typed:
        client: Any = typed  # its types know Anthropic's models, and only options that all of them have
        model = model_name(server)
        base: dict[str, Any] = {"model": model, "max_tokens": 200, "messages": ASK}
        whole = client.messages.create(**{**base, "max_tokens": 6}, system="Be brief.", extra_body={"temperature": 0})
        text = whole.content[0].text if whole.content and whole.content[0].type == "text" else ""
        report.expect(
            whole.stop_reason in ("max_tokens", "end_turn") and bool(text), "create gives a text", whole.to_dict()
        )
        with client.messages.stream(
            **{**base, "max_tokens": 6}, system="Be brief.", extra_body={"temperature": 0}
        ) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        report.expect(streamed == text, "streamed and whole agree", streamed)
        report.expect(final.usage.output_tokens == whole.usage.output_tokens, "usage agrees")
        begun = [*ASK, {"role": "assistant", "content": text[:3]}]
        rest = client.messages.create(
            **{**base, "messages": begun, "max_tokens": 6}, system="Be brief.", extra_body={"temperature": 0}
        )
        counted = client.messages.count_tokens(model=model, messages=begun, system="Be brief.").input_tokens
        report.expect(counted == rest.usage.input_tokens, "the assistant's turn may be begun", rest.to_dict())
        stop = text[2:4]
        ended = client.messages.create(
            **{**base, "max_tokens": 6}, system="Be brief.", stop_sequences=[stop], extra_body={"temperature": 0}
        )
        ok = (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
        report.expect(ok, "stop_sequences end a text", ended.to_dict())
        counted = client.messages.count_tokens(model=model, messages=ASK, system="Be brief.").input_tokens
        report.expect(counted == whole.usage.input_tokens, "count_tokens equals the usage", counted)
        form: Any = {"format": {"type": "json_schema", "schema": PAINT}}
        made = client.messages.create(**base, output_config=form)
        with client.messages.stream(**base, output_config=form) as stream:
            pieces = "".join(stream.text_stream)
        for text in (made.content[0].text, pieces):
            report.expect(_validates(text, PAINT), "output_config.format holds", text)
        tool: Any = {"name": "paint", "description": "Paint", "input_schema": PAINT}
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}):
            called = client.messages.create(**base, tools=[tool], tool_choice=choice)
            blocks: Any = [block for block in called.content if block.type == "tool_use"]
            ok = len(blocks) == 1 and called.stop_reason == "tool_use" and is_paint(json.dumps(blocks[0].input))
            report.expect(ok, f"tool_choice {choice['type']} calls the tool", called.to_dict())
            with client.messages.stream(**base, tools=[tool], tool_choice=choice) as stream:
                last: Any = stream.get_final_message().content[-1]
            report.expect(is_paint(json.dumps(last.input)), f"tool_choice {choice['type']} streams the input", last)
        done = [
            *ASK,
            {"role": "assistant", "content": [block.to_dict() for block in called.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": blocks[0].id, "content": "done"}]},
        ]
        after = client.messages.create(**{**base, "messages": done, "max_tokens": 4}, tools=[tool])
        before, behind = (one.usage.input_tokens + one.usage.cache_read_input_tokens for one in (called, after))
        report.expect(behind > before, "the result of a tool is taken", [before, behind])
        try:
            client.messages.create(**base, extra_body={"temperature": 9.0})
            report.expect(False, "a wrong option is refused")
        except anthropic.BadRequestError as error:
            report.expect("temperature" in str(error), "a wrong option is refused by name", str(error))


def by_langchain(report: Report, server: RunningServer) -> None:
    """Chat, tools and structured output with `langchain-openai`."""
    from langchain_openai import ChatOpenAI

    with openai.DefaultHttpxClient(trust_env=False, timeout=120) as http:
        options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "http_client": http}
        chat = ChatOpenAI(model=model_name(server), max_tokens=200, temperature=0, **options)  # type: ignore[call-arg]  # an alias
        text = chat.invoke("Say something.").content
        streamed = "".join(str(piece.content) for piece in chat.stream("Say something."))
        report.expect(text == streamed != "", "invoke and stream agree", [text, streamed])
        made = chat.with_structured_output({"title": "paint", **PAINT}, method="json_schema").invoke("Paint")
        report.expect(is_paint(json.dumps(made)), "with_structured_output holds", made)
        calls = chat.bind_tools([TOOL], tool_choice="paint").invoke("Paint").tool_calls
        ok = len(calls) == 1 and calls[0]["name"] == "paint" and is_paint(json.dumps(calls[0]["args"]))
        report.expect(ok, "bind_tools calls the tool", calls)


def by_litellm(report: Report, server: RunningServer) -> None:
    """Chat and tools with `litellm`, which runs in a process of its own: it asks its own network for prices."""
    script = """
import json, sys
import litellm
litellm.suppress_debug_info = True
url, model, tool = sys.argv[1:]
base = dict(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", max_tokens=200, temperature=0, num_retries=0,
            messages=[{"role": "user", "content": "Say something."}])
whole = litellm.completion(**base).choices[0].message.content
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**base, stream=True))
called = litellm.completion(**base, tools=[json.loads(tool)], tool_choice="required", parallel_tool_calls=False)
print(json.dumps([whole, streamed, called.choices[0].message.tool_calls[0].function.arguments]))
"""
    found = _run(report, [sys.executable, "-c", script, server.url, model_name(server), json.dumps(TOOL)], "litellm")
    if found is not None:
        whole, streamed, arguments = found
        report.expect(whole == streamed != "", "completion whole and streamed agree", [whole, streamed])
        report.expect(is_paint(arguments), "a tool is called", arguments)


def by_npm(report: Report, server: RunningServer, folder: Path) -> None:
    """Chat, tools, structured output, responses and errors with the `openai` npm package, installed into `folder`."""
    install_npm(NPM, folder)
    found = _run(report, ["node", str(folder / "check.mjs"), server.url], "openai (npm)")
    if found is None:
        return
    report.expect(found["whole"] == found["streamed"] != "", "whole and streamed agree", found["streamed"])
    report.expect(found["structured"]["colour"] in ("red", "green"), "response_format holds", found["structured"])
    report.expect(
        found["call"]["name"] == "paint" and found["reason"] == "tool_calls", "a tool is called", found["call"]
    )
    begin, *_, end = found["events"]
    ends = ("response.completed", "response.incomplete")
    report.expect(begin == "response.created" and end in ends, "responses stream in order", found["events"])
    report.expect(found["status"] == 400, "an error has its status", found["status"])


def model_name(server: RunningServer) -> str:
    """What the server calls its model."""
    with openai_client(server) as client:
        return client.models.list().data[0].id


def run_script(command: list[str], seconds: float = 120.0) -> list[str]:
    """The lines that a library's script prints, without a proxy. Raises RuntimeError with what it complained of."""
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    return done.stdout.strip().splitlines()


def _run(report: Report, command: list[str], what: str) -> Any:
    try:
        return json.loads(run_script(command)[-1])
    except RuntimeError as error:
        report.expect(False, f"{what} runs", str(error))
        return None


def clients(report: Report, server: RunningServer, folder: Path) -> None:
    """All of them."""
    by_openai_chat(report, server)
    by_openai_options(report, server)
    by_openai_responses(report, server)
    by_anthropic(report, server)
    by_langchain(report, server)
    by_litellm(report, server)
    by_npm(report, server, folder)
