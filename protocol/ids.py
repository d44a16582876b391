"""Token ids and their log-probabilities on the wire: little-endian uint32 and float32, four bytes each."""

import sys
from array import array
from collections.abc import Iterable

_SWAP = sys.byteorder == "big"


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian uint32.

    Raises OverflowError for an id outside 0 … 2**32 - 1 and TypeError for one that is no integer.
    """
    packed = array("I", ids)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes | memoryview) -> list[int]:
    """Inverse of `pack_ids`. Raises ValueError when the length is not a multiple of four bytes."""
    if len(data) % 4:
        raise ValueError(f"token ids take 4 bytes each, but {len(data)} bytes came")
    packed = array("I")
    packed.frombytes(data)
    if _SWAP:
        packed.byteswap()
    return packed.tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32."""
    packed = array("f", values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(data: bytes | memoryview) -> list[float]:
    """Inverse of `pack_floats`. Raises ValueError when the length is not a multiple of four bytes."""
    if len(data) % 4:
        raise ValueError(f"float32 take 4 bytes each, but {len(data)} bytes came")
    packed = array("f")
    packed.frombytes(data)
    if _SWAP:
        packed.byteswap()
    return packed.tolist()
