"""Check of the client in `examples/node`, which is written from docs/protocol.md alone."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench.checks.report import Report
from bench.harness import ROOT, RunningServer, clean_environment
from protocol import Client

EXAMPLE = ROOT / "examples" / "node"
DOCUMENT = ROOT / "docs" / "protocol.md"
QUESTION = "Straße, 漢字 😀: what is the capital of France?"


def install_npm(source: Path, folder: Path) -> None:
    """Make `folder` hold the files of `source` and their packages, which are fetched once.

    Raises CalledProcessError, and FileNotFoundError without npm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    locked = folder / "node_modules" / ".package-lock.json"
    lock = (source / "package-lock.json").read_bytes()
    old = folder / "package-lock.json"
    fresh = locked.exists() and old.exists() and old.read_bytes() == lock
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if not fresh:
        command = ["npm", "ci", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)


def node_client(report: Report, server: RunningServer, folder: Path) -> None:
    """Its frames are the document's, it reads the document's, and it streams a chat as the Python client does."""
    install_npm(EXAMPLE, folder)
    _frames(report, folder)
    _chat(report, server, folder)


def documented_frames() -> tuple[list[str], list[str]]:
    """The frames of the document, in hexadecimal: those that clients send, and those that they get."""
    blocks = re.findall(r"```frame\n\[(\d+),.*?\n((?:[0-9a-f]+\n)+)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    frames = [(int(tag) < 20, frame.replace("\n", "")) for tag, frame in blocks]
    return [frame for ours, frame in frames if ours], [frame for ours, frame in frames if not ours]


def _frames(report: Report, folder: Path) -> None:
    sends, gets = documented_frames()
    found: Any = json.loads(_node(folder, "frames.mjs", *gets).stdout)
    # The document has a call, too, that this client doesn't know.
    report.expect(set(found["sends"]) < set(sends), "the frames it sends stand in the document", found["sends"])
    report.measured("frames_compared", len(found["sends"]))
    texts = {"deltas": 0, "ends": 0}
    for read in found["reads"]:
        texts["deltas"] += len(read.get("deltas", ()))
        texts["ends"] += len(read.get("ends", ()))
    report.expect(texts == {"deltas": 3, "ends": 3}, "it reads the document's deltas and ends", found["reads"])


def _chat(report: Report, server: RunningServer, folder: Path) -> None:
    done = _node(folder, "chat.mjs", QUESTION, home=server.home)
    with Client(endpoint=server.endpoint) as client:
        ours = client.generate(messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=60)
        text = ours.text()
    assert ours.end is not None
    report.measured("text", done.stdout[:200])
    report.expect(done.returncode == 0 and done.stdout == text != "", "it streams what the Python client gets", text)
    usage = ours.end.usage
    summary = f"[{ours.end.reason}; {usage.prompt_tokens} + {usage.completion_tokens} tokens]"
    report.expect(done.stderr.strip() == summary, "and tells how it ended", done.stderr[-400:])


def _node(folder: Path, script: str, *arguments: str, home: Path | None = None) -> "subprocess.CompletedProcess[str]":
    environment = clean_environment() | ({"CALLBOARD_HOME": str(home)} if home else {})
    environment |= {"PATH": os.environ["PATH"]}
    command = ["node", str(folder / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
