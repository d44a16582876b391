"""Checks of `/metrics` on running servers: docs/metrics.md names all that is served and no more, and promtool (Debian's
package `prometheus`) finds nothing.
"""

import re
import shutil
import subprocess

from bench.ask import get
from bench.checks.report import Report
from bench.harness import ROOT, RunningServer

COLON = "metric names should not contain ':'"  # which all of vLLM's do
OF_SEVERAL = "callboard_model"  # with which begin those that only a server of several models has


def text_of(server: RunningServer, names: str) -> str:
    """What the server shows Prometheus under `callboard` or `vllm` names."""
    text = get(f"{server.url}/metrics?names={names}").body
    assert isinstance(text, str)
    return text


def documented(report: Report, server: RunningServer) -> None:
    """The guide and the server name the same metrics."""
    guide = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    several = bool(server.record and server.record.models)
    for names, pattern in (("callboard", r"^\| `(callboard_\w+)` \|"), ("vllm", r"`(vllm:\w+)`")):
        told = {name for name in re.findall(pattern, guide, re.MULTILINE) if several or not name.startswith(OF_SEVERAL)}
        served = set(re.findall(r"^# TYPE (\S+) ", text_of(server, names), re.MULTILINE))
        report.measured(f"{names}_metrics", len(served))
        report.expect(served == told, f"the guide names the {names} metrics of {server.name}", sorted(served ^ told))


def clean(report: Report, server: RunningServer) -> None:
    """promtool finds nothing in either set of names."""
    if shutil.which("promtool") is None:
        report.expect(False, "promtool is installed (Debian's package prometheus)")
        return
    for names in ("callboard", "vllm"):
        text = text_of(server, names)
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        found = [line for line in (done.stdout + done.stderr).splitlines() if names != "vllm" or COLON not in line]
        report.expect(not found, f"promtool finds nothing in the {names} metrics of {server.name}", found)
