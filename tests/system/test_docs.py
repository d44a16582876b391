"""The curl lines of docs/api.md work, and every endpoint that it names has one."""

import re

import pytest

from bench.curl_lines import POOLED, SEVERAL, api_text, curl_lines, run_curl
from bench.harness import RunningServer
from server.openapi import OPERATIONS

LINES = curl_lines()


@pytest.mark.parametrize("line", [line for line in LINES if not any(path in line for path in (*POOLED, SEVERAL))])
def test_curl_lines_work(server: RunningServer, line: str):
    status, body = run_curl(line, server.url)
    assert status == (404 if "0123" in line else 200), body


def test_every_endpoint_in_the_table_has_a_curl_line():
    asked = [path.split()[-1] for path in re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", api_text())]
    assert len(asked) > 10
    for path in asked:
        pattern = re.sub(r"\\{\w+\\}", "[^/ ]+", re.escape(path))
        assert any(re.search(rf"\$URL{pattern}( |$)", line) for line in LINES), path


BODIES = {one.body.__name__: one.body for one in OPERATIONS if one.body is not None}


@pytest.mark.parametrize("kind", [BODIES[name] for name in sorted(BODIES)], ids=sorted(BODIES))
def test_every_option_is_documented(kind: type):
    prose = re.sub(r"```.*?```", "", api_text(), flags=re.DOTALL)
    named = {word for quoted in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"\w+", quoted)}
    assert set(kind.__struct_fields__) - named == set()
