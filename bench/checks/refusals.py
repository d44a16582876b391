"""Checks of requests that are wrong: refused with a 400 that says why, and harming nobody."""

import threading
from typing import Any

from bench.ask import post
from bench.checks.report import Report
from bench.harness import RunningServer
from protocol import Client
from protocol.codec import CodecError

BAD_STOPS: list[Any] = [5, 1.5, True, {"a": 1}, [1], ["ok", None], [["nested"]], ""]
SURROGATE = rb'{"messages": [{"role": "user", "content": "a \ud83d b"}], "max_tokens": 4}'
SURROGATE_PROMPT = rb'{"prompt": "\udc00", "max_tokens": 4}'


class Bystander:
    """A stream that must come out the same with and without the trouble beside it."""

    def __init__(self, server: RunningServer, max_tokens: int = 200) -> None:
        self._server = server
        self._max_tokens = max_tokens
        self._beside = ""
        self._alone = self._run()

    def _run(self) -> str:
        with Client(endpoint=self._server.endpoint) as client:
            stream = client.generate(ids=range(1000, 1032), max_tokens=self._max_tokens, temperature=0, ignore_eos=True)
            return stream.text()

    def __enter__(self) -> "Bystander":
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()
        return self

    def _keep(self) -> None:
        self._beside = self._run()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    @property
    def undisturbed(self) -> bool:
        """Whether the text beside the trouble is the text alone."""
        return self._beside == self._alone != ""


def _expect_400(report: Report, server: RunningServer, path: str, body: Any, what: str) -> dict[str, Any]:
    answer = post(server.url + path, body)
    report.expect(answer.status == 400, f"{what} gets 400", (answer.status, answer.body))
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    fields = {"message", "type", "param", "code"}
    shaped = isinstance(error, dict) and error.keys() >= fields and bool(error["message"])
    report.expect(shaped, f"{what}: the error has OpenAI's shape", answer.body)
    return error if isinstance(error, dict) else {}


def bad_stop(report: Report, server: RunningServer) -> None:
    """`stop` of a wrong type gets 400 naming it, streamed or not, while a stream beside it is undisturbed."""
    with Bystander(server) as bystander:
        for stop in BAD_STOPS:
            for stream in (False, True):
                body = {"prompt": "hello", "max_tokens": 4, "stop": stop, "stream": stream}
                error = _expect_400(report, server, "/v1/completions", body, f"stop {stop!r}, stream {stream}")
                names_it = "stop" in f"{error.get('param')} {error.get('message')}"
                report.expect(names_it, "the error names stop", error)
    report.expect(bystander.undisturbed, "a stream beside it came out as it does alone")
    answer = post(f"{server.url}/v1/completions", {"prompt": "hello", "max_tokens": 4, "stop": None})
    report.expect(answer.status == 200, "the next request is served", answer.body)


def lone_surrogate(report: Report, server: RunningServer) -> None:
    """A lone surrogate gets 400 over HTTP, is refused by the client's codec, and harms nobody."""
    with Bystander(server) as bystander:
        _expect_400(report, server, "/v1/chat/completions", SURROGATE, "a lone surrogate in a message")
        _expect_400(report, server, "/v1/completions", SURROGATE_PROMPT, "a lone surrogate in a prompt")
        with Client(endpoint=server.endpoint) as client:
            try:
                client.generate("a \ud83d b")
                refused = False
            except CodecError:
                refused = True
            report.expect(refused, "the ZeroMQ client refuses to send one")
    report.expect(bystander.undisturbed, "a stream beside it came out as it does alone")
    report.expect(post(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200, "it serves on")
