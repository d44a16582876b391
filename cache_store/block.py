"""What the engine hands over and asks for: blocks, seen as named tensors of bytes. Types only."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Tensor(NamedTuple):
    """One array of a block. `dtype` as safetensors spells it (F32, BF16, U32 …); `data` is contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Block(Protocol):
    """State of `BLOCK_SIZE` tokens for all layers, or a snapshot of recurrent state. It never changes."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory: those of its tensors."""

    @property
    def layout(self) -> str:
        """How layers lie in the tensors; opaque here. A stored block with another layout is a miss."""

    def tensors(self) -> Sequence[Tensor]:
        """Views of evaluated memory. Called on the engine's thread only."""


class Read(NamedTuple):
    """One block to read from the SSD into memory the caller owns.

    `targets` are writable, contiguous pieces which together take exactly the block's data, tensor after tensor.
    """

    key: bytes
    layout: str
    targets: Sequence[memoryview]
