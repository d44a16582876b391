"""The client libraries people really use, against a server with the tiny model."""

import shutil
from pathlib import Path

import pytest

from bench.checks import clients
from bench.checks.report import Report
from bench.harness import RunningServer
from server.models.cache import cache_root


@pytest.mark.parametrize(
    "by",
    [clients.by_openai_chat, clients.by_openai_options, clients.by_openai_responses, clients.by_anthropic],
)
def test_clients_in_process(server: RunningServer, report: Report, by):
    by(report, server)
    assert report.failures == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_langchain(server: RunningServer, report: Report):
    clients.by_langchain(report, server)
    assert report.failures == []


def test_litellm(server: RunningServer, report: Report):
    clients.by_litellm(report, server)
    assert report.failures == []


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_npm(server: RunningServer, report: Report):
    clients.by_npm(report, server, cache_root() / "npm-clients")
    assert report.failures == []


def test_a_full_server_is_asked_again(tiny_model: Path, report: Report):
    with RunningServer(tiny_model, "--max-num-seqs", "2") as full:
        clients.retries(report, full, running=2, waiting=32)
    assert report.failures == []
