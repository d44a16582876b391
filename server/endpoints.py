"""The endpoints that generate text, as ASGI applications: from a request to `server.generation.run`.

They are plain ASGI, not Starlette's request-response functions, as a streamed answer is written event by event and
the connection is listened to meanwhile.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.backends import Backends
from server.choosing import Chooser
from server.connection import abort_of
from server.errors import ApiError, internal_error
from server.generation import Generation, run
from server.options import HttpOptions
from server.request_body import ClientGone, read_body
from server.request_log import RequestRecord, record_of

log = structlog.get_logger()

Plain = Callable[[Chooser], Awaitable[Response]]
Parse = Callable[[bytes, str, str], tuple[str | None, Generation | Plain]]


class GenerateEndpoint:
    """Serves one of the APIs. `parse` turns a body, and the model's name and the request's id for the answer, into the
    model that was asked for and a `Generation`, or into what gives the answer when nothing is to be generated."""

    def __init__(self, backends: Backends, options: HttpOptions, parse: Parse) -> None:
        self._backends = backends
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

        choose = Chooser(self._backends, record, receive)
        with self._backends.working():
            try:
                generation = await self._parsed(scope, record, receive)
                while True:
                    try:
                        await self._serve(*generation, choose, scope, record, receive, watched_send)
                        break
                    except ApiError as error:
                        if started or not choose.may_try_again(error):
                            raise
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
            finally:
                choose.close()

    async def _parsed(
        self, scope: Scope, record: RequestRecord, receive: Receive
    ) -> tuple[str | None, Generation | Plain]:
        options = self._options
        self._backends.check()  # so that nothing is read for a server that can't serve
        body = await read_body(scope, receive, options.max_body_bytes, options.body_timeout)
        if options.log_prompts:
            log.info("prompt", request_id=record.request_id, body=body.decode(errors="replace"))
        return self._parse(body, self._backends.first.model, record.request_id)

    async def _serve(
        self,
        model: str | None,
        generation: Generation | Plain,
        choose: Chooser,
        scope: Scope,
        record: RequestRecord,
        receive: Receive,
        send: Send,
    ) -> None:
        if not isinstance(generation, Generation):
            await (await generation(choose))(scope, receive, send)
            return
        backend = await choose(model, generation.keep_alive)
        generation.model = backend.adapter(model)
        clients = [backend.client(), *self._backends.other_clients(backend)]
        await run(generation, clients, record, self._options, receive, send, abort_of(scope))
