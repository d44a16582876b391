"""The client libraries people really use, against a server with the tiny model."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checks import clients, fair_clients, node, retries
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


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_node_example(server: RunningServer, report: Report):
    node.node_client(report, server, cache_root() / "node-example")
    assert report.failures == []


@pytest.fixture(scope="module")
def small_server(tiny_model: Path) -> Iterator[RunningServer]:
    """A server that runs two rows at a time, and lets 32 wait."""
    with RunningServer(tiny_model, "--max-num-seqs", "2") as running:
        yield running


def test_a_full_server_is_asked_again(small_server: RunningServer, report: Report):
    folder = cache_root() / "npm-clients" if shutil.which("npm") else None
    retries.retries(report, small_server, folder, running=2, waiting=32)
    assert report.failures == []


def test_a_client_that_floods_does_not_keep_others_waiting(small_server: RunningServer, report: Report):
    small_server.wait_idle()
    fair_clients.fair_clients(report, small_server, seats=2, flood=60, tokens=20, asked=4)
    assert report.failures == []
    assert report.figures["flood_refused"] > 0
