"""`SsdStore`: the SSD tier."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cache_store.block import Read, Tensor
from cache_store.stats import SsdStats
from cache_store.ticket import Ticket


class Write(NamedTuple):
    """One block to write. `tensors` are released by the thread that wrote them."""

    key: bytes
    parent: bytes | None
    ids: bytes
    is_snapshot: bool
    layout: str
    tensors: list[Tensor]


class SsdStore:
    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int | None = None,
        write_bytes_per_second: float = 200e6,
        queue_bytes: int = 256 << 20,
        readers: int = 2,
    ) -> None:
        self.written: deque[tuple[bytes, bool]] = deque()

    def set_model(self, fingerprint: bytes, name: str) -> None: ...
    def leading(self, keys: Sequence[bytes]) -> int:
        return 0

    def count(self, hit_tokens: int, missed_tokens: int) -> None: ...
    def touch(self, keys: Sequence[bytes]) -> None: ...
    def has_room(self, nbytes: int) -> bool:
        return False

    def write(self, write: Write, urgent: bool) -> None: ...
    def load(self, reads: Sequence[Read], wake: Callable[[], None] | None) -> Ticket:
        ticket = Ticket(len(reads), wake)
        for number in range(len(reads)):
            ticket.report(number, False)
        return ticket

    def flush(
        self, seconds: float, poll: Callable[[], None], left: Callable[[], int], progress: Callable[[int], None] | None
    ) -> bool:
        return True

    def close(self) -> None: ...
    def stats(self) -> SsdStats:
        return SsdStats()
