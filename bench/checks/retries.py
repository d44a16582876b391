"""Check of a full server: client libraries try again by themselves until there is room."""

import asyncio
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai

from bench.checks.clients import ASK, NPM, model_name
from bench.checks.node import install_npm
from bench.checks.report import Report
from bench.harness import RunningServer, wait_until
from protocol import AsyncClient

Told = Callable[[int], None]


def retries(report: Report, server: RunningServer, folder: Path | None, running: int, waiting: int) -> None:
    """The `openai` and `anthropic` packages and, installed into `folder`, `openai` of npm ask a server that is full.

    They wait as they are told, try again, and get their answers.
    """
    model = model_name(server)
    asks: dict[str, Callable[[RunningServer, str, Told], str | None]] = {
        "openai": _patient_openai,
        "anthropic": _patient_anthropic,
    }
    if folder is not None:
        install_npm(NPM, folder)
        asks["openai (npm)"] = lambda server, model, told: _patient_npm(server, model, told, folder)
    seen: dict[str, list[int]] = {name: [] for name in asks}
    refused = {name: threading.Event() for name in asks}

    def ask(name: str) -> str | None:
        def told(status: int) -> None:
            seen[name].append(status)
            if status == 503:
                refused[name].set()

        return asks[name](server, model, told)

    async def fill() -> list[str | None]:
        # Two clients: each finds some room beyond the limit that the other's flood has not taken.
        async with AsyncClient(endpoint=server.endpoint) as one, AsyncClient(endpoint=server.endpoint) as two:
            # It stays full until the refusals were seen.
            long = [one.generate(ids=[700], max_tokens=60_000, ignore_eos=True) for _ in range(running)]
            for stream in long:
                await anext(stream)
            _ = [one.generate(ids=[700], max_tokens=1) for _ in range(waiting)]
            await one.models()  # they are in
            spare = (running + waiting) // 4
            _ = [two.generate(ids=[700], max_tokens=1) for _ in range(spare)]
            await asyncio.to_thread(wait_until, lambda: server.load()["waiting"] == waiting + spare, 30)
            asked = [asyncio.create_task(asyncio.to_thread(ask, name)) for name in asks]
            for event in refused.values():
                await asyncio.to_thread(event.wait, 30)
            for stream in long:
                stream.cancel()
            return await asyncio.gather(*asked)

    for (name, statuses), reason in zip(seen.items(), asyncio.run(fill()), strict=True):
        tried = 503 in statuses and statuses[-1] == 200
        report.expect(tried, f"{name}: 503 is tried again until there is room", statuses)
        report.expect(bool(reason), f"{name}: and then answered", reason)


def _patient_openai(server: RunningServer, model: str, told: Told) -> str | None:
    hooks: dict[str, Any] = {"response": [lambda response: told(response.status_code)]}
    with openai.DefaultHttpxClient(trust_env=False, timeout=120, event_hooks=hooks) as http:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=20)
        return client.chat.completions.create(model=model, messages=ASK, max_tokens=2).choices[0].finish_reason


def _patient_anthropic(server: RunningServer, model: str, told: Told) -> str | None:
    hooks: dict[str, Any] = {"response": [lambda response: told(response.status_code)]}
    with anthropic.DefaultHttpxClient(trust_env=False, timeout=120, event_hooks=hooks) as http:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", http_client=http, max_retries=20)
        return client.messages.create(model=model, messages=ASK, max_tokens=2).stop_reason


def _patient_npm(server: RunningServer, model: str, told: Told, folder: Path) -> str | None:
    command = ["node", str(folder / "retry.mjs"), server.url, model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        reason = None
        for line in map(str.strip, node.stdout):
            if line.isdigit():
                told(int(line))
            else:
                reason = line
    return reason
