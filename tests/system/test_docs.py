"""The curl lines of docs/api.md work, and every endpoint has one."""

import re

import pytest

from bench.curl_lines import POOLED, curl_lines, run_curl
from bench.harness import RunningServer
from server.openapi import OPERATIONS

LINES = curl_lines()


@pytest.mark.parametrize("line", [line for line in LINES if not any(path in line for path in POOLED)])
def test_curl_lines_work(server: RunningServer, line: str):
    status, body = run_curl(line, server.url)
    assert status == (404 if "0123" in line else 200), body


def test_every_endpoint_has_a_curl_line():
    for one in OPERATIONS:
        path = re.sub(r"\{\w+\}", "[^/ ]+", one.path)
        method = "-X DELETE " if one.method == "delete" else ""
        assert any(re.search(rf"{method}.*\$URL{path}( |$)", line) for line in LINES), one.path
