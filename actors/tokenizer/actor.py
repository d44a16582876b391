"""The tokenizer process: text and chat messages to ids, and back.

Talks to the streamer alone, over a ROUTER of its own endpoint; holds no state between jobs, so any job can be given
to another tokenizer. The main thread does short jobs in the order they come. Long ones go to a thread beside it, so
that a chat message never waits for a book; it runs at the lowest priority the system has, for it must not take the
processor from running streams.
"""

import os
import sys
import threading
import time

import structlog
import zmq

from actors import grammars
from actors.base import Actor, Socket, StartError
from actors.model_files import read_model_files
from actors.priority import NICE
from actors.tokenizer.text_jobs import TextJobs
from actors.tokenizer.time_limit import TimeLimit
from protocol.codec import CodecError, encode, job_codec
from protocol.errors import INTERNAL_ERROR
from protocol.messages import Encoded, ModelCard
from protocol.sockets import bind_router

log = structlog.get_logger()


class TokenizerActor(Actor):
    """Serves `Encode` and `Decode` jobs."""

    def start(self) -> tuple[str, ModelCard | None]:
        os.nice(NICE)  # of short jobs
        config = self.config
        try:
            files = read_model_files(config.model_path)
            trust = config.trust_remote_code
            self._jobs = TextJobs(files, config.model_name, TimeLimit(), trust_remote_code=trust)
        except (OSError, ValueError) as error:
            raise StartError(f"the tokenizer of {config.model_path} can't be loaded: {error}") from error
        self._to_thread, thread_in = self._pair("long-jobs")
        self.add_socket(self._to_thread, self._pass_on)
        self._thread = threading.Thread(target=self._do_long_jobs, args=(thread_in,), name="long texts", daemon=True)
        self._thread.start()
        endpoint = self.me.endpoint()
        self._socket = bind_router(self.context, endpoint)
        self.add_socket(self._socket, self._serve)
        self._idle_since = time.monotonic()
        self._prepared = config.task != "generate"
        return endpoint, None

    def turn(self) -> None:
        if not self._prepared and time.monotonic() - self._idle_since >= grammars.IDLE_S:
            self._jobs.prepare_grammars()  # the supervisor's probes bring turns
            self._prepared = True

    def close(self) -> None:
        self.remove_socket(self._socket)
        # The thread has to let go of its socket first: ZeroMQ aborts the process when one is closed under a receiver.
        self._to_thread.send_multipart([b"", b""], zmq.NOBLOCK)
        self._thread.join(0.2)
        self.abandoned = self._thread.is_alive()  # in the middle of a text
        if not self.abandoned:
            self.remove_socket(self._to_thread)

    def _pair(self, name: str) -> tuple[Socket, Socket]:
        ends = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        ends[0].bind(f"inproc://{name}")
        ends[1].connect(f"inproc://{name}")
        return ends

    def _serve(self) -> None:
        self._idle_since = time.monotonic()
        # One job per turn: the control channel is looked at in between.
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        peer, frame = frames[0], frames[-1]
        try:
            job = job_codec.decode(frame)
        except CodecError as error:
            log.error("bad job", error=str(error))
            unread = Encoded(self.me.epoch, 0, code=INTERNAL_ERROR, message="a job could not be read")
            self._answer(peer, encode(unread))
            return
        if job.epoch != self.me.epoch:
            return
        if job.long:
            self._to_thread.send_multipart([peer, frame], zmq.NOBLOCK)
        else:
            self._answer(peer, encode(self._jobs.work(job)))

    def _pass_on(self) -> None:
        try:
            peer, frame = self._to_thread.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        self._answer(peer, frame)

    def _answer(self, peer: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.error("result not sent", error=str(error))

    def _do_long_jobs(self, socket: Socket) -> None:
        lower_priority()
        try:
            while True:
                peer, frame = socket.recv_multipart()
                if not frame:
                    break
                socket.send_multipart([peer, encode(self._jobs.work(job_codec.decode(frame), step_aside))])
        except BaseException:
            # Without this thread long texts would wait for ever; a dead process is seen and replaced.
            log.exception("the thread for long texts failed")
            os._exit(1)
        socket.close(linger=0)


def step_aside() -> None:
    """Let everyone else who waits for this core have it.

    Linux owes a thread of the idle class a little time, too, and gives it in runs of milliseconds, for which others
    wait that have just woken. Yielding after each piece forgoes that: ITL p99 beside long texts fell from 1.7
    to about 1.1 times that without.
    """
    os.sched_yield()


def lower_priority() -> None:
    """Let this thread run only when nobody else wants the processor.

    Measured on Linux: a merely niced thread keeps its time slice when an engine thread wakes up, which raised the
    inter-token latency p99 of 16 streams by 1.9 times; one of the idle class gives way at once. It still gets the
    cores that the engine leaves free.
    """
    try:
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread, not the process
        elif sys.platform == "darwin":
            os.nice(10)  # of the whole process: macOS has no less
    except OSError as error:
        log.warning("long texts run at normal priority", error=str(error))
