"""`callboard serve` with several models: from settings to a running house. Called by `server.cli_serve`."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from actors.config import CastConfig
from actors.house import House, HousePlan
from actors.keeper import HttpSpec
from actors.residency import Model, Residency, default_claim
from actors.rundir import RunDirectory
from actors.supervision import Supervision
from server.cli_cache import size
from server.cli_serve import (
    CannotServe,
    advise_file_limit,
    cast_config,
    find_adapters,
    http_spec,
    keep_logs,
    make_run_directory,
    read_keys,
    served_name,
)
from server.models.errors import ModelError
from server.models.resolve import resolve_model
from server.models_config import ModelEntry
from server.settings import ServeSettings

ASK_LIMIT = "from actors.engine.memory import default_limit; print(default_limit())"  # loads MLX, which we must not


def run_house(entries: list[ModelEntry], device: str, settings: ServeSettings, listener: socket.socket) -> int:
    """Serve these models until stopped. Returns the exit code. Raises CannotServe, and what settings are wrong with."""
    keys = read_keys(settings)
    run_dir = make_run_directory(settings, listener)
    try:
        keep_log = keep_logs(settings, run_dir)
        advise_file_limit()
        plan = make_plan(entries, device, settings)
        http = http_spec(settings, listener, keys, plan.residency.models[0].name, plan.residency.places)
        return _house(plan, run_dir, http, keep_log).run()
    except OSError as error:
        raise CannotServe(f"the server can't be started: {error}") from error
    finally:
        run_dir.remove()


def make_plan(entries: list[ModelEntry], device: str, settings: ServeSettings) -> HousePlan:
    """Find all models, and what each may take. One that can't be used is served with the reason why not.

    Raises CannotServe when none can be used, or what was said of them doesn't fit together.
    """
    budget = settings.models_memory or settings.memory_limit or default_budget()
    models: list[Model] = []
    configs: dict[str, CastConfig] = {}
    for entry in entries:
        broken, adapters, weights = "", {}, 0
        path = Path(entry.spec)
        try:
            adapters = find_adapters(entry.settings)
            path = resolve_model(entry.spec, device=device)
            weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        except (ModelError, CannotServe, OSError) as error:
            broken = str(error)
            print(f"callboard: {entry.name or entry.spec}: {broken}", file=sys.stderr)
        name = entry.name or served_name(entry.spec, path)
        if entry.memory and entry.memory > budget:
            raise CannotServe(f"{name} is to have {size(entry.memory)}, and all models together have {size(budget)}")
        models.append(
            Model(
                name,
                entry.memory or (budget if len(entries) == 1 else default_claim(weights, budget)),
                tuple(entry.aliases),
                tuple(adapters),
                entry.pin,
                entry.settings.idle_ttl,
                entry.settings.task,
                weights,
                broken,
            )
        )
        configs[name] = cast_config(entry.settings, name, path, adapters, Path())
    if all(model.broken for model in models):
        raise CannotServe("none of the models can be served")
    try:
        residency = Residency(models, budget)
    except ValueError as error:
        raise CannotServe(str(error)) from None
    preload = (models[0].name,) if settings.preload is None else tuple(settings.preload)
    for name in preload:
        if residency.find(name) is None:
            raise CannotServe(f"--preload: there is no model {name!r}; there are {', '.join(residency.places)}")
    return HousePlan(residency, configs, preload, settings.drain_timeout)


def default_budget() -> int:
    """Bytes that all engines may take together: what a single one would. Raises CannotServe."""
    asked = subprocess.run([sys.executable, "-P", "-c", ASK_LIMIT], capture_output=True, text=True)
    if asked.returncode:
        raise CannotServe(f"the device does not tell its memory; give --models-memory: {asked.stderr[-500:]}")
    return int(asked.stdout)


def _house(plan: HousePlan, run_dir: RunDirectory, http: HttpSpec, keep_log: Callable[[bytes], None]) -> House:
    def on_ready(residency: Residency, table: Supervision) -> None:
        print_welcome(http.url, run_dir.name, residency, table)

    return House(plan, run_dir, http, on_ready, keep_log=keep_log)


def print_welcome(url: str, name: str, residency: Residency, table: Supervision) -> None:
    """Say where the server listens, what it serves, and how to try it."""
    console = Console(highlight=False, soft_wrap=True)
    workers = "  ".join(f"{slot.name} {slot.pid}" for slot in table.slots)
    first, count = next(iter(residency.places)), len(residency.places)
    models = "1 model" if count == 1 else f"{count} models"
    console.print(f"[bold]Callboard[/bold] serves {models} within {size(residency.budget)}")
    for place in residency.places.values():
        note = f", {place.message or place.model.broken}" if place.message or place.model.broken else ""
        pinned = ", pinned" if place.pinned else ""
        console.print(f"  {place.model.name}: {place.state}, {size(place.model.claim)}{pinned}{note}", markup=False)
    console.print(f"  HTTP    {url}/v1")
    console.print(f"  watch   {url}/admin")
    console.print(f"  ZeroMQ  protocol.Client({name!r}, model={first!r})", markup=False)
    console.print(f"  actors  {workers}")
    console.print("Try it:")
    print(
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d "
        f'\'{{"model": "{first}", "messages": [{{"role": "user", "content": '
        f'"What is the capital of France?"}}], "temperature": 0}}\'',
        flush=True,
    )
