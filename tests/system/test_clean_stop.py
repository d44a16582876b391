"""An orderly stop is orderly for every process: no abort, no traceback, nothing killed."""

from bench.harness import RunningServer
from bench.models import tiny_model
from protocol import Client


def test_no_process_aborts_when_the_server_is_stopped() -> None:
    for _ in range(3):
        with RunningServer(tiny_model()) as server:
            with Client(endpoint=server.endpoint) as client:
                client.tokenize("hello " * 40_000)
                client.generate("hello", max_tokens=3).text()
            server.terminate()
            server.wait(20)
            log = server.log()
        for word in ("Assertion", "Traceback", "killed, as it did not stop", "Aborted"):
            assert word not in log, log[-2000:]
