"""Checks of LoRA adapters: what they cost a step, and that a real client gets the one it asks for."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai

from bench.ask import get
from bench.checks.clients import openai_client
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.made_adapters import linear_shapes, write_adapters
from bench.mlx_child import MlxChild
from protocol import Client

NAMES = ["ada", "bob", "cleo"]
PLACES = 2  # adapters in memory at once


def step_time(report: Report, model: str, *, rows: int, rounds: int, bars: dict[str, float]) -> None:
    """A step with four adapters in one batch against the same rows without. `bars` are ratios that must hold."""
    with MlxChild("bench.lora_steps") as child:
        result = child.ask([model, rows, 32, rounds, 8], seconds=300)
    times = result["milliseconds"]
    ratios = {case: round(value / times["bare"], 3) for case, value in times.items()}
    report.measured(f"{model}_{rows}_milliseconds", times)
    report.measured(f"{model}_{rows}_ratios", ratios)
    report.measured(f"{model}_adapter_bytes", result["adapter_bytes"])
    report.expect(times["four adapters"] > 0, f"{model}: measured")
    for case, bar in bars.items():
        report.expect(ratios[case] <= bar, f"{model}, {rows} rows, {case}: at most {bar} × bare", ratios[case])


def arguments(model: Path, folder: Path) -> list[str]:
    """Options of a server for `model` with three adapters, made in `folder`, and room for two."""
    config = msgspec.json.decode((model / "config.json").read_bytes())
    folders = write_adapters(folder, linear_shapes(config), NAMES)
    flags = [f"--adapter-path={name}={path}" for name, path in folders.items()]
    return ["--served-model-name", "base", *flags, "--max-loras", str(PLACES)]


def by_openai(report: Report, server: RunningServer) -> None:
    """The `openai` package lists the adapters, gets answers of each and of the base beside each other, whole and
    streamed, and 404 for others."""
    models = ["base", *NAMES]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    with openai_client(server) as client:
        listed = {model.id: model for model in client.models.list().data}
        parents = {name: (model.model_extra or {}).get("parent") for name, model in listed.items()}
        report.expect(parents == {"base": None, **dict.fromkeys(NAMES, "base")}, "models are listed", parents)
        roots = [(listed[name].model_extra or {}).get("root", "") for name in NAMES]
        report.expect([Path(root).name for root in roots] == NAMES, "adapters name their folders", roots)
        report.expect(client.models.retrieve("bob").id == "bob", "an adapter can be retrieved")

        texts = {}
        for model in models:
            answer = client.completions.create(model=model, prompt="The capital of", **options)
            texts[model] = answer.choices[0].text
            report.expect(answer.model == model, f"the answer names {model}", answer.model)
        report.expect(len(set(texts.values())) == len(models), "each has an answer of its own", texts)

        streams = [
            (model, client.completions.create(model=model, prompt="The capital of", stream=True, **options))
            for model in models * 3
        ]
        same = True
        for model, stream in streams:
            chunks = list(stream)
            same &= "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == texts[model]
            same &= {chunk.model for chunk in chunks} == {model}
        report.expect(same, f"{len(streams)} streams beside each other get what each gets alone")

        chat: Any = [{"role": "user", "content": "Say something."}]
        chosen = client.chat.completions.create(model="cleo", messages=chat, n=2, seed=4, max_tokens=8, temperature=1)
        again = client.chat.completions.create(model="cleo", messages=chat, n=2, seed=4, max_tokens=8, temperature=1)
        said = [[choice.message.content for choice in one.choices] for one in (chosen, again)]
        report.expect(said[0] == said[1] and said[0][0] != said[0][1], "n and seed hold with an adapter", said)
        form: Any = {"ignore_eos": False, "structured_outputs": {"regex": r"[a-c]{3}-\d"}}
        text = client.completions.create(model="ada", prompt="x", max_tokens=20, extra_body=form).choices[0].text
        report.expect(len(text) == 5 and text[3] == "-", "a regex holds with an adapter", text)
        try:
            client.completions.create(model="eve", prompt="x", max_tokens=1)
            report.expect(False, "an unknown name is 404")
        except openai.NotFoundError as error:
            report.expect(error.code == "model_not_found" and "'bob'" in str(error), "an unknown name is 404", error)
    report.expect(get(f"{server.url}/v1/models/eve").status == 404, "GET /v1/models/eve is 404")


def over_zmq(report: Report, server: RunningServer, tokens: int) -> None:
    """A ZeroMQ client's streams keep their adapters when the engine dies under them."""

    def answers(names: Sequence[str], kill_at: int = 0) -> list[list[int]]:
        with Client(endpoint=server.endpoint) as client:
            streams = [
                client.generate(ids=[700, 800], model=name, max_tokens=tokens, seed=3, ignore_eos=True, return_ids=True)
                for name in names
            ]
            ids: list[list[int]] = [[] for _ in streams]
            for place, stream in enumerate(streams):
                for delta in stream:
                    ids[place] += delta.ids
                    if kill_at and len(ids[0]) >= kill_at:
                        kill_at = 0
                        os.kill(server.pids()["engine"], signal.SIGKILL)
            return ids

    names = ["", *NAMES]
    with Client(endpoint=server.endpoint) as client:
        cards = {card.name: card.parent for card in client.models()}
    report.expect(cards == {"base": "", **dict.fromkeys(NAMES, "base")}, "cards name their base", cards)
    undisturbed = answers(names)
    report.expect(len({tuple(ids) for ids in undisturbed}) == len(names), "each has tokens of its own")
    report.expect(answers(names, kill_at=tokens // 3) == undisturbed, "the engine's death changes no token")
