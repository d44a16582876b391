"""`callboard top`: the actors, the load and the streams of a running server, in the terminal, once a second."""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from protocol import Client
from protocol.endpoints import ServerRecord, find_server
from protocol.errors import MODEL_NOT_FOUND, CallboardError, RequestRejected
from protocol.figures import Sample
from protocol.messages import Figures, ModelState
from server.cli_cache import age, size
from server.cli_held import held_models, models_table
from server.cli_http import health

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40  # samples in a plot
_COLOURS = {"ready": "green", "ok": "green", "running": "green", "prefilling": "yellow", "waiting": "cyan"}
_OTHER_ROWS = 22  # lines of a screen that aren't streams


def top(args: argparse.Namespace) -> int:
    """Watch until Ctrl-C. 0 then, 1 when there is no server (any more)."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        server = find_server(args.name)
        with contextlib.closing(Watched(server, args.model)) as watched:
            _watch(server, watched, args, console)
    except KeyboardInterrupt:
        return 0
    except CallboardError as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    return 0


class Watched:
    """The streamer that is watched; of several models that of `model`, or of the first one that is loaded."""

    def __init__(self, server: ServerRecord, model: str | None) -> None:
        self._server = server
        self._model = model
        self._client: Client | None = None
        self._endpoint = ""
        self.models: list[ModelState] = []

    def figures(self, streams: int, since: float) -> Figures:
        """What it counts; nothing while the model isn't loaded. Raises CallboardError when there is no such server."""
        if not self._server.models:
            self._client = self._client or Client(self._server.name)
            return self._client.figures(streams, since)
        self.models = held_models(self._server)
        named = [one for one in self.models if self._model in (None, one.name, *one.aliases)]
        if not named:
            names = ", ".join(one.name for one in self.models)
            raise RequestRejected(MODEL_NOT_FOUND, f"there is no model {self._model!r}; there are {names}")
        endpoint = next((one.endpoint for one in named if one.endpoint), "")
        try:
            if endpoint != self._endpoint:
                self.close()
                self._client, self._endpoint = Client(endpoint=endpoint, reconnect=0.0), endpoint
            if self._client is not None:
                return self._client.figures(streams, since)
        except CallboardError:  # it was unloaded just now
            self.close()
        return Figures(0)

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
        self._client, self._endpoint = None, ""


def _watch(server: ServerRecord, watched: Watched, args: argparse.Namespace, console: Console) -> None:
    samples: list[Sample] = []

    def look() -> RenderableType:
        rows = max(3, console.size.height - _OTHER_ROWS - len(watched.models))
        figures = watched.figures(rows, samples[-1].at if samples else time.time() - _WIDTH - 2)
        samples.extend(figures.samples)
        del samples[:-_WIDTH]
        return screen(server, figures, samples, _health(server.http), watched.models)

    if args.once:
        console.print(look())
        return
    with Live(look(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(max(args.interval, 0.1))
            live.update(look(), refresh=True)


def _health(url: str) -> dict[str, Any]:
    try:
        return health(url, timeout=2.0)
    except (OSError, ValueError):
        return {}


def screen(
    server: ServerRecord,
    figures: Figures,
    samples: list[Sample],
    state: dict[str, Any],
    models: Sequence[ModelState] = (),
) -> RenderableType:
    """All of it."""
    status = state.get("status", "no answer")
    head = Text.assemble(
        ("Callboard ", "bold"),
        f"{server.name}  {f'{len(models)} models' if models else server.model}  {server.http}  ",
        (status, _COLOURS.get(status, "red")),
    )
    return Group(
        head,
        *((models_table([*models]), Text()) if models else ()),
        Columns([_load(figures, samples), _prefix(figures)], padding=(0, 2)),
        _plots(samples),
        _actors(server, state.get("actors", [])),
        _streams(figures),
    )


def rate(samples: list[Sample], of: str) -> list[float]:
    """How fast a sum of the samples grows, per second."""
    return [
        max(0.0, (getattr(b, of) - getattr(a, of)) / max(b.at - a.at, 1e-3)) for a, b in itertools.pairwise(samples)
    ]


def bars(values: list[float]) -> str:
    """Values as a line of bars, the largest as the highest."""
    most = max(values, default=0.0)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else _BARS[0] for value in values)


def _plots(samples: list[Sample]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    rows: list[tuple[str, list[float], str]] = [
        ("tokens/s", rate(samples, "tokens"), "{:,.0f}"),
        ("prefill/s", rate(samples, "prompt_tokens"), "{:,.0f}"),
        ("running", [float(sample.running) for sample in samples], "{:.0f}"),
        ("ITL ms", [sample.itl * 1000 for sample in samples], "{:.1f}"),
        ("TTFT ms", [sample.ttft * 1000 for sample in samples], "{:.0f}"),
    ]
    for name, values, form in rows:
        now = form.format(values[-1]) if values else "-"
        table.add_row(Text(name, "bold"), Text(now, justify="right"), Text(bars(values), "blue"))
    return Panel(table, title="the last seconds", title_align="left", border_style="dim")


def _load(figures: Figures, samples: list[Sample]) -> RenderableType:
    counts, engine = figures.counts, figures.engine
    failed = sum(count for key, count in counts.requests.items() if key.split()[0] in ("failed", "rejected"))
    table = Table.grid(padding=(0, 2))
    phases = "  ".join(f"{phase} {count}" for phase, count in sorted(figures.phases.items())) or "idle"
    table.add_row("streams", phases)
    table.add_row("requests", f"{sum(counts.requests.values())} ended, {failed} failed or refused")
    table.add_row("tokens", f"{counts.generated:,} generated, {engine.prefilled:,} prefilled")
    table.add_row("engine", f"step {engine.step:,}, {size(engine.memory)}, parked {engine.parked}")
    return Panel(table, title="load", title_align="left", border_style="dim")


def _prefix(figures: Figures) -> RenderableType:
    prefix = figures.engine.prefix
    hits = prefix.memory_tokens + prefix.ssd_tokens
    table = Table.grid(padding=(0, 2))
    table.add_row("hit rate", f"{hits / max(hits + prefix.computed_tokens, 1):.0%}")
    table.add_row(
        "memory", f"{size(prefix.memory_bytes)} of {size(prefix.memory_limit)}, {prefix.memory_tokens:,} found"
    )
    table.add_row("SSD", f"{size(prefix.ssd_bytes)} of {size(prefix.ssd_limit)}, {prefix.ssd_tokens:,} found")
    table.add_row("to write", size(prefix.queued_bytes))
    return Panel(table, title="prefix cache", title_align="left", border_style="dim")


def _actors(server: ServerRecord, actors: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column("actor")
    table.add_column("state")
    for column in ("pid", "epoch", "memory", "cpu"):
        table.add_column(column, justify="right")
    me = {"name": "supervisor", "pid": server.pid, "state": "ready", "epoch": 0}
    for actor in [me, *actors]:
        memory, cpu = "-", "-"
        try:
            process = psutil.Process(actor["pid"])
            memory = size(process.memory_info().rss)
            times = process.cpu_times()
            cpu = age(times.user + times.system)
        except psutil.Error:
            pass
        state = Text(actor["state"], _COLOURS.get(actor["state"], "red"))
        table.add_row(actor["name"], state, str(actor["pid"]), str(actor["epoch"]), memory, cpu)
    return table


def _streams(figures: Figures) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stream", justify="right")
    table.add_column("phase")
    for column in ("prompt", "cached", "tokens", "of", "tok/s", "TTFT", "age"):
        table.add_column(column, justify="right")
    table.add_column("client")
    for stream in figures.streams:
        table.add_row(
            str(stream.rid),
            Text(stream.phase, _COLOURS.get(stream.phase, "")),
            str(stream.prompt_tokens),
            str(stream.cached_tokens),
            str(stream.tokens),
            str(stream.budget),
            f"{stream.speed:.1f}",
            f"{stream.ttft * 1000:.0f} ms" if stream.ttft >= 0 else "-",
            age(stream.seconds),
            stream.client,
        )
    more = sum(figures.phases.values()) - len(figures.streams)
    return Group(table, Text(f"… and {more} more", "dim")) if more > 0 else table
