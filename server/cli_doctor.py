"""`callboard doctor`: looks for what keeps a server from running well, and says how to mend each thing."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from server.cli_doctor_checks import (
    Finding,
    blas,
    device,
    disk,
    files,
    home_folder,
    hub,
    memory,
    model_files,
    port_is_free,
    servers,
)
from server.models.errors import ModelError
from server.models.resolve import DEMO, check_folder

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """All findings, one after the other."""
    looks: list[Callable[[], Iterator[Finding]]] = [
        device,
        blas,
        memory,
        files,
        home_folder,
        lambda: disk(args.ssd_cache_dir),
        lambda: port_is_free(args.port),
        servers,
        hub,
    ]
    if args.model:
        looks.append(lambda: _model(args.model))
    for look in looks:
        yield from look()


def _model(name: str) -> Iterator[Finding]:
    folder = Path(name).expanduser()
    if name == DEMO:
        yield Finding("ok", "model", "the demo model is made when it is served")
        return
    if not folder.exists():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except Exception:  # the library's errors for names and caches are many
            yield Finding(
                "error", "model", f"{name} is neither a folder nor in the hub's cache", f"callboard pull {name}"
            )
            return
    try:
        check_folder(folder, name)
    except ModelError as error:
        yield Finding("error", "model", str(error), f"fetch its files anew, for example with `callboard pull {name}`")
        return
    yield from model_files(folder, name)


def doctor(args: argparse.Namespace) -> int:
    """Examine this machine. 0 when nothing keeps a server from running, 1 otherwise."""
    import msgspec
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    worst = 0
    for finding in examine(args):
        worst = max(worst, finding.level == "error")
        if args.json:
            print(msgspec.json.encode(finding).decode())
            continue
        mark, colour = _MARKS[finding.level]
        console.print(Text.assemble((f"{mark} ", colour), (f"{finding.what}: ", "bold"), finding.found))
        if finding.remedy:
            console.print(Text.assemble("    ", ("→ ", colour), finding.remedy))
    sys.stdout.flush()
    return int(worst)
