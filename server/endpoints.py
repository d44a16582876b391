"""The endpoints that generate text, as ASGI applications: from a request to `server.generation.run`.

They are plain ASGI, not Starlette's request-response functions, as a streamed answer is written event by event and
the connection is listened to meanwhile.
"""

from collections.abc import Callable
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.backend import Backend
from server.connection import abort_of
from server.errors import ApiError, internal_error
from server.generation import Generation, run
from server.options import HttpOptions
from server.request_body import ClientGone, read_body
from server.request_log import RequestRecord, record_of

log = structlog.get_logger()

Parse = Callable[[bytes, str, str], tuple[str | None, Generation | Response]]


class GenerateEndpoint:
    """Serves one of the APIs. `parse` turns a body, and the model's name and the request's id for the answer, into the
    model that was asked for and a `Generation`, or a whole answer when nothing is to be generated."""

    def __init__(self, backend: Backend, options: HttpOptions, parse: Parse) -> None:
        self._backend = backend
        self._options = options
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError for those that fail before their answer began."""
        record = record_of(scope)
        started = False

        async def watched_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        with self._backend.working():
            try:
                await self._serve(scope, record, receive, watched_send)
            except ApiError as error:
                record.error_code = error.code
                raise
            except ClientGone:
                record.client_gone = True
            except Exception:
                log.exception("request failed", request_id=record.request_id)
                if started:
                    raise
                raise internal_error() from None

    async def _serve(self, scope: Scope, record: RequestRecord, receive: Receive, send: Send) -> None:
        options = self._options
        self._backend.client()  # so that nothing is read for a server that can't serve
        body = await read_body(scope, receive, options.max_body_bytes, options.body_timeout)
        if options.log_prompts:
            log.info("prompt", request_id=record.request_id, body=body.decode(errors="replace"))
        model, generation = self._parse(body, self._backend.model, record.request_id)
        self._backend.check_model(model)
        if isinstance(generation, Response):
            await generation(scope, receive, send)
            return
        generation.model = model or ""
        await run(generation, self._backend.client(), record, options, receive, send, abort_of(scope))
