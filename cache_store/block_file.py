"""Block files: one safetensors file per block. Written by the store's thread, read by its reader threads.

A file is an ordinary safetensors file (8 bytes header length, JSON header, data), so any tool reads it. The header's
metadata holds what the index can be rebuilt from, the xxh3 of the data, and, at a fixed place in front, the xxh3 of
all other bytes before the data. The header is padded to whole pages, so data begin on a page. Together with the
file's size, which must be exact, every byte of the file is covered: what was changed or cut is noticed.
"""

import base64
import binascii
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from cache_store.block import Tensor

PAGE = 4096
_PREFIX = b'{"__metadata__":{"header_xxh3":"'
_HASH_AT = 8 + len(_PREFIX)
_BLANK = b"0" * 32
_MAX_HEADER = 16 << 20  # bytes; a longer one is taken for damage
_MAX_PIECES = 512  # per system call; the usual limit is 1,024
_MAX_BYTES = 4 << 20  # per system call, so that hashing finds the data in the processor's cache


class BadBlock(Exception):
    """A file is no block file, damaged, or not the block that was asked for. The text says what is wrong."""


class Header(NamedTuple):
    """What a block file says about itself. `size` is that of the whole file in bytes, `start` where data begin."""

    fingerprint: bytes
    model: str
    key: bytes
    parent: bytes | None
    ids: bytes
    is_snapshot: bool
    layout: str
    checksum: bytes
    start: int
    size: int


class _Metadata(msgspec.Struct):
    header_xxh3: str
    data_xxh3: str
    fingerprint: str
    model: str
    key: str
    parent: str
    ids: str
    kind: str
    layout: str


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def flat(views: Iterable[memoryview]) -> list[memoryview]:
    """The views as bytes, without the empty ones."""
    return [view.cast("B") for view in views if view.nbytes]


def checksum(views: Iterable[memoryview]) -> bytes:
    """xxh3 of all bytes of the views (from `flat`), one after the other."""
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()


def build_header(
    *,
    fingerprint: bytes,
    model: str,
    key: bytes,
    parent: bytes | None,
    ids: bytes,
    is_snapshot: bool,
    layout: str,
    tensors: Sequence[Tensor],
) -> tuple[bytes, bytes]:
    """All bytes of a file before its data, and the checksum of the data."""
    digest = checksum(flat(tensor.data for tensor in tensors))
    metadata = _Metadata(
        header_xxh3=_BLANK.decode(),
        data_xxh3=digest.hex(),
        fingerprint=fingerprint.hex(),
        model=model,
        key=key.hex(),
        parent=parent.hex() if parent is not None else "",
        ids=base64.b64encode(ids).decode(),
        kind="snapshot" if is_snapshot else "block",
        layout=layout,
    )
    content: dict[str, _Metadata | _Tensor] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.data.nbytes
        content[tensor.name] = _Tensor(tensor.dtype, list(tensor.shape), (begin, end))
    text = msgspec.json.encode(content)
    text += b" " * (-(8 + len(text)) % PAGE)
    raw = bytearray(struct.pack("<Q", len(text)) + text)
    raw[_HASH_AT : _HASH_AT + len(_BLANK)] = xxhash.xxh3_128_hexdigest(raw).encode()
    return bytes(raw), digest


def write_block(path: Path, header: bytes, tensors: Sequence[Tensor]) -> None:
    """Write a new file. Raises OSError, and leaves no file behind then."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write_all(file, [memoryview(header), *flat(tensor.data for tensor in tensors)])
        finally:
            os.close(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> Header:
    """What a file says about itself, checked but for its data. Raises BadBlock and OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_header(file)
    finally:
        os.close(file)


def read_block(path: Path, fingerprint: bytes, key: bytes, layout: str, targets: Sequence[memoryview]) -> int:
    """Read a block's data into `targets`; how many bytes.

    Raises BadBlock when the file is not exactly this block in this layout or its data are wrong, and OSError. The
    targets then hold anything.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = _read_header(file)
        if (header.fingerprint, header.key) != (fingerprint, key):
            raise BadBlock("it holds another block than its name says")
        if header.layout != layout:
            raise BadBlock("it was packed in another layout")
        views = flat(targets)
        nbytes = sum(view.nbytes for view in views)
        if nbytes != header.size - header.start:
            raise BadBlock(f"{nbytes} bytes of data were expected, not {header.size - header.start}")
        if _read_all(file, header.start, views) != header.checksum:
            raise BadBlock("its data are damaged")
        return nbytes
    finally:
        os.close(file)


def check_block(path: Path) -> Header:
    """Read a whole file and check everything in it. Raises BadBlock and OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = _read_header(file)
        state = xxhash.xxh3_128()
        at = header.start
        while at < header.size:
            data = os.pread(file, _MAX_BYTES, at)
            if not data:
                break
            state.update(data)
            at += len(data)
        if state.digest() != header.checksum:
            raise BadBlock("its data are damaged")
        return header
    finally:
        os.close(file)


def _read_header(file: int) -> Header:
    size = os.fstat(file).st_size
    raw = os.pread(file, PAGE, 0)
    if len(raw) < _HASH_AT + len(_BLANK):
        raise BadBlock("it is too short")
    (length,) = struct.unpack_from("<Q", raw)
    if not length <= min(_MAX_HEADER, size - 8):
        raise BadBlock("the header's length is impossible")
    start = 8 + length
    while len(raw) < start:
        more = os.pread(file, start - len(raw), len(raw))
        if not more:
            raise BadBlock("the header is cut off")
        raw += more
    raw = raw[:start]
    written = raw[_HASH_AT : _HASH_AT + len(_BLANK)]
    blanked = raw[:_HASH_AT] + _BLANK + raw[_HASH_AT + len(_BLANK) :]
    if xxhash.xxh3_128_hexdigest(blanked).encode() != written:
        raise BadBlock("the header is damaged")
    header = _parse(raw[8:], start)
    if header.size != size:
        raise BadBlock(f"it has {size} bytes instead of {header.size}")
    return header


def _parse(text: bytes, start: int) -> Header:
    try:
        content = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(content.pop("__metadata__"), type=_Metadata)
        tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in content.values()]
        return Header(
            fingerprint=bytes.fromhex(metadata.fingerprint),
            model=metadata.model,
            key=bytes.fromhex(metadata.key),
            parent=bytes.fromhex(metadata.parent) if metadata.parent else None,
            ids=base64.b64decode(metadata.ids, validate=True),
            is_snapshot=metadata.kind == "snapshot",
            layout=metadata.layout,
            checksum=bytes.fromhex(metadata.data_xxh3),
            start=start,
            size=start + max((tensor.data_offsets[1] for tensor in tensors), default=0),
        )
    except (msgspec.MsgspecError, KeyError, ValueError, binascii.Error) as error:
        raise BadBlock(f"the header can't be read: {error}") from None


def _write_all(file: int, views: list[memoryview]) -> None:
    views = views[::-1]
    while views:
        written = os.writev(file, views[: -_MAX_PIECES - 1 : -1])
        _drop(views, written)


def _read_all(file: int, at: int, views: list[memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    waiting = views[::-1]
    while waiting:
        pieces: list[memoryview] = []
        nbytes = 0
        while waiting and len(pieces) < _MAX_PIECES and nbytes < _MAX_BYTES:
            piece = waiting.pop()
            if piece.nbytes > _MAX_BYTES:
                waiting.append(piece[_MAX_BYTES:])
                piece = piece[:_MAX_BYTES]
            pieces.append(piece)
            nbytes += piece.nbytes
        left = pieces[::-1]
        while left:
            got = os.preadv(file, left[::-1], at)
            if got == 0:
                raise BadBlock("it is cut off")
            at += got
            _drop(left, got)
        for piece in pieces:
            state.update(piece)
    return state.digest()


def _drop(reversed_views: list[memoryview], nbytes: int) -> None:
    """Take `nbytes` off the front of views that are kept in reverse order."""
    while nbytes:
        view = reversed_views.pop()
        if view.nbytes > nbytes:
            reversed_views.append(view[nbytes:])
            return
        nbytes -= view.nbytes
