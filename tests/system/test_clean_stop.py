"""An orderly stop is orderly for every process, however prefixes are cached: no abort, no traceback, nothing killed."""

import pytest

from bench.checks.prefix_trouble import cache_command
from bench.checks.prefixes import first_token, ids_of
from bench.harness import RunningServer
from bench.models import tiny_model
from protocol import Client


@pytest.mark.parametrize(
    ("arguments", "found", "kept"),
    [((), 512, 2), (("--no-ssd-cache",), 512, 0), (("--no-prefix-cache",), 0, 0)],
    ids=["default", "no-ssd-cache", "no-prefix-cache"],
)
def test_no_process_aborts_when_the_server_is_stopped(arguments: tuple[str, ...], found: int, kept: int) -> None:
    ids = ids_of(600, "stop")
    with RunningServer(tiny_model(), *arguments) as server:
        with Client(endpoint=server.endpoint) as client:
            client.tokenize("hello " * 40_000)
            assert [first_token(client, ids)[1] for _ in range(2)] == [0, found]
        server.terminate()
        server.wait(20)
        log = server.log()
        code, said = cache_command(server.home / "prefix", "stats")
    for word in ("Assertion", "Traceback", "killed, as it did not stop", "Aborted"):
        assert word not in log, log[-2000:]
    assert code == 0
    if kept:
        (row,) = (line.split() for line in said.splitlines() if line.startswith("tiny"))
        assert row[2] == str(kept)
    else:
        assert "There is no cache" in said
