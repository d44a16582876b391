"""`bench/stress.py` and `bench/verify.py` as commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import ROOT, RunningServer, clean_environment


def run(script: str, *arguments: str, home: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a script of `bench/` to its end."""
    environment = clean_environment() | ({"CALLBOARD_HOME": str(home)} if home else {})
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=80,
    )


@pytest.mark.parametrize("via", ["http", "zmq"])
def test_stress_reports_as_table_and_json(server: RunningServer, tmp_path: Path, via: str):
    output = tmp_path / "result.json"
    arguments = ["--via", via, "--streams", "8", "--requests", "12", "--prompt-tokens", "20", "--max-tokens", "9"]
    stress = run("stress.py", *arguments, "--shared-prefix", "10", "--json", str(output), home=server.home)
    assert stress.returncode == 0, stress.stderr
    for line in ("completed", "failed", "tokens per second", "TTFT", "ITL", "peak memory engine"):
        assert line in stress.stdout
    result = json.loads(output.read_text())["result"]
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["completion_tokens"] == 12 * 9
    assert result["tokens_per_second"] > 0
    for spread in ("ttft_ms", "itl_ms"):
        assert 0 <= result[spread]["p50"] <= result[spread]["p95"] <= result[spread]["p99"] <= result[spread]["max"]
    assert result["peak_memory_mib"]["supervisor"] > 0
    assert str(server.home) not in output.read_text()


def test_stress_counts_failures_with_their_reason(server: RunningServer):
    stress = run("stress.py", "--url", server.url, "--streams", "2", "--prompt-tokens", "70000")
    assert stress.returncode == 1
    assert "2 × HTTP 400 context_length_exceeded" in " ".join(stress.stdout.split())


def test_stress_without_a_server_says_so(tmp_path: Path):
    stress = run("stress.py", home=tmp_path)
    assert stress.returncode == 2
    assert "no server is running" in stress.stderr


def test_verify_lists_its_checks_and_refuses_others():
    names = run("verify.py", "--list").stdout.split()
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (listed,) = (line for line in makefile.splitlines() if line.startswith("VERIFY :="))
    assert listed.removeprefix("VERIFY :=").split() == names
    refused = run("verify.py", "no-such-check")
    assert refused.returncode == 2
    assert "no-such-check" in refused.stderr
