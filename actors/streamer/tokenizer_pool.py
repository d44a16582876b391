"""Hands text work to the tokenizer processes and keeps what each one has outstanding.

Owned by the streamer's one thread. Only a few jobs are in a worker's hands, the rest waits here, so that little
goes down with a dead worker. Long texts have a lane of their own: a worker does one of them beside its short ones.

When a frame of a worker can't be read, or one of ours by it, all that it has is given to it again: jobs leave no trace.

The texts of a dead worker go to another, or to its successor. Those it was working on may have killed it: each of
them is then tried on a worker that has nothing else, and one that two workers died of is failed alone.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
import zmq

from actors.base import Actor, Socket
from actors.streamer.turns import FairQueue
from protocol.codec import CodecError, encode, result_codec
from protocol.errors import INVALID_REQUEST, TOKENIZER_LOST
from protocol.messages import ActorState, Decode, Decoded, Encode, Encoded, Grammar, TokenizerResult
from protocol.sockets import connect_dealer

log = structlog.get_logger()

LONG_JOB = 64 << 10  # bytes; a longer text takes tens of milliseconds
LONG_GRAMMAR = 4096  # characters; a longer one can take longer than some milliseconds
MAX_SHORT = 2  # jobs in a worker's hands: one to work on, one to go on with
MAX_LONG = 1
POISON = 2  # workers that may die of a text
REPEATS = 3  # times a job is given again to the same worker


@dataclass(eq=False)
class Job:
    """One piece of text work: what to do, how large it is in bytes, whom to tell, and for which client it is."""

    size: int
    done: Callable[[TokenizerResult], None]
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: bytes | None = None
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    grammar: Grammar | None = None
    client: bytes = b""
    wanted: int = 1  # streams that want it
    deaths: int = 0  # of workers that were at it
    repeats: int = 0  # for frames that could not be read
    cancelled: bool = False

    @property
    def long(self) -> bool:
        """Whether the worker does it in its lane for long work. A large grammar may take a second."""
        return self.size > LONG_JOB or (self.grammar is not None and len(self.grammar.text) > LONG_GRAMMAR)

    def message(self, epoch: int, number: int) -> Encode | Decode:
        """The job as a message to the worker of this epoch."""
        if self.ids is not None:
            return Decode(epoch, number, self.ids, self.long)
        return Encode(
            epoch,
            number,
            self.text,
            self.messages,
            self.add_special_tokens,
            self.template_kwargs,
            long=self.long,
            tools=self.tools,
            grammar=self.grammar,
        )

    def failed(self, code: str, message: str) -> TokenizerResult:
        """A result that says the job could not be done."""
        if self.ids is not None:
            return Decoded(0, 0, code=code, message=message)
        return Encoded(0, 0, code=code, message=message)


def text_size(text: str | None, messages: Sequence[Mapping[str, Any]] | None) -> int:
    """About how long a prompt or chat is, in characters: the `size` of its job."""
    return len(text or "") + sum(len(str(message.get("content"))) for message in messages or ())


@dataclass(eq=False)
class Worker:
    """One tokenizer incarnation as seen from here."""

    epoch: int
    socket: Socket
    outstanding: dict[int, Job] = field(default_factory=dict)

    def in_hand(self, long: bool) -> int:
        """Jobs it has of one lane."""
        return sum(job.long == long for job in self.outstanding.values())

    @property
    def alone(self) -> bool:
        """Whether it has a suspect, which nothing may be beside."""
        return any(job.deaths for job in self.outstanding.values())

    def at_work(self) -> list[Job]:
        """The jobs it is doing: the oldest of each lane."""
        lanes: dict[bool, Job] = {}
        for job in self.outstanding.values():
            lanes.setdefault(job.long, job)
        return list(lanes.values())


class TokenizerPool:
    """All tokenizers of the cast and the jobs that wait for one."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._workers: dict[int, Worker] = {}
        self._short: FairQueue[Job] = FairQueue()
        self._long: FairQueue[Job] = FairQueue()
        self._suspects: deque[Job] = deque()
        self._numbers = 0
        self._known = False

    @property
    def known(self) -> bool:
        """Whether there has ever been a tokenizer; one that is gone will be replaced."""
        return self._known

    @property
    def waiting(self) -> int:
        """Jobs not yet in a worker's hands."""
        return len(self._short) + len(self._long) + len(self._suspects)

    def follow(self, actors: list[ActorState]) -> None:
        """Connect to tokenizers that became ready and let go of those that are gone or were replaced."""
        ready = {a.index: a for a in actors if a.role == "tokenizer" and a.state == "ready"}
        for index, worker in list(self._workers.items()):
            state = ready.get(index)
            if state is None or state.epoch != worker.epoch:
                self._drop(index, worker)
        for index, state in ready.items():
            if index not in self._workers:
                socket = connect_dealer(self._actor.context, state.endpoint)
                worker = self._workers[index] = Worker(state.epoch, socket)
                self._actor.add_socket(socket, partial(self._receive, worker))
                self._known = True
        self._dispatch()

    def submit(self, job: Job) -> None:
        """Have a job done; `job.done` is called with the result, once."""
        (self._long if job.long else self._short).append(job.client, job)
        self._dispatch()

    def cancel(self, job: Job) -> None:
        """One stream less wants this job. When none does it leaves its lane, and a late result is dropped."""
        job.wanted -= 1
        if job.wanted > 0:
            return
        job.cancelled = True
        for lane in (self._short, self._long):
            lane.discard(job.client, job)
        with contextlib.suppress(ValueError):
            self._suspects.remove(job)

    def close(self) -> None:
        """Let go of all tokenizers; the streams are ended already."""
        for worker in self._workers.values():
            self._actor.remove_socket(worker.socket)
        self._workers.clear()

    def _drop(self, index: int, worker: Worker) -> None:
        del self._workers[index]
        self._receive_last(worker)
        self._actor.remove_socket(worker.socket)
        for job in worker.at_work():
            job.deaths += 1
        for job in reversed(worker.outstanding.values()):
            if job.cancelled:
                continue
            if job.deaths >= POISON:
                log.error("text given up", size=job.size)
                self._finish(job, job.failed(TOKENIZER_LOST, f"{POISON} tokenizer processes ended while at this text"))
            elif job.deaths:
                self._suspects.append(job)
            else:
                (self._long if job.long else self._short).give_back(job.client, job)

    @staticmethod
    def _finish(job: Job, result: TokenizerResult) -> None:
        if not job.cancelled:
            job.done(result)

    def _dispatch(self) -> None:
        reserved = self._try_suspects()
        for lane, most in ((self._short, MAX_SHORT), (self._long, MAX_LONG)):
            long = lane is self._long
            while lane:
                free = [w for w in self._workers.values() if w is not reserved and not w.alone]
                worker = min(free, key=lambda w: w.in_hand(long), default=None)
                if worker is None or worker.in_hand(long) >= most:
                    break
                self._give(lane.take(), worker)

    def _try_suspects(self) -> Worker | None:
        """Give suspects to workers that have nothing else. Returns the worker that is kept free for the next one."""
        while self._suspects:
            worker = min(self._workers.values(), key=lambda w: len(w.outstanding), default=None)
            if worker is None or worker.outstanding:
                return worker
            self._give(self._suspects.popleft(), worker)
        return None

    def _give(self, job: Job, worker: Worker) -> None:
        self._numbers += 1
        try:
            worker.socket.send(encode(job.message(worker.epoch, self._numbers)), zmq.NOBLOCK)
        except CodecError as error:  # nested deeper than can be sent on
            self._finish(job, job.failed(INVALID_REQUEST, str(error)))
        except zmq.ZMQError as error:
            self._finish(job, job.failed(TOKENIZER_LOST, f"the tokenizer process takes no work: {error}"))
        else:
            worker.outstanding[self._numbers] = job

    def _give_again(self, worker: Worker) -> None:
        """Something was lost between us and this worker; what it still sends of these jobs is dropped."""
        jobs, worker.outstanding = [*worker.outstanding.values()], {}
        for job in jobs:
            job.repeats += 1
            if job.repeats > REPEATS:
                self._finish(job, job.failed(TOKENIZER_LOST, "the tokenizer process can't read this text"))
            elif not job.cancelled:
                self._give(job, worker)

    def _receive(self, worker: Worker) -> None:
        self._receive_last(worker)
        self._dispatch()

    def _receive_last(self, worker: Worker) -> None:
        while True:
            try:
                frame = worker.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                result = result_codec.decode(frame)
            except CodecError as error:
                log.error("bad result from tokenizer", error=str(error))
                self._give_again(worker)
                continue
            if result.epoch == worker.epoch and not result.job:
                self._give_again(worker)
                continue
            job = worker.outstanding.pop(result.job, None) if result.epoch == worker.epoch else None
            if job is not None:
                self._finish(job, result)
