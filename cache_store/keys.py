"""Names of prefix blocks: pure functions, called by the engine at admission and by tests.

A block's key stands for all tokens up to its end: `key = sha256(parent key ‖ ids as uint32-LE ‖ extras)`. Equal keys
mean equal prefixes within one model. The fingerprint, which tells models apart, is not hashed into the chain: it
takes a while to compute, and one engine has one model. The SSD store names a block by (fingerprint, key) instead.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 256  # tokens
LAYOUT_VERSION = 1  # of block files, index and packed blocks; a higher one leaves what older ones stored behind

_ROOT = hashlib.sha256(b"callboard prefix").digest()


def fingerprint(**parts: str | bytes | int | None) -> bytes:
    """32 bytes that differ as soon as one part does: weights, quantization, adapter, tokenizer, KV dtype and layout.

    Block size and layout version are always parts of it.
    """
    known: dict[str, str | bytes | int | None] = {
        "block_size": BLOCK_SIZE,
        "layout_version": LAYOUT_VERSION,
        **parts,
    }
    return hashlib.sha256(
        b"".join(_field(name.encode()) + _field(_typed(known[name])) for name in sorted(known))
    ).digest()


def chain_keys(
    ids: npt.NDArray[np.uint32] | bytes,
    salt: str = "",
    images: Sequence[tuple[int, bytes]] = (),
    known: Sequence[bytes] = (),
    adapter: str = "",
) -> list[bytes]:
    """One 32-byte key for each whole block of a prompt.

    `ids` are token ids, as an array or packed as little-endian uint32. `salt` parts the caches of tenants. `images`
    holds, for each image, the position of its first placeholder token and a hash of the image; no request has any yet.
    `known` are keys of the first blocks, from an earlier call; the others are computed. `adapter` is a hash of the LoRA
    adapter that the row is computed with.
    """
    packed = ids if isinstance(ids, bytes) else np.ascontiguousarray(ids, dtype="<u4").tobytes()
    extras: dict[int, list[bytes]] = defaultdict(list)
    if salt:
        extras[0].append(b"salt" + salt.encode())
    if adapter:
        extras[0].append(b"adapter" + adapter.encode())
    for position, digest in sorted(images):
        extras[position // BLOCK_SIZE].append(b"image" + struct.pack("<I", position % BLOCK_SIZE) + digest)
    keys = [*known]
    key = keys[-1] if keys else _ROOT
    size = 4 * BLOCK_SIZE
    for number in range(len(keys), len(packed) // size):
        block = packed[number * size : (number + 1) * size]
        key = hashlib.sha256(key + block + b"".join(map(_field, extras.get(number, ())))).digest()
        keys.append(key)
    return keys


def snapshot_key(key: bytes) -> bytes:
    """Key of the recurrent state at the end of the block `key`."""
    return hashlib.sha256(b"snapshot" + key).digest()


def _field(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _typed(value: str | bytes | int | None) -> bytes:
    return type(value).__name__.encode() + b":" + (value if isinstance(value, bytes) else str(value).encode())
