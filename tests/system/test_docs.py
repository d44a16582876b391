"""The curl lines of docs/api.md work."""

import re
import subprocess
from pathlib import Path

import pytest

from bench.harness import RunningServer

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.replace("\\\n", "").splitlines()
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[1].removeprefix("$URL"))
def test_curl_lines_work(server: RunningServer, line: str):
    command = f"curl() {{ command curl -sS --noproxy '*' -w '\\n%{{http_code}}' \"$@\"; }}; URL={server.url}; {line}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == ("404" if "/cancel" in line else "200"), done.stdout
