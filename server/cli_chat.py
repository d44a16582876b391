"""`callboard chat`: a chat in the terminal, over ZeroMQ, with a running server or one of its own."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from protocol import Client
from protocol.endpoints import running_servers
from protocol.errors import CallboardError, ServerNotFound

START_LIMIT = 600.0  # seconds a server of our own may take to get ready, with a download


def chat(args: argparse.Namespace) -> int:
    """Talk until the end of input. 0 after an orderly end, 1 when there is no server to talk to."""
    console = Console(highlight=False)
    own: subprocess.Popen[bytes] | None = None
    name, model = args.name, args.model
    try:
        if name is None and not running_servers() and not os.environ.get("CALLBOARD_ENDPOINT"):
            name = f"chat-{os.getpid()}"
            own = start_server(model or "demo", name, console)
            model = None
        if model and Path(model).is_dir():  # which is served by the folder's name
            model = Path(model).resolve().name
        with Client(name, model=model) as client:
            models = model or ", ".join(card.name for card in client.models())
            console.print(f"[dim]{models}: /reset forgets the chat, Ctrl-C stops an answer, Ctrl-D ends[/dim]")
            _talk(client, args, console)
    except CallboardError as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    finally:
        if own is not None:
            own.terminate()
            own.wait()
    return 0


def start_server(model: str, name: str, console: Console) -> "subprocess.Popen[bytes]":
    """A server of our own with `model`, once it serves. Raises ServerNotFound with its log when it doesn't."""
    log = tempfile.TemporaryFile()  # noqa: SIM115 the child keeps it open
    command = [sys.executable, "-P", "-m", "server.cli", "serve", model, "--port", "0", "--name", name]
    # A session of its own: Ctrl-C in the terminal stops an answer, not the server.
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        with console.status(f"starting a server with {model} …"):
            if _wait_until_ready(process, name):
                return process
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.poll() is None:
        process.terminate()
    process.wait()
    log.seek(0)
    raise ServerNotFound("server_not_found", f"no server could be started:\n{log.read().decode(errors='replace')}")


def _wait_until_ready(process: "subprocess.Popen[bytes]", name: str) -> bool:
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until and process.poll() is None:
        if any(record.name == name for record in running_servers()):
            with Client(name) as client:
                if client.models():
                    return True
        time.sleep(0.2)
    return False


def _talk(client: Client, args: argparse.Namespace, console: Console) -> None:
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages: list[dict[str, Any]] = list(opening)
    options = {
        name: value
        for name, value in (("temperature", args.temperature), ("max_tokens", args.max_tokens))
        if value is not None
    }
    while True:
        try:
            said = console.input("[bold]> [/bold]").strip()
        except EOFError:
            print()
            return
        if not said:
            continue
        if said in ("/exit", "/quit"):
            return
        if said == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": said})
        answer = _answer(client, messages, options, console)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(client: Client, messages: list[dict[str, Any]], options: dict[str, Any], console: Console) -> str | None:
    """Stream one answer to the terminal. None when it failed, so that the question is not kept."""
    stream = client.generate(messages=messages, **options)
    pieces = []
    began = time.monotonic()
    tokens = 0
    try:
        for delta in stream:
            pieces.append(delta.text)
            tokens += delta.count
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.cancel()
    except CallboardError as error:
        print(f"\n{error}", file=sys.stderr)
        return None
    seconds = time.monotonic() - began
    print()
    console.print(f"[dim]{tokens} tokens, {tokens / seconds:.1f} per second[/dim]")
    return "".join(pieces)
