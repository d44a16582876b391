"""A real system under load and faults: short forms of the checks in `bench/checks/{recovery,hostile,soaks}.py`."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checks import hostile, kinds, recovery, soaks, surroundings
from bench.checks.report import Report
from bench.faults.inject import Faults
from bench.harness import RunningServer
from server.cli import main

pytestmark = pytest.mark.timeout(90)

LATE = 20.0  # seconds, where the machine may be busy with other tests
SILENCE = 4.0  # seconds until an actor other than the engine counts as hanging; its clients know after three


@pytest.fixture(scope="module")
def breakable(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as links that a test may remove."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """What is to go wrong in the server."""
    folder = tmp_path_factory.mktemp("faults")
    return Faults(folder, *recovery.poison_faults(), *kinds.row_faults(folder), silence=SILENCE)


@pytest.fixture(scope="module")
def server(breakable: Path, faults: Faults) -> Iterator[RunningServer]:
    """A server with faults, whose engine counts as hanging after 2 s, and others after 4 s."""
    arguments = ("--http-workers", "2", "--tokenizers", "2", "--hang-timeout", "2")
    with RunningServer(breakable, *arguments, environment=faults.environment()) as running:
        yield running


@pytest.fixture
def report(server: RunningServer) -> Iterator[Report]:
    """A report of a check, all of whose claims have to hold."""
    server.wait_ready(30)
    report = Report(print)
    yield report
    if report.failures:
        print(server.log()[-4000:])
    assert report.failures == []


def test_an_engine_that_hangs_is_replaced_and_its_streams_go_on(
    server: RunningServer, tiny_model: Path, report: Report
):
    recovery.engine_faults(
        report, server, tiny_model, streams=12, tokens=300, times=1, how=signal.SIGSTOP, pause=0.2, spare=LATE
    )


def test_a_streamer_that_hangs_is_replaced_and_its_clients_go_on(server: RunningServer, report: Report):
    recovery.front_deaths(report, server, "streamer", 4, signal.SIGSTOP, LATE)


def test_poison_fails_alone(server: RunningServer, tiny_model: Path, report: Report):
    recovery.poison(report, server, tiny_model, streams=6, tokens=150)


def test_rows_of_every_kind_survive_the_death_of_the_engine(server: RunningServer, report: Report):
    kinds.kinds(report, server, tokens=120, kills=1, each=1)


def test_the_engine_may_die_building_a_grammar_and_when_choices_join(
    server: RunningServer, faults: Faults, report: Report
):
    kinds.unlucky_moments(report, server, faults.folder, 30)


def test_cut_frames_and_a_clock_that_jumps_lose_nothing(
    server: RunningServer, faults: Faults, tiny_model: Path, report: Report
):
    routes = ["streamer engine", "tokenizer streamer"]
    surroundings.cut_frames(report, server, faults, tiny_model, streams=4, tokens=30, routes=routes)
    surroundings.clock_jump(report, server, faults, streams=4, tokens=400)


def test_malformed_requests_disturb_nobody(server: RunningServer, tiny_model: Path, report: Report):
    hostile.malformed(report, server, tiny_model, count=400, streams=6, tokens=30)


def test_clients_that_vanish_leave_nothing(server: RunningServer, report: Report):
    hostile.vanishing(report, server, 60)


def test_nothing_is_lost_or_left_after_faults_of_every_kind(
    server: RunningServer, faults: Faults, tiny_model: Path, report: Report
):
    soaks.soak(report, server, faults, tiny_model, streams=12, tokens=40, every=0.9, distinct=24)


def test_the_engine_is_replaced_on_demand(server: RunningServer, report: Report, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CALLBOARD_HOME", str(server.home))

    def ask() -> None:  # in this process, as starting another one takes longer than the streams
        assert main(["restart-engine"]) == 0

    recovery.replaced_on_demand(report, server, streams=6, tokens=300, ask=ask)


def test_an_engine_that_cannot_come_back_ends_the_system(server: RunningServer, breakable: Path):
    """The last test: it ends the server."""
    server.wait_ready(30)
    (breakable / "model.safetensors").unlink()
    server.kill("engine")
    assert server.wait(60) == 1
    last = server.log().strip().splitlines()[-1]
    assert last.startswith("callboard: engine can't start")
    assert "3 in a row" in last
    assert server.leftover() == []
    assert not list((server.home / "run").iterdir())
