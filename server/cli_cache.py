"""`callboard cache`: look at, verify, prune and clear the prefix blocks on the SSD, also while servers use them."""

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from server.models.cache import cache_root

if TYPE_CHECKING:
    from cache_store.maintenance import ModelUsage

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def add_cache_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `cache`."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--ssd-cache-dir",
        type=Path,
        metavar="DIR",
        default=default_directory(),
        help="the cache's directory (default: %(default)s)",
    )
    commands = parser.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    commands.add_parser("stats", parents=[where], help="sizes, hit rates and ages, per model")
    ls = commands.add_parser("ls", parents=[where], help="list blocks, most recently used first")
    ls.add_argument("--model", help="only those of this model (name, or beginning of its fingerprint)")
    ls.add_argument("--lines", type=int, default=50, metavar="N", help="at most N of them; 0 for all (default: 50)")
    commands.add_parser("verify", parents=[where], help="read every block and mend what is wrong (exit code 1)")
    prune = commands.add_parser("prune", parents=[where], help="remove what was used longest ago")
    prune.add_argument("--max-gb", type=float, metavar="GB", help="until so much is left")
    prune.add_argument("--unused", type=_age, metavar="AGE", help="what was not used for so long: 90m, 12h or 30d")
    clear = commands.add_parser("clear", parents=[where], help="remove everything, or one model")
    clear.add_argument("--model", help="only this model (name, or beginning of its fingerprint)")


def default_directory() -> Path:
    """Where servers keep their blocks unless told otherwise."""
    override = os.environ.get("CALLBOARD_SSD_CACHE_DIR")
    return Path(override).expanduser() if override else cache_root() / "prefix"


def cache(args: argparse.Namespace) -> int:
    """Run one of the commands. 0 when all is well, 1 when something was wrong or the directory can't be used."""
    import lmdb

    from cache_store import maintenance
    from cache_store.directory import Refused

    root: Path = args.ssd_cache_dir
    if args.cache_command == "prune" and args.max_gb is None and args.unused is None:
        print("callboard: say what to prune with --max-gb or --unused", file=sys.stderr)
        return 2
    if not maintenance.exists(root):
        print(f"There is no cache in {root}.")
        return 0
    try:
        if args.cache_command == "stats":
            return _stats(root)
        if args.cache_command == "ls":
            return _ls(root, args.model, args.lines)
        if args.cache_command == "verify":
            return _verify(root)
        if args.cache_command == "prune":
            most = int(args.max_gb * 1e9) if args.max_gb is not None else None
            blocks, nbytes = maintenance.prune(root, max_bytes=most, unused_seconds=args.unused)
        else:
            blocks, nbytes = maintenance.clear(root, args.model)
    except KeyError:
        print(f"callboard: no model {args.model!r} in this cache; `callboard cache stats` lists them", file=sys.stderr)
        return 1
    except (Refused, OSError, lmdb.Error) as error:
        print(f"callboard: the cache in {root} can't be used: {error}", file=sys.stderr)
        return 1
    print(f"Removed {blocks} blocks, {size(nbytes)}.")
    return 0


def _stats(root: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    from cache_store import maintenance

    usage = maintenance.usage(root)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold")
    table.add_column("fingerprint")
    for column in ("blocks", "snapshots", "size", "hit rate", "oldest", "last used"):
        table.add_column(column, justify="right")
    for model in usage.models:
        table.add_row(*_model_row(model))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(f"{root}: {size(usage.used_bytes)} of {size(usage.limit_bytes)} used", soft_wrap=True)
    if usage.quarantined_files:
        quarantined = f"{usage.quarantined_files} damaged files, {size(usage.quarantined_bytes)}"
        console.print(f"in quarantine: {quarantined}", soft_wrap=True)
    if usage.models:
        console.print(table)
    return 0


def _model_row(model: "ModelUsage") -> list[str]:
    rate = f"{model.hit_rate:.0%}" if model.hit_rate is not None else "-"
    oldest, used = (age(time.time() - at) if at else "-" for at in (model.oldest, model.last_used))
    counts = [str(model.blocks), str(model.snapshots), size(model.nbytes)]
    return [model.name, model.fingerprint[:12], *counts, rate, oldest, used]


def _ls(root: Path, model: str | None, lines: int) -> int:
    from cache_store import maintenance

    rows = maintenance.listing(root, model)
    now = time.time()
    for row in rows[: lines or None]:
        kind = "snapshot" if row.is_snapshot else "block"
        ages = f"{age(now - row.created):>5} {age(now - row.last_used):>5}"
        print(f"{row.key[:16]}  {row.parent[:16] or '-':16}  {kind:8} {size(row.nbytes):>9} {ages}  {row.model}")
    if lines and len(rows) > lines:
        print(f"… and {len(rows) - lines} more (--lines 0 shows all)")
    return 0


def _verify(root: Path) -> int:
    from cache_store import maintenance

    found = maintenance.verify(root)
    for line in found:
        print(line)
    print(f"{len(found)} things were wrong and have been mended." if found else "All blocks are right.")
    return 1 if found else 0


def size(nbytes: int) -> str:
    """Bytes for people, in decimal units."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def age(seconds: float) -> str:
    """A duration for people: its largest unit."""
    for name, unit in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= unit:
            return f"{seconds / unit:.0f}{name}"
    return f"{max(seconds, 0.0):.0f}s"


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write it like 90m, 12h or 30d")
    return float(match[1]) * _UNITS[match[2]]
