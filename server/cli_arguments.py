"""Arguments of the commands around the server; the commands themselves are imported when they run."""

import argparse
from pathlib import Path

from server.cli_cache import default_directory

PROMPTS = (256, 1024, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHELLS = ("bash", "zsh", "tcsh")


def add_other_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add those that look at servers, models and this machine."""
    commands.add_parser("ps", help="list the running servers")
    stop = commands.add_parser("stop", help="stop a running server; what runs may finish first")
    stop.add_argument("names", metavar="NAME", nargs="*", help="names of servers (default: the only one)")
    stop.add_argument("--all", action="store_true", help="stop all of them")
    stop.add_argument("--now", action="store_true", help="don't wait for running requests")

    top = commands.add_parser("top", help="watch a running server: actors, throughput, streams")
    top.add_argument("--name", help="name of the running server (default: the only one)")
    top.add_argument("--model", help="of several models the one to watch (default: the first that is loaded)")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    top.add_argument("--once", action="store_true", help="print it once")

    for action, text in (
        ("load", "load a model of a running server of several"),
        ("unload", "unload one: its streams may finish, its memory comes back"),
        ("pin", "load a model of a running server of several, and have it stay"),
        ("unpin", "let it be unloaded again when others need its memory"),
    ):
        order = commands.add_parser(action, help=text)
        order.add_argument("model", metavar="MODEL", help="its name or an alias, see `callboard ps`")
        order.add_argument("--name", help="name of the running server (default: the only one)")
        if action == "load":
            stay = "seconds it may stay without streams; -1 for ever (default: as the server was told)"
            order.add_argument("--keep-alive", type=float, metavar="S", help=stay)

    commands.add_parser("ls", help="list the models on this machine")
    pull = commands.add_parser("pull", help="fetch a model from the hub; files that are whole stay when it breaks off")
    pull.add_argument("model", metavar="MODEL", help="a hub id such as mlx-community/Qwen3-4B-4bit, or `demo`")
    rm = commands.add_parser("rm", help="remove a model from this machine")
    rm.add_argument("model", metavar="MODEL", help="its name in `callboard ls`")
    rm.add_argument("--yes", "-y", action="store_true", help="don't ask")

    doctor = commands.add_parser("doctor", help="look for what keeps a server from running well; say how to mend it")
    doctor.add_argument("model", metavar="MODEL", nargs="?", help="also read the files of this folder or hub model")
    doctor.add_argument("--port", type=int, default=8000, help="port that `serve` would take (default: 8000)")
    doctor.add_argument("--ssd-cache-dir", type=Path, metavar="DIR", default=default_directory(), help="SSD cache")
    doctor.add_argument("--json", action="store_true", help="as JSON lines")

    bench = commands.add_parser("bench", help="measure a running server, or one started for it")
    bench.add_argument("model", metavar="MODEL", nargs="?", help="serve this model for it")
    bench.add_argument("--name", help="name of the running server to measure (default: the only one)")
    bench.add_argument("--model", dest="wanted", metavar="MODEL", help="which of its models (default: the first)")
    bench.add_argument("--prompts", type=_numbers, default=PROMPTS, metavar="N,…", help="lengths of prompts, in tokens")
    bench.add_argument("--batches", type=_numbers, default=BATCHES, metavar="N,…", help="streams at once")
    bench.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per stream (default: 64)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")

    completion = commands.add_parser("completion", help='shell completion: eval "$(callboard completion bash)"')
    completion.add_argument("shell", choices=SHELLS)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not all(number > 0 for number in numbers):
        raise ValueError
    return numbers
