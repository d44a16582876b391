"""Check of the API description: requests that schemathesis makes from it never break the server."""

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.result import Ok

from bench.ask import get
from bench.checks.report import Report
from bench.harness import RunningServer

# A server may say that it can't take more, never that it failed.
_BUSY = ("queue_full",)
_LENGTHS = {"/v1/responses": "max_output_tokens"}


def schemathesis_finds_nothing(report: Report, server: RunningServer, examples: int) -> None:
    """No request that the description allows, or nearly allows, is answered with a 5xx other than `queue_full`."""
    document = get(f"{server.url}/openapi.json").body
    api = schemathesis.openapi.from_dict(document)
    faults: list[Any] = []
    asked = 0
    for found in api.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()

        @seed(20)
        @settings(
            max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            nonlocal asked
            asked += 1
            if isinstance(case.body, dict):
                name = _LENGTHS.get(case.path, "max_tokens")
                if case.body.get(name) is None or isinstance(case.body[name], int | float):
                    case.body[name] = 2  # what is generated is not what is tested here
                case.body.pop("max_completion_tokens", None)
            response = case.call(base_url=server.url, timeout=60)
            if response.status_code >= 500 and not any(code in response.text for code in _BUSY):
                faults.append([case.method, case.path, response.status_code, response.text[:300], str(case.body)[:500]])

        ask()
    report.measured("requests", asked)
    report.expect(not faults, "no 5xx but queue_full", faults[:3])
    report.expect(get(f"{server.url}/health").body["status"] == "ok", "the server is well")
