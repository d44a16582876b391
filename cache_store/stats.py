"""Figures of the prefix cache, as the engine reports them."""

import msgspec


class SsdStats(msgspec.Struct, frozen=True, kw_only=True):
    """The SSD tier. Bytes and counts are of this process, but `used` and `limit` of the whole directory."""

    used_bytes: int = 0
    limit_bytes: int = 0
    blocks: int = 0  # of all models
    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    queued_blocks: int = 0
    queued_bytes: int = 0
    faults: int = 0  # files that were unreadable or wrong
    read_bytes_per_second: float = 0.0  # lately; 0 before the first read
    writing: bool = False  # False while the disk refuses, and before the index is open


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """All tiers of one engine's store."""

    memory_blocks: int
    memory_bytes: int
    memory_limit_bytes: int
    snapshot_bytes: int
    evicted_blocks: int
    unwritten_blocks: int  # evicted before the SSD had room for them
    memory_hit_tokens: int
    ssd_hit_tokens: int
    missed_tokens: int
    ssd: SsdStats = SsdStats()
