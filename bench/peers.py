"""Other MLX servers under the same load: each in an environment of its own, on the same model and BLAS.

    python bench/peers.py mlx_lm.server MODEL [--streams 256] [--json FILE]
    python bench/peers.py --list

A peer is installed once, versions pinned, into Callboard's cache folder; it then runs as it comes, offline, with one
BLAS thread. The load is the stress harness's over HTTP, streamed, with the same prompts for all. A peer
that doesn't know `ignore_eos` may end a stream early, which then counts as failed.
"""

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
from rich.console import Console
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.blas import blas_environment
from actors.supervisor import raise_file_limit
from bench.ask import post
from bench.facts import machine_facts
from bench.harness import exit_on_sigterm, wait_until
from bench.load.driver import Progress, run_load
from bench.load.over_http import HttpLoad
from bench.load.plan import Ask, Plan
from bench.load.summary import Summary, summarize, table
from bench.load.timeline import Timeline
from server.models.cache import cache_root

START = 120.0  # seconds


class Peer(msgspec.Struct, frozen=True):
    """How a peer is installed and started; `{bin}`, `{model}` and `{port}` are filled in."""

    packages: list[str]
    command: list[str]
    environment: dict[str, str] = {}
    best: list[str] = []  # options that serve a crowd best, as far as its own help tells

    def at_its_best(self) -> "Peer":
        """The same peer with its best settings."""
        return msgspec.structs.replace(self, command=[*self.command, *self.best])


_HOST = ["--host", "127.0.0.1", "--port", "{port}"]
_VLLM_MLX = ["{bin}/vllm-mlx", "serve", "{model}", *_HOST, "--offline", "--continuous-batching"]
_CROWD = ["--max-num-seqs", "256", "--prefill-batch-size", "32", "--completion-batch-size", "256"]
PEERS = {
    "mlx_lm.server": Peer(
        ["mlx-lm==0.32.2", "mlx[cpu]==0.32.4"],
        ["{bin}/mlx_lm.server", "--model", "{model}", *_HOST],
        best=["--decode-concurrency", "256", "--prompt-concurrency", "32", "--log-level", "ERROR"],
    ),
    "vllm-mlx": Peer(["vllm-mlx==0.6.0", "mlx[cpu]"], _VLLM_MLX, best=_CROWD),
    "vllm-mlx-paged": Peer(["vllm-mlx==0.6.0", "mlx[cpu]"], [*_VLLM_MLX, "--use-paged-cache"], best=_CROWD),
    "rapid-mlx": Peer(
        ["rapid-mlx==0.16.10", "mlx[cpu]"],
        ["{bin}/rapid-mlx", "serve", "{model}", *_HOST],
        {"RAPID_MLX_TELEMETRY": "0"},
        best=[*_CROWD, "--max-concurrent-requests", "1024", "--log-level", "ERROR"],
    ),
}


def installed(peer: Peer) -> Path:
    """The folder of commands of the peer's environment, made when it isn't there. Raises CalledProcessError."""
    name = "-".join(sorted(peer.packages)).translate(str.maketrans("[]=", "--_"))
    folder = cache_root() / "peers" / name
    done = folder / ".complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *peer.packages], check=True)
        done.touch()
    return folder / "bin"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(peer: Peer, model: Path) -> Iterator[tuple[str, int]]:
    """Start a peer; yields its URL and pid once it has answered. Raises TimeoutError, with its output."""
    commands = installed(peer)
    port = free_port()
    command = [part.format(bin=commands, model=model, port=port) for part in peer.command]
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment = inherited | blas_environment(1) | {"HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment | peer.environment, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} exited with {process.returncode}")
            body = {"model": str(model), "prompt": "a", "max_tokens": 1}
            with contextlib.suppress(OSError):
                return post(f"{url}/v1/completions", body, timeout=30).status == 200
            return False

        try:
            wait_until(answers, START, "the peer answers")
            yield url, process.pid
        except (TimeoutError, RuntimeError) as error:
            log.seek(0)
            raise type(error)(f"{error}\n{log.read()[-3000:].decode(errors='replace')}") from None
        finally:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()


class TextLoad(HttpLoad):
    """The load with prompts of text, which is all that some peers take: words that are one token each."""

    def __init__(self, plan: Plan, url: str, model: Path) -> None:
        super().__init__(plan, url)
        self._words = one_token_words(model)

    def prompt(self, ask: Ask) -> str:
        return "".join(self._words[number % len(self._words)] for number in ask.ids)


@lru_cache
def one_token_words(model: Path) -> list[str]:
    """Words with a space before them that the model's tokenizer turns into one token each, also in a row."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    pieces = (tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size()))
    words = [piece for piece in pieces if re.fullmatch(" [a-z]{3,}", piece)]
    return [word for word in words if len(tokenizer.encode(word + word, add_special_tokens=False).ids) == 2]


async def load(url: str, pids: Mapping[str, int], plan: Plan, model: Path, cut: float | None = None) -> Summary:
    """Drive one workload of texts against a server; what isn't over after `cut` seconds is given up."""
    progress = Progress(plan)
    timeline = Timeline(pids, counts=lambda: progress.counts)
    async with TextLoad(plan, url, model) as client, timeline.watch():
        outcomes = await run_load(client, progress, cut)
    return summarize(plan, outcomes, timeline)


def measure(name: str, model: Path, plan: Plan) -> Summary:
    """Start the peer called `name` on a model folder and drive the plan against it."""
    raise_file_limit()
    with running(PEERS[name], model) as (url, pid):
        return uvloop.run(load(url, {"peer": pid}, msgspec.structs.replace(plan, model=str(model)), model))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", choices=sorted(PEERS))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--list", action="store_true", help="print the names of the peers")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=220)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.list:
        print("\n".join(PEERS))
        return 0
    if args.peer is None or args.model is None:
        parser.error("name a peer and a model folder")
    exit_on_sigterm()
    plan = Plan(
        via="http",
        streams=args.streams,
        requests=args.streams,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        vocab_size=args.vocab_size,
    )
    summary = measure(args.peer, args.model, plan)
    Console().print(table(summary))
    if args.json is not None:
        result: dict[str, Any] = {"peer": args.peer, "result": summary, "machine": machine_facts()}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return 0 if summary.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
