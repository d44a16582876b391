"""Checks of what the demo model answers: the same text by every way in, and stop strings cut exactly."""

import asyncio
import json
import subprocess

import openai

from bench.ask import chat, events, post, streamed_text
from bench.checks.report import Report
from bench.harness import RunningServer
from protocol import AsyncClient

QUESTION = "What is the capital of France?"
MAX_TOKENS = 64


def by_curl(server: RunningServer) -> str:
    """Ask with the `curl` command."""
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--noproxy", "*", "--max-time", "120"]
    body = json.dumps(chat(QUESTION, max_tokens=MAX_TOKENS))
    command += ["-H", "content-type: application/json", "-d", body, f"{server.url}/v1/chat/completions"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    text: str = json.loads(answer.stdout)["choices"][0]["message"]["content"]
    return text


def by_openai(server: RunningServer, *, stream: bool) -> str:
    """Ask with the `openai` package."""
    with (
        openai.DefaultHttpxClient(trust_env=False, timeout=120) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        model = client.models.list().data[0].id
        question: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": QUESTION}
        if not stream:
            whole = client.chat.completions.create(
                model=model, messages=[question], temperature=0, max_tokens=MAX_TOKENS
            )
            return whole.choices[0].message.content or ""
        pieces = client.chat.completions.create(
            model=model, messages=[question], temperature=0, max_tokens=MAX_TOKENS, stream=True
        )
        return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


async def by_async_client(server: RunningServer) -> str:
    """Ask with the ZeroMQ client."""
    async with AsyncClient(endpoint=server.endpoint) as client:
        question = [{"role": "user", "content": QUESTION}]
        return await client.generate(messages=question, temperature=0, max_tokens=MAX_TOKENS).text()


def paris(report: Report, server: RunningServer) -> None:
    """The demo model knows the capital of France, and says so in the same words by every way in."""
    texts = {
        "curl": by_curl(server),
        "openai": by_openai(server, stream=False),
        "openai streaming": by_openai(server, stream=True),
        "AsyncClient": asyncio.run(by_async_client(server)),
    }
    for way, text in texts.items():
        report.measured(way.replace(" ", "_"), text)
    report.expect("Paris" in texts["curl"], "the answer contains Paris", texts["curl"])
    report.expect(len(set(texts.values())) == 1, "all ways give the same text", texts)


def stop_strings(report: Report, server: RunningServer) -> None:
    """A stop string that begins and ends inside tokens cuts the text exactly, streamed and not."""
    url = f"{server.url}/v1/chat/completions"
    for stop in ("ital of Fr", ["zzz", "ital of Fr"]):
        body = chat(QUESTION, max_tokens=MAX_TOKENS, stop=stop)
        whole = post(url, body).body["choices"][0]
        streamed = list(events(url, body))
        text = streamed_text(iter(streamed))
        reasons = [c["finish_reason"] for e in streamed for c in e["choices"] if c.get("finish_reason")]
        content = whole["message"]["content"]
        report.measured(f"text_with_stop_{stop}", [content, text])
        report.expect(content == "The cap", f"stop {stop!r} gives 'The cap', not streamed", content)
        report.expect(text == "The cap", f"stop {stop!r} gives 'The cap', streamed", text)
        report.expect(
            [whole["finish_reason"], *reasons] == ["stop", "stop"],
            "finish_reason is stop in both",
            [whole["finish_reason"], *reasons],
        )
