"""The engine process as its streamer and its supervisor see it: a real process, real sockets, the tiny model."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from actors.base import Incarnation
from actors.config import CastConfig, write_config
from actors.engine.actor import RETRY_MS, EngineActor
from protocol.codec import encode, report_codec, step_codec
from protocol.control import ControlChannel
from protocol.endpoints import ipc_endpoint, run_root
from protocol.ids import unpack_ids
from protocol.messages import Abort, ActorReport, Alive, Attach, Probe, Ready, StartFailed, Step, Stop, Submit
from protocol.sockets import bind_router, connect_dealer

EPOCH = 7
PATIENCE_MS = 60_000


class EngineProcess:
    """One engine, with a supervisor's control socket and a streamer's socket."""

    def __init__(self, run_dir: Path, model: Path) -> None:
        run_dir.mkdir(parents=True)
        write_config(CastConfig(str(model), "tiny", str(run_dir), max_num_seqs=64))
        self.context = zmq.Context()
        self.control = bind_router(self.context, ipc_endpoint(run_dir, "control"))
        reader, self._lifeline = os.pipe()
        command = [sys.executable, "-P", "-m", "actors", "engine", "--run", str(run_dir)]
        command += ["--epoch", str(EPOCH), "--lifeline", str(reader)]
        self.process = subprocess.Popen(command, pass_fds=[reader], stderr=subprocess.DEVNULL)
        os.close(reader)
        self.streamers: list[zmq.Socket] = []

    def report(self) -> ActorReport:
        assert self.control.poll(PATIENCE_MS)
        self.peer, frame = self.control.recv_multipart()
        return report_codec.decode(frame)

    def order(self, message: Probe | Stop) -> None:
        self.control.send_multipart([self.peer, encode(message)])

    def streamer(self, endpoint: str) -> zmq.Socket:
        self.streamers.append(connect_dealer(self.context, endpoint))
        return self.streamers[-1]

    def close(self) -> None:
        os.close(self._lifeline)
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.control.close(0)
            for socket in self.streamers:
                socket.close(0)
            self.context.term()


@contextmanager
def running(name: str, model: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(run_root() / name, model)
    try:
        yield process
    finally:
        process.close()


class Streamer:
    """A streamer incarnation in front of the engine."""

    def __init__(self, engine: EngineProcess, endpoint: str, number: int) -> None:
        self.number = number
        self.socket = engine.streamer(endpoint)
        self.send(Attach(EPOCH, number))

    def send(self, message: object) -> None:
        self.socket.send(encode(message))

    def step(self) -> Step:
        assert self.socket.poll(PATIENCE_MS), "no step came"
        step = step_codec.decode(self.socket.recv())
        assert (step.epoch, step.streamer) == (EPOCH, self.number)
        assert len(step.rids) * 4 == len(step.tokens)
        assert len(step.ended) == len(step.reasons) == len(step.errors)
        return step

    def until_ended(self, rids: set[int]) -> tuple[dict[int, list[int]], dict[int, str]]:
        """Tokens of all rows, and reasons, once `rids` have ended."""
        tokens: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        while not rids <= set(reasons):
            step = self.step()
            for rid, token in zip(step.rids, unpack_ids(step.tokens), strict=True):
                assert rid not in reasons
                tokens.setdefault(rid, []).append(token)
            for rid, reason in zip(step.ended, step.reasons, strict=True):
                assert rid not in reasons
                reasons[rid] = reason
        return tokens, reasons


@pytest.fixture(scope="module")
def engine(tiny_model: Path, callboard_home: Path) -> Iterator[EngineProcess]:
    with running("engine", tiny_model) as process:
        process.ready = process.report()
        yield process


@pytest.fixture
def number() -> int:
    """A streamer number higher than any before."""
    return time.monotonic_ns()


@pytest.fixture
def streamer(engine: EngineProcess, number: int) -> Streamer:
    return Streamer(engine, engine.ready.endpoint, number)


def probe(engine: EngineProcess, seq: int) -> Alive:
    engine.order(Probe(seq))
    answer = engine.report()
    assert isinstance(answer, Alive)
    assert answer.seq == seq
    return answer


def test_it_reports_ready_with_the_models_card(engine: EngineProcess) -> None:
    ready = engine.ready
    assert isinstance(ready, Ready)
    assert (ready.role, ready.epoch, ready.pid) == ("engine", EPOCH, engine.process.pid)
    assert ready.endpoint.endswith(f"/engine-{EPOCH}")
    assert (ready.card.name, ready.card.context, ready.card.vocab_size) == ("tiny", 65_536, 49_152)


def test_a_step_carries_all_rows(streamer: Streamer, make_request) -> None:
    for rid in range(10):
        streamer.send(submit(make_request, streamer, rid, [rid + 1] * 20, 12))
    tokens, reasons = streamer.until_ended(set(range(10)))
    assert reasons == dict.fromkeys(range(10), "length")
    assert all(len(tokens[rid]) == 12 for rid in range(10))


def test_the_first_step_names_admitted_rows_and_the_load(streamer: Streamer, make_request) -> None:
    streamer.send(submit(make_request, streamer, 5, [3, 4], 6))
    step = streamer.step()
    assert step.admitted == [5]
    assert (step.stats.running, step.stats.waiting) == (1, 0)
    assert step.stats.memory > 25_000_000
    streamer.until_ended({5})


def test_an_abort_right_behind_its_submit_is_not_lost(streamer: Streamer, make_request) -> None:
    streamer.send(submit(make_request, streamer, 1, [3] * 10, 5000))
    streamer.send(Abort(EPOCH, streamer.number, [1, 99]))
    streamer.send(submit(make_request, streamer, 2, [3] * 10, 20))
    tokens, _ = streamer.until_ended({2})
    assert len(tokens.get(1, [])) < 10  # of turns that began before the abort arrived


def test_an_abort_ends_a_running_row(engine: EngineProcess, streamer: Streamer, make_request) -> None:
    streamer.send(submit(make_request, streamer, 1, [3] * 10, 60_000))
    while not streamer.step().rids:
        pass
    streamer.send(Abort(EPOCH, streamer.number, [1]))
    while (stats := probe(engine, 1).stats) and stats.running:
        pass
    assert stats.waiting == stats.prefilling == 0


def test_a_bad_row_ends_alone_and_says_why(streamer: Streamer, make_request) -> None:
    streamer.send(submit(make_request, streamer, 1, [60_000], 5))
    streamer.send(submit(make_request, streamer, 2, [60], 5))
    errors = {}
    while set(errors) != {1, 2}:
        step = streamer.step()
        errors |= {
            rid: (reason, error) for rid, reason, error in zip(step.ended, step.reasons, step.errors, strict=True)
        }
    assert errors[1] == ("invalid_request", "id 60000 is outside the vocabulary of 49152")
    assert errors[2] == ("length", "")


def test_what_is_for_another_epoch_or_no_message_is_dropped(streamer: Streamer, make_request) -> None:
    streamer.socket.send(b"\xc1 garbage")
    assert streamer.step().unread  # it may have been a request: the streamer has to know
    streamer.socket.send_multipart([b"", b"\x01", b""])
    streamer.send(msgspec.structs.replace(submit(make_request, streamer, 1, [3], 3), epoch=EPOCH + 1))
    streamer.send(Abort(EPOCH + 1, streamer.number, [2]))
    streamer.send(submit(make_request, streamer, 2, [3], 3))
    tokens, _ = streamer.until_ended({2})
    assert set(tokens) == {2}


def test_a_newer_streamer_takes_over_and_the_older_one_is_not_heard(
    engine: EngineProcess, streamer: Streamer, make_request
) -> None:
    streamer.send(submit(make_request, streamer, 1, [3] * 10, 60_000))
    while not streamer.step().rids:
        pass
    newer = Streamer(engine, engine.ready.endpoint, streamer.number + 1)
    newer.send(submit(make_request, newer, 1, [4], 4))
    tokens, _ = newer.until_ended({1})
    assert len(tokens[1]) == 4
    streamer.send(submit(make_request, streamer, 3, [4], 4))
    streamer.send(Attach(EPOCH, streamer.number))
    newer.send(submit(make_request, newer, 2, [4], 4))
    tokens, _ = newer.until_ended({2})
    assert set(tokens) == {2}
    assert probe(engine, 2).stats.running == 0
    newer.number += 1  # another one, whose Attach is lost
    newer.send(submit(make_request, newer, 1, [4], 4))
    assert set(newer.until_ended({1})[0]) == {1}


def test_probes_are_answered_between_steps(engine: EngineProcess, streamer: Streamer, make_request) -> None:
    streamer.send(submit(make_request, streamer, 1, [3] * 5000, 60_000))
    first = probe(engine, 10)
    later = probe(engine, 11)
    while later.stats.step == first.stats.step:
        later = probe(engine, 12)
    assert later.stats.running + later.stats.prefilling == 1
    streamer.send(Abort(EPOCH, streamer.number, [1]))


def test_a_streamer_that_vanishes_leaves_no_rows(engine: EngineProcess, streamer: Streamer, make_request) -> None:
    streamer.send(submit(make_request, streamer, 1, [3] * 10, 60_000))
    while not streamer.step().rids:
        pass
    streamer.socket.close(0)
    while probe(engine, 20).stats.running:
        pass


def test_an_idle_engine_sleeps(engine: EngineProcess) -> None:
    process = psutil.Process(engine.process.pid)
    # The pool is cleared a second after the last step; from then on nothing wakes the loop.
    assert not engine.control.poll(1500)
    before, switches = process.cpu_times(), process.num_ctx_switches().voluntary
    assert not engine.control.poll(1000)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.05
    assert process.num_ctx_switches().voluntary - switches < 20


def test_a_stop_order_ends_the_process(tiny_model: Path) -> None:
    with running("stopped", tiny_model) as process:
        assert isinstance(process.report(), Ready)
        process.order(Stop("server_stopped", "bye"))
        assert process.process.wait(20) == 0


def test_a_model_that_cant_be_loaded_is_reported(tmp_path: Path) -> None:
    with running("missing", tmp_path / "nothing") as process:
        report = process.report()
        assert isinstance(report, StartFailed)
        assert "is not a folder" in report.message
        assert process.process.wait(20) == 1


class Clogged:
    """A socket whose first `times` sends would block."""

    def __init__(self, socket: zmq.Socket, times: int) -> None:
        self.socket = socket
        self.times = times

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if self.times:
            self.times -= 1
            raise zmq.Again
        self.socket.send_multipart(frames, flags)


def test_rows_whose_step_could_not_be_sent_fail_and_are_told_later(tiny_model: Path, make_request) -> None:
    run_dir = run_root() / "clogged"
    run_dir.mkdir(parents=True)
    me = Incarnation(run_dir, "engine", 0, EPOCH)
    control = ControlChannel(zmq.Context.instance(), run_dir, "engine", 0, EPOCH)
    actor = EngineActor(me, CastConfig(str(tiny_model), "tiny", str(run_dir)), control)
    endpoint, _ = actor.start()
    gc.unfreeze()
    socket = actor._socket
    peer = connect_dealer(zmq.Context.instance(), endpoint)
    try:
        peer.send(encode(Attach(EPOCH, 1)))
        for rid in (1, 2):
            peer.send(encode(msgspec.structs.replace(make_request(rid, [3, 4], 50), epoch=EPOCH, streamer=1)))
        while actor.stats().waiting < 2:
            assert socket.poll(PATIENCE_MS)
            actor._receive()
        actor.turn()  # admits them
        assert step_codec.decode(peer.recv()).admitted == [1, 2]
        actor._socket = Clogged(socket, times=2)
        actor.turn()  # launches the second step
        actor.turn()
        assert actor.faults == 1
        assert actor.stats().running == 0
        while actor.wait_ms() == 0:
            actor.turn()
        assert actor.wait_ms() == RETRY_MS
        actor.turn()
        step = step_codec.decode(peer.recv())
        assert sorted(step.ended) == [1, 2]
        assert step.reasons == ["internal_error"] * 2
        assert step.tokens == b""
        assert actor.wait_ms() != RETRY_MS
    finally:
        actor._socket = socket
        actor.close()
        peer.close(0)
        control.close(0)


def submit(make_request, streamer: Streamer, rid: int, ids: list[int], budget: int) -> Submit:
    """A request of this streamer for this engine."""
    return msgspec.structs.replace(make_request(rid, ids, budget), epoch=EPOCH, streamer=streamer.number)
