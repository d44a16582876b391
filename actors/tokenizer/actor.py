"""The tokenizer process: text and chat messages to ids, and back, one job at a time.

Talks to the streamer alone, over a ROUTER of its own endpoint; holds no state between jobs, so any job can be
given to another tokenizer.
"""

import contextlib
import os

import structlog
import zmq

from actors.base import Actor, StartError
from actors.model_files import read_model_files
from actors.tokenizer.chat_template import ChatTemplate
from actors.tokenizer.text_tokenizer import load_tokenizer
from protocol.codec import CodecError, encode, job_codec
from protocol.errors import INTERNAL_ERROR, INVALID_REQUEST
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Decode, Decoded, Encode, Encoded, ModelCard, TokenizerResult
from protocol.sockets import bind_router

log = structlog.get_logger()

# Below the engine in the scheduler's eyes: long texts must not take the processor from running streams.
NICENESS = 10


class TokenizerActor(Actor):
    """Serves `Encode` and `Decode` jobs in the order they come."""

    def start(self) -> tuple[str, ModelCard | None]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)) if os.environ.get("IDLE") else os.nice(NICENESS)
        path = self.config.model_path
        try:
            files = read_model_files(path)
            self._tokenizer = load_tokenizer(path, trust_remote_code=self.config.trust_remote_code)
            self._template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        except (OSError, ValueError) as error:
            raise StartError(f"the tokenizer of {path} can't be loaded: {error}") from error
        endpoint = self.me.endpoint()
        self._socket = bind_router(self.context, endpoint)
        self.add_socket(self._socket, self._serve)
        return endpoint, None

    def close(self) -> None:
        self.remove_socket(self._socket)

    def _serve(self) -> None:
        # One job per turn: the control channel is looked at between long texts.
        with contextlib.suppress(zmq.Again):
            peer, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                job = job_codec.decode(frame)
            except CodecError as error:
                log.error("bad job", error=str(error))
                return
            if job.epoch != self.me.epoch:
                return
            try:
                self._socket.send_multipart([peer, encode(self._work(job))], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.error("result not sent", error=str(error))

    def _work(self, job: Encode | Decode) -> TokenizerResult:
        epoch = self.me.epoch
        if isinstance(job, Decode):
            try:
                return Decoded(epoch, job.job, self._tokenizer.decode(unpack_ids(job.ids)))
            except (ValueError, OverflowError) as error:
                return Decoded(epoch, job.job, code=INVALID_REQUEST, message=str(error))
            except Exception as error:
                log.exception("decoding failed", job=job.job)
                return Decoded(epoch, job.job, code=INTERNAL_ERROR, message=f"decoding failed: {error}")
        param = "messages" if job.messages is not None else "prompt"
        try:
            return Encoded(epoch, job.job, pack_ids(self._encode(job)))
        except ValueError as error:
            return Encoded(epoch, job.job, code=INVALID_REQUEST, message=str(error), param=param)
        except Exception as error:
            log.exception("encoding failed", job=job.job)
            return Encoded(epoch, job.job, code=INTERNAL_ERROR, message=f"tokenizing failed: {error}")

    def _encode(self, job: Encode) -> list[int]:
        if job.messages is None:
            return self._tokenizer.encode(job.text or "", add_special_tokens=job.add_special_tokens)
        if self._template is None:
            raise ValueError(
                f"the model {self.config.model_name} has no chat template; send a prompt to /v1/completions"
            )
        text = self._template.render(job.messages, **job.template_kwargs)
        return self._tokenizer.encode(text, add_special_tokens=False)
