"""A request's body: read from the connection within limits, and decoded with errors that name the field.

Called by the endpoints, on the event loop.
"""

import asyncio
import json
import re
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from starlette.types import Receive, Scope

from protocol.limits import MAX_DEPTH, too_deep
from server.errors import BODY_ENCODED, BODY_TIMEOUT, BODY_TOO_LARGE, ApiError, invalid
from server.unsupported import HARMLESS, check_unsupported

log = structlog.get_logger()

MAX_LOGGED_NAMES = 256
MAX_STEP = 64  # characters of a key that are shown
MAX_VALUES = 250_000  # arrays and objects in a body: making them takes a fraction of a second, and everybody waits
MAX_SEARCHED = 256 << 10  # bytes of a malformed body that are searched for the place of the fault: that takes a while

T = TypeVar("T", bound=msgspec.Struct)

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_WHERE = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}

_ignored_names: set[str] = set()


class ClientGone(Exception):
    """The client left before its request was read."""


def check_json(scope: Scope) -> None:
    """Refuse what doesn't come as JSON, which pages of other sites can't send without CORS. Raises ApiError."""
    kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise invalid("send this as application/json", "content-type")


async def read_body(scope: Scope, receive: Receive, max_bytes: int, seconds: float) -> bytes:
    """Read the whole body.

    Raises ApiError when it is larger than `max_bytes` or takes longer than `seconds`, ClientGone when the
    client leaves.
    """
    too_large = ApiError(BODY_TOO_LARGE, f"the request's body is larger than {max_bytes} bytes")
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise too_large
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            encoding = value.decode("latin-1")[:MAX_STEP]
            raise ApiError(BODY_ENCODED, f"bodies can't be read in the encoding {encoding!r}; send this one as it is")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(BODY_TIMEOUT, f"the request's body did not arrive within {seconds:g} s") from None


def decode_request(body: bytes, kind: type[T], unsupported: dict[str, tuple[Any, ...]]) -> T:
    """Decode a body as `kind`, refusing options that are in `unsupported`.

    Unknown fields at the top are ignored, and logged once per name. Raises ApiError naming the field or the place.
    """
    _check_values(body)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        check_unsupported(fields, unsupported)
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed(body, error) from None
    _note_unknown(fields.keys() - unsupported.keys() - set(kind.__struct_fields__) - HARMLESS)
    return request


def _check_values(body: bytes) -> None:
    """Refuse a body with too many arrays and objects, before any is made. Raises ApiError."""
    if body.count(b"[") + body.count(b"{") <= MAX_VALUES:
        return
    bare = _STRING.sub(b"", body)  # texts may hold as many as they like
    if bare.count(b"[") + bare.count(b"{") > MAX_VALUES:
        raise invalid(f"the body holds more than {MAX_VALUES} arrays and objects")


def convert_field(value: Any, kind: Any, field: str) -> Any:
    """Check a decoded value of `field` against `kind`. Raises ApiError naming the place inside it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), field) from None


def check_depth(value: Any, field: str) -> None:
    """Refuse a free-form value that is nested more than MAX_DEPTH deep. Raises ApiError."""
    if too_deep(value):
        raise invalid(f"{field} is nested more than {MAX_DEPTH} deep", field)


def _wrong_type(text: str, inside: str = "") -> ApiError:
    """Turn msgspec's words, such as "Expected `int`, got `str` - at `$.seed`", into ours."""
    path = ""
    where = _WHERE.search(text)
    if where is not None:
        text = text[: where.start()] + (" in a key" if where["key"] else "")
        path = where["path"].replace("[...]", "")
    if inside:
        path = inside + (path if path.startswith("[") or not path else f".{path}")
    missing = _MISSING.search(text)
    if missing is not None:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid(f"{name} is required", name)
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        return invalid(f"{name} is not an option that is known here", name)
    text = re.sub(r"\b(str|int|float|bool)\b", lambda word: _JSON_TYPES[word[0]], text)
    text = text.replace(" | ", " or ").replace("`", "")
    text = text[:1].lower() + text[1:]
    return invalid(f"{path}: {text}" if path else f"the body: {text}", path or None)


def _malformed(body: bytes, error: Exception) -> ApiError:
    """Say what is wrong with a body that is no JSON; lone surrogates, raw or escaped, are named as such."""
    if isinstance(error, RecursionError):
        return invalid("the body is nested too deep")
    if len(body) > MAX_SEARCHED:
        return invalid(f"the body is not valid JSON: {error}")
    try:
        text = body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as fault:
        return invalid(f"the body is not valid UTF-8 (byte {fault.start})")
    try:
        place = _find_surrogate(json.loads(text))
    except (ValueError, RecursionError):
        found = _SURROGATE.search(text)
        place = "the body" if found else None
    if place is not None:
        return invalid(
            f"{place} holds a lone surrogate (half of a UTF-16 pair), so it is not valid Unicode",
            None if place == "the body" else place,
        )
    return invalid(f"the body is not valid JSON: {error}")


def _find_surrogate(value: Any) -> str | None:
    """Path of the first string that holds a lone surrogate, as `messages[0].content`."""
    pending: list[tuple[_Place | None, Any]] = [(None, value)]
    while pending:
        place, item = pending.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                return _path_to(place)
        elif isinstance(item, dict):
            if any(_SURROGATE.search(key) for key in item):
                return _path_to(place)
            pending += [(_Place(place, key), inner) for key, inner in reversed(item.items())]
        elif isinstance(item, list):
            pending += [(_Place(place, i), item[i]) for i in reversed(range(len(item)))]
    return None


class _Place(NamedTuple):
    """Where a value stands: the place of what it is in, and its key or index there."""

    outer: "_Place | None"
    step: str | int


def _path_to(place: _Place | None) -> str:
    steps: list[str] = []
    while place is not None:
        steps.append(f"[{place.step}]" if isinstance(place.step, int) else f".{place.step[:MAX_STEP]}")
        place = place.outer
    return "".join(reversed(steps)).removeprefix(".") or "the body"


def _note_unknown(names: set[str]) -> None:
    for name in sorted(names - _ignored_names):
        if len(_ignored_names) >= MAX_LOGGED_NAMES:
            return
        _ignored_names.add(name)
        log.info("unknown request field ignored", field=name[:64])
