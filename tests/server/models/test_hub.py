"""Downloads from a small hub on this machine, by children whose environment points there."""

import ast
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from server.models.hub import ALLOW_PATTERNS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama", "model_file": "custom.py"}',
    "model.safetensors": bytes(1 << 16),
    "tokenizer.json": b"{}",
    "custom.py": b"raise SystemExit('code of the hub ran')",
    "pytorch_model.bin": b"not wanted",
}
RESOLVE = """
import sys
from server.models.errors import ModelError
from server.models.resolve import resolve_model

try:
    print(resolve_model(sys.argv[1]))
except ModelError as error:
    print("refused:", error)
assert "mlx.core" not in sys.modules
"""


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that a download uses, for the models org/whole and org/gated."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/gated"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models/org/whole/revision/main":
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(200, json.dumps({"id": "org/whole", "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/org/whole/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(200, json.dumps(entries).encode())
        elif path.startswith(f"/org/whole/resolve/{COMMIT}/"):
            data = FILES[path.rpartition("/")[2]]
            self.answer(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests look at results."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(spec: str, home: Path, **settings: str) -> tuple[str, str]:
    """Output and error output of a child that resolves `spec` with the hub's cache in `home`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **settings}
    command = [sys.executable, "-P", "-c", RESOLVE, spec]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_downloads_once_and_then_works_offline(hub: str, tmp_path: Path) -> None:
    folder, progress = resolve("org/whole", tmp_path, HF_ENDPOINT=hub)
    names = {path.name for path in Path(folder).iterdir()}
    assert names == set(FILES) - {"pytorch_model.bin"}
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "100%" in progress
    assert resolve("org/whole", tmp_path, HF_HUB_OFFLINE="1")[0] == folder
    assert resolve("org/whole", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")[0] == folder


def test_offline_and_not_cached(tmp_path: Path) -> None:
    said, _ = resolve("org/whole", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("refused: HF_HUB_OFFLINE is set, and the hub's cache")
    said, _ = resolve("org/whole", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("refused: The hub can't be reached, and the hub's cache")


def test_an_unknown_model(hub: str, tmp_path: Path) -> None:
    said, _ = resolve("org/unknown", tmp_path, HF_ENDPOINT=hub)
    assert "no folder 'org/unknown' here, and the hub has no model of that name" in said


def test_a_gated_model(hub: str, tmp_path: Path) -> None:
    said, _ = resolve("org/gated", tmp_path, HF_ENDPOINT=hub)
    assert "org/gated is gated: accept its terms" in said


def test_a_name_the_hub_does_not_allow(tmp_path: Path) -> None:
    said, _ = resolve("org/a..b", tmp_path, HF_HUB_OFFLINE="1")
    assert "can't be the name of a hub model" in said


def test_takes_the_files_that_mlx_lm_takes() -> None:
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("utils.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEFAULT_ALLOW_PATTERNS":
            assert ast.literal_eval(node.value) == ALLOW_PATTERNS
            return
    pytest.fail("mlx_lm.utils no longer has DEFAULT_ALLOW_PATTERNS")
