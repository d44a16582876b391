"""`TextJobs`: one job of a tokenizer process, from its message to its result.

Called from the process's main thread and from its thread for long texts; nothing here changes after the start.
"""

import time
from collections.abc import Callable
from typing import Any

import structlog

from actors.grammars import Grammars, InvalidGrammar
from actors.model_files import ModelFiles
from actors.tokenizer.chat_template import ChatTemplate, plain_messages
from actors.tokenizer.message_shape import MessageShape
from actors.tokenizer.text_tokenizer import load_tokenizer
from actors.tokenizer.time_limit import TimeLimit, TooSlow
from protocol.errors import INTERNAL_ERROR, INVALID_REQUEST
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Decode, Decoded, Encode, Encoded, TokenizerResult
from protocol.sockets import MAX_MESSAGE

log = structlog.get_logger()

MAX_RESULT = MAX_MESSAGE - 4096  # bytes of ids that fit one message


def printable(error: Exception) -> str:
    """The error's text in a form that can be sent; it may quote a lone surrogate."""
    return str(error).encode(errors="replace").decode()


def job_size(job: Encode | Decode) -> int:
    """About how many bytes of text a job is about."""
    if isinstance(job, Decode):
        return len(job.ids)
    texts = len(job.text or "") + sum(len(str(message.get("content"))) for message in job.messages or ())
    return texts + len(str(job.tools)) + (len(job.grammar.text) if job.grammar is not None else 0)


class TextJobs:
    """The tokenizer and the chat template of one model."""

    def __init__(
        self, files: ModelFiles, model_name: str, time_limit: TimeLimit, *, trust_remote_code: bool = False
    ) -> None:
        """Load them. `time_limit` bounds each job. Raises OSError or ValueError with what to change."""
        self._model_name = model_name
        self._limit = time_limit
        self._tokenizer = load_tokenizer(files.path, trust_remote_code=trust_remote_code)
        template = files.chat_template
        self._template = ChatTemplate(template, files.special_tokens) if template else None
        self._shape = MessageShape(template or "")
        self._grammars = Grammars(files, lambda: self._tokenizer.backend)

    def prepare_grammars(self) -> None:
        """Make ready for the first grammar; takes a quarter of a second or more."""
        self._grammars.prepare()

    def work(self, job: Encode | Decode, pause: Callable[[], None] | None = None) -> TokenizerResult:
        """Do one job. Never raises: what goes wrong is in the result.

        With `pause` a text is tokenized in pieces, and `pause` is called after each.
        """
        try:
            with self._limit.on(job_size(job)):
                return self._work(job, pause)
        except TooSlow as error:
            kind = Decoded if isinstance(job, Decode) else Encoded
            return kind(job.epoch, job.job, code=INVALID_REQUEST, message=str(error))

    def _work(self, job: Encode | Decode, pause: Callable[[], None] | None) -> TokenizerResult:
        if isinstance(job, Decode):
            try:
                return Decoded(job.epoch, job.job, self._tokenizer.decode(unpack_ids(job.ids)))
            except (ValueError, OverflowError) as error:
                return Decoded(job.epoch, job.job, code=INVALID_REQUEST, message=printable(error))
            except Exception as error:
                log.exception("decoding failed", job=job.job)
                return Decoded(job.epoch, job.job, code=INTERNAL_ERROR, message=f"decoding failed: {printable(error)}")
        param = "messages" if job.messages is not None else "prompt"
        began = time.monotonic()
        try:
            if job.grammar is not None:
                self._grammars.check(job.grammar)
            ids = self._encode(job, pause)
            if len(ids) > MAX_RESULT:
                raise ValueError(
                    f"the text has {len(ids) // 4} tokens; at most {MAX_RESULT // 4} can be handled at once"
                )
            return Encoded(job.epoch, job.job, ids, began=began, ended=time.monotonic())
        except InvalidGrammar as error:
            return Encoded(job.epoch, job.job, code=INVALID_REQUEST, message=printable(error), param=error.field)
        except ValueError as error:
            return Encoded(job.epoch, job.job, code=INVALID_REQUEST, message=printable(error), param=param)
        except Exception as error:
            log.exception("encoding failed", job=job.job)
            return Encoded(job.epoch, job.job, code=INTERNAL_ERROR, message=f"tokenizing failed: {printable(error)}")

    def _encode(self, job: Encode, pause: Callable[[], None] | None) -> bytes:
        if job.messages is None and job.text is None:
            return b""  # the request brought its ids; only its grammar was to be checked
        text, add_special_tokens = job.text or "", job.add_special_tokens
        if job.messages is not None:
            text, add_special_tokens = self._rendered(job, job.messages), False
        if pause is None:
            return pack_ids(self._tokenizer.encode(text, add_special_tokens))
        packed = bytearray()
        for ids in self._tokenizer.encode_in_pieces(text, add_special_tokens):
            packed += pack_ids(ids)
            pause()
        return bytes(packed)

    def _rendered(self, job: Encode, messages: list[dict[str, Any]]) -> str:
        if self._template is None:
            raise ValueError(f"the model {self._model_name} has no chat template; send a prompt to /v1/completions")
        if clash := job.template_kwargs.keys() & {"tools", "messages"}:
            raise ValueError(f"{min(clash)} can't be given as an option of the chat template")
        fitting = self._shape.fit(plain_messages(messages), job.tools)
        return self._template.render(fitting, tools=job.tools or None, **job.template_kwargs)
