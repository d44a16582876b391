"""The curl lines of docs/api.md, run as a reader would."""

import re
import subprocess

from bench.harness import ROOT

POOLED = ("/v1/embeddings", "/v1/rerank")  # served by servers that were started for them
SEVERAL = "$URL/models/"  # what is for servers of several models


def api_text() -> str:
    """The page."""
    return (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def curl_lines() -> list[str]:
    """All of them, in their order."""
    blocks = re.findall(r"```sh\n(.*?)```", api_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines() if line.startswith("curl ")]


def run_curl(line: str, url: str) -> tuple[int, str]:
    """The status and the body that a line gets from the server at `url`. Raises CalledProcessError."""
    command = f"curl() {{ command curl -sS --noproxy '*' -w '\\n%{{http_code}}' \"$@\"; }}; URL={url}; {line}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body
