"""Endpoints that take JSON and give JSON, without a stream: `/tokenize`, `/detokenize`, cancelling, and their frame."""

import asyncio
import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.codec import CodecError
from protocol.errors import CallboardError
from server.backends import Backends
from server.chat import check_messages, template_kwargs
from server.choosing import Chooser
from server.errors import NOT_FOUND, ApiError, from_client_error, invalid
from server.options import HttpOptions
from server.request_body import ClientGone, check_depth, decode_request, read_body
from server.request_log import record_of
from server.schemas_calls import CancelBody, DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest
from server.sse import encode_json
from server.tools import parse_tools
from server.unsupported import TOKENIZE_UNSUPPORTED

Work = Callable[[bytes, Chooser], Awaitable[object]]
_PREFIX = re.compile(r"chatcmpl-|cmpl-|resp_[0-9a-f]{24}_|msg_")  # of an answer's id, before that of its request
_AT_ONCE = 64  # token strings asked for at the same time


class JsonCall:
    """An ASGI endpoint that answers with what `work` makes of the body, which it is given with what finds the model."""

    def __init__(self, backends: Backends, options: HttpOptions, work: Work) -> None:
        self._backends = backends
        self._options = options
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError."""
        record = record_of(scope)
        options = self._options
        choose = Chooser(self._backends, record, receive)
        with self._backends.working():
            try:
                self._backends.check()
                body = await read_body(scope, receive, options.max_body_bytes, options.body_timeout)
                answer = await self._answer(body, choose)
            except ClientGone:
                record.client_gone = True
                return
            except CodecError as error:
                raise invalid(str(error)) from None
            except CallboardError as error:
                record.error_code = error.code
                raise from_client_error(error) from None
            finally:
                choose.close()
            await Response(encode_json(answer), media_type="application/json")(scope, receive, send)

    async def _answer(self, body: bytes, choose: Chooser) -> object:
        while True:
            try:
                return await self._work(body, choose)
            except (ApiError, CallboardError) as error:
                if not choose.may_try_again(error):
                    raise


async def tokenize(body: bytes, choose: Chooser) -> TokenizeBody:
    """`POST /tokenize`, as vLLM has it."""
    asked = decode_request(body, TokenizeRequest, TOKENIZE_UNSUPPORTED)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("give exactly one of prompt and messages", "prompt")
    backend = await choose(asked.model)
    client = backend.client()
    if asked.messages is not None:
        check_messages(asked.messages)
        tools, _ = parse_tools(asked.tools, None, None)
        check_depth(tools, "tools")
        kwargs = template_kwargs(
            asked.chat_template_kwargs, None, asked.add_generation_prompt, asked.continue_final_message
        )
        ids = await client.tokenize(messages=asked.messages, tools=tools, template_kwargs=kwargs)
    else:
        ids = await client.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    strings = None
    if asked.return_token_strs:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def spell(token: int) -> str:
            async with gate:
                return await client.detokenize([token])

        spelled = dict(zip(set(ids), await asyncio.gather(*map(spell, set(ids))), strict=True))
        strings = [spelled[token] for token in ids]
    context = backend.card.context if backend.card is not None else 0
    return TokenizeBody(len(ids), context, ids, strings)


async def detokenize(body: bytes, choose: Chooser) -> DetokenizeBody:
    """`POST /detokenize`, as vLLM has it."""
    asked = decode_request(body, DetokenizeRequest, {})
    backend = await choose(asked.model)
    return DetokenizeBody(await backend.client().detokenize(asked.tokens))


def cancel_request(backends: Backends) -> Callable[[Request], Awaitable[Response]]:
    """`POST /v1/requests/{id}/cancel`: the id of an answer, or a request's `x-request-id`."""

    async def cancel(request: Request) -> Response:
        wanted = request.path_params["id"]
        prefix = _PREFIX.match(wanted)
        label = wanted if prefix is None else wanted[prefix.end() :]
        try:
            count = sum([await client.cancel_label(label) for client in backends.clients()])
        except CallboardError as error:
            raise from_client_error(error) from None
        if not count:
            raise ApiError(NOT_FOUND, f"no request {wanted!r} is running")
        return Response(encode_json(CancelBody(wanted, count)), media_type="application/json")

    return cancel
