"""`TextJobs`: one job of a tokenizer process, from its message to its result.

Called from the process's main thread and from its thread for long texts; nothing here changes after the start.
"""

import structlog

from actors.grammars import Grammars, InvalidGrammar
from actors.model_files import ModelFiles
from actors.tokenizer.chat_template import ChatTemplate, plain_messages
from actors.tokenizer.message_shape import MessageShape
from actors.tokenizer.text_tokenizer import load_tokenizer
from protocol.errors import INTERNAL_ERROR, INVALID_REQUEST
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Decode, Decoded, Encode, Encoded, TokenizerResult
from protocol.sockets import MAX_MESSAGE

log = structlog.get_logger()

MAX_RESULT = MAX_MESSAGE - 4096  # bytes of ids that fit one message


def printable(error: Exception) -> str:
    """The error's text in a form that can be sent; it may quote a lone surrogate."""
    return str(error).encode(errors="replace").decode()


class TextJobs:
    """The tokenizer and the chat template of one model."""

    def __init__(self, files: ModelFiles, model_name: str, *, trust_remote_code: bool = False) -> None:
        """Load them. Raises OSError or ValueError with what to change."""
        self._model_name = model_name
        self._tokenizer = load_tokenizer(files.path, trust_remote_code=trust_remote_code)
        template = files.chat_template
        self._template = ChatTemplate(template, files.special_tokens) if template else None
        self._shape = MessageShape(template or "")
        self._grammars = Grammars(files, self._tokenizer.backend)

    def work(self, job: Encode | Decode) -> TokenizerResult:
        """Do one job. Never raises: what goes wrong is in the result."""
        if isinstance(job, Decode):
            try:
                return Decoded(job.epoch, job.job, self._tokenizer.decode(unpack_ids(job.ids)))
            except (ValueError, OverflowError) as error:
                return Decoded(job.epoch, job.job, code=INVALID_REQUEST, message=printable(error))
            except Exception as error:
                log.exception("decoding failed", job=job.job)
                return Decoded(job.epoch, job.job, code=INTERNAL_ERROR, message=f"decoding failed: {printable(error)}")
        param = "messages" if job.messages is not None else "prompt"
        try:
            if job.grammar is not None:
                self._grammars.check(job.grammar)
            ids = pack_ids(self._encode(job))
            if len(ids) > MAX_RESULT:
                raise ValueError(
                    f"the text has {len(ids) // 4} tokens; at most {MAX_RESULT // 4} can be handled at once"
                )
            return Encoded(job.epoch, job.job, ids)
        except InvalidGrammar as error:
            return Encoded(job.epoch, job.job, code=INVALID_REQUEST, message=printable(error), param=error.field)
        except ValueError as error:
            return Encoded(job.epoch, job.job, code=INVALID_REQUEST, message=printable(error), param=param)
        except Exception as error:
            log.exception("encoding failed", job=job.job)
            return Encoded(job.epoch, job.job, code=INTERNAL_ERROR, message=f"tokenizing failed: {printable(error)}")

    def _encode(self, job: Encode) -> list[int]:
        if job.messages is None and job.text is None:
            return []  # the request brought its ids; only its grammar was to be checked
        if job.messages is None:
            return self._tokenizer.encode(job.text or "", add_special_tokens=job.add_special_tokens)
        if self._template is None:
            raise ValueError(f"the model {self._model_name} has no chat template; send a prompt to /v1/completions")
        if clash := job.template_kwargs.keys() & {"tools", "messages"}:
            raise ValueError(f"{min(clash)} can't be given as an option of the chat template")
        messages = self._shape.fit(plain_messages(job.messages), job.tools)
        text = self._template.render(messages, tools=job.tools or None, **job.template_kwargs)
        return self._tokenizer.encode(text, add_special_tokens=False)
