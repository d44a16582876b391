"""A real streamer on a thread, real clients, and a scripted engine, tokenizer and supervisor around it."""

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import zmq

from actors.base import Incarnation
from actors.config import CastConfig
from actors.streamer.actor import StreamerActor
from actors.tokenizer.text_tokenizer import load_tokenizer
from protocol import Client
from protocol.codec import command_codec, encode, job_codec, report_codec, server_codec
from protocol.control import ControlChannel
from protocol.endpoints import ipc_endpoint
from protocol.ids import pack_floats, pack_ids
from protocol.messages import (
    Abort,
    ActorState,
    Alive,
    Attach,
    Decode,
    Decoded,
    Deltas,
    Drain,
    Encoded,
    EngineUse,
    ModelCard,
    Probe,
    Ready,
    Step,
    Stop,
    Submit,
    SystemState,
)
from protocol.sockets import bind_router, connect_dealer

EOS = 2
CARD = ModelCard("tiny", 1000, 49152)


class Engine:
    """The engine's socket; tests say what each step brings."""

    def __init__(self, context, run_dir, epoch):
        self.epoch = epoch
        self.endpoint = ipc_endpoint(run_dir, f"engine-{epoch}")
        self.socket = bind_router(context, self.endpoint)
        self.socket.rcvtimeo = 10_000
        self.attached = None
        self.commands = []

    def take(self, kind):
        """The next command of this kind; others are kept for later calls."""
        while True:
            for i, command in enumerate(self.commands):
                if isinstance(command, kind):
                    return self.commands.pop(i)
            self.peer, frame = self.socket.recv_multipart()
            command = command_codec.decode(frame)
            assert command.epoch == self.epoch
            if isinstance(command, Attach):
                self.attached = command.streamer
            else:
                self.commands.append(command)

    def submit(self) -> Submit:
        return self.take(Submit)

    def abort(self) -> list[int]:
        return self.take(Abort).rids

    def step(self, tokens: dict[int, int], ended=(), epoch=None, errors=None, logprobs=None, cached=None):
        """Send one step: `tokens` by rid, `ended` as (rid, reason) pairs, `logprobs` by rid as (own, {id: top})."""
        logprobs = logprobs or {}
        message = Step(
            epoch or self.epoch,
            self.attached,
            list(tokens),
            pack_ids(tokens.values()),
            ended=[rid for rid, _ in ended],
            reasons=[reason for _, reason in ended],
            errors=errors or ["" for _ in ended],
            logprob_rids=list(logprobs),
            logprobs=[own for own, _ in logprobs.values()],
            top_ids=[pack_ids(top) for _, top in logprobs.values()],
            top_logprobs=[pack_floats(top.values()) for _, top in logprobs.values()],
            cached_rids=list(cached or {}),
            cached_tokens=list((cached or {}).values()),
        )
        self.socket.send_multipart([self.peer, encode(message)])


class RawClient:
    """A client that only sends what a test tells it to, and never pings."""

    def __init__(self, rig):
        self.socket = connect_dealer(rig.context, rig.endpoint)
        self.socket.rcvtimeo = 10_000
        rig.raw_sockets.append(self.socket)

    def send(self, message):
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self, kind):
        while True:
            message = server_codec.decode(self.socket.recv())
            if isinstance(message, kind):
                return message

    def end(self):
        """The end of the only stream of this client."""
        while True:
            message = self.receive(Deltas)
            if message.ends:
                return message.ends[0]


class Rig:
    """Everything around one streamer."""

    def __init__(self, model: Path, **settings):
        self.run_dir = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
        self.uses: list[EngineUse] = []
        self.context = zmq.Context()
        self.supervisor = bind_router(self.context, ipc_endpoint(self.run_dir, "control"))
        self.supervisor.rcvtimeo = 20_000
        self.tokenizer = load_tokenizer(model)
        self.config = CastConfig(str(model), "tiny", str(self.run_dir), **settings)
        self.engine = Engine(self.context, self.run_dir, 2)
        self._tokenizer_socket = bind_router(self.context, ipc_endpoint(self.run_dir, "tokenizer0-3"))
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_streamer, daemon=True),
            threading.Thread(target=self._run_tokenizer, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        ready = self.hear()
        assert isinstance(ready, Ready)
        self.endpoint = ready.endpoint
        self.clients = []
        self.raw_sockets = []
        self.stopped = False

    def _run_streamer(self):
        me = Incarnation(self.run_dir, "streamer", 0, 1)
        control = ControlChannel(zmq.Context.instance(), self.run_dir, "streamer", 0, 1)
        StreamerActor(me, self.config, control).run()
        control.close()

    def _run_tokenizer(self):
        socket = self._tokenizer_socket
        while not self._stopping.is_set():
            if not socket.poll(50):
                continue
            peer, frame = socket.recv_multipart()
            job = job_codec.decode(frame)
            if isinstance(job, Decode):
                answer = Decoded(3, job.job, "decoded")
            else:
                content = job.messages[-1]["content"] if job.messages else job.text
                text = content if isinstance(content, str) else ""
                answer = Encoded(3, job.job, pack_ids(self.tokenizer.encode(text)))
            socket.send_multipart([peer, encode(answer)])

    def hear(self):
        """The streamer's next report; what it says of the engine is kept in `uses`."""
        while True:
            report = report_codec.decode(self.supervisor.recv_multipart()[-1])
            if not isinstance(report, EngineUse):
                return report
            self.uses.append(report)

    def order(self, message):
        self.supervisor.send_multipart([b"streamer-0-1", encode(message)])

    def open_streams(self) -> int:
        """Asks the streamer's loop; all that was sent to it before has been handled then."""
        self.order(Probe(1))
        answer = self.hear()
        assert isinstance(answer, Alive)
        return answer.streams

    def replace_engine(self, state="dead"):
        """The engine is gone, in this state; another one is ready."""
        self.announce(engine_state=state)
        self.engine.socket.close(linger=0)
        self.engine = Engine(self.context, self.run_dir, self.engine.epoch + 10)
        self.announce()

    def announce(self, engine=True, tokenizer=True, engine_state="ready"):
        """Tell the streamer who is there."""
        actors = []
        if engine:
            epoch, endpoint = self.engine.epoch, self.engine.endpoint
            actors.append(ActorState("engine", "engine", 0, 1, engine_state, epoch, endpoint))
        if tokenizer:
            endpoint = ipc_endpoint(self.run_dir, "tokenizer0-3")
            actors.append(ActorState("tokenizer0", "tokenizer", 0, 1, "ready", 3, endpoint))
        self.order(SystemState("ok", "tiny", actors, card=CARD))
        self.open_streams()

    def ids_of(self, text):
        return self.tokenizer.encode(text)

    def run(self, submit, ids, reason="length"):
        """Let the engine generate `ids` for one stream, ended by `reason`."""
        for token in ids[:-1]:
            self.engine.step({submit.rid: token})
        self.engine.step({submit.rid: ids[-1]}, ended=[(submit.rid, reason)])

    def raw(self) -> RawClient:
        return RawClient(self)

    def client(self) -> Client:
        client = Client(endpoint=self.endpoint)
        self.clients.append(client)
        return client

    def drain(self):
        self.order(Drain(5.0))
        self.open_streams()

    def close(self):
        for client in self.clients:
            client.close()
        for socket in self.raw_sockets:
            socket.close(linger=0)
        if not self.stopped:
            self.order(Stop("server_stopped", "the test is over"))
        self._stopping.set()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self.context.destroy(linger=0)
        shutil.rmtree(self.run_dir)


@pytest.fixture
def make_rig(tiny_model):
    """Makes rigs with settings of the cast."""
    rigs = []

    def make(**settings):
        rigs.append(Rig(tiny_model, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig):
    """A rig with engine and tokenizer announced."""
    rig = make_rig()
    rig.announce()
    return rig
