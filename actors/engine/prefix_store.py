"""Opening the prefix store as the settings say, and the fingerprint that tells its blocks of one model from another's.

Called by `actors.engine.actor` at its start. The weights' part of the fingerprint reads every weight file once, so it
is computed on a thread beside loading; until it is known, blocks stay in memory.
"""

import threading
import time
from importlib.metadata import version
from pathlib import Path

import structlog

from actors.config import CastConfig
from actors.engine.block_cuts import PackedBlock
from actors.engine.block_layout import BlockLayout
from cache_store.content_hash import content_hash
from cache_store.keys import fingerprint
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore, Watcher

log = structlog.get_logger()

MEGABYTE = 1 << 20
QUEUE_BYTES = 256 * MEGABYTE  # of blocks that wait to be written, at most …
QUEUE_SHARE = 16  # … and this part of the memory for rows and blocks
WEIGHTS = ("*.safetensors", "config.json", "*.py")
TOKENIZER = ("tokenizer*", "*.tiktoken", "vocab.*", "merges.txt")


class ContentHashes:
    """The hashes of a model folder's weights and tokenizer, computed on a thread of their own."""

    def __init__(self, model: Path, memo: Path) -> None:
        self._model = model
        self._memo = memo
        self._found: tuple[str, str] | None = None
        self._thread = threading.Thread(target=self._work, name="content-hash", daemon=True)
        self._thread.start()

    @property
    def found(self) -> tuple[str, str] | None:
        """Hash of the weights and of the tokenizer, once both are known."""
        return self._found

    @property
    def running(self) -> bool:
        """Whether they may still come."""
        return self._thread.is_alive()

    def _work(self) -> None:
        try:
            self._found = self._hash(WEIGHTS), self._hash(TOKENIZER)
        except OSError as error:
            log.warning("the prefix cache stays in memory: the model's files can't be read", error=str(error))

    def _hash(self, patterns: tuple[str, ...]) -> str:
        files = {path for pattern in patterns for path in self._model.glob(pattern) if path.is_file()}
        return content_hash(sorted(files), self._memo)


class StoreOpening:
    """The prefix store of one engine, from its settings to the moment its blocks have a name on the SSD."""

    def __init__(self, config: CastConfig, *, prefixes: bool = True) -> None:
        """Without `prefixes` there is no use for a store, whatever the settings."""
        self._config = config
        self._wanted = prefixes and config.prefix_cache
        self._layout: BlockLayout | None = None
        self._hashes: ContentHashes | None = None
        self._ssd: SsdStore | None = None
        self.memory_bytes = 0  # for blocks, at most
        self.queue_bytes = 0  # for those among them that have left the memory tier and wait to be written
        self.store: PrefixStore[PackedBlock] | None = None
        if self._wanted and config.ssd_cache and config.ssd_cache_dir:
            memo = Path(config.ssd_cache_dir).parent / "content-hashes.json"
            self._hashes = ContentHashes(Path(config.model_path), memo)

    def set_memory(self, free: int) -> None:
        """Say how many bytes blocks and rows' caches may take together."""
        config = self._config
        if not self._wanted:
            return
        if self._hashes is not None:
            self.queue_bytes = min(QUEUE_BYTES, free // QUEUE_SHARE)
            free -= self.queue_bytes
        self.memory_bytes = int(free * config.cache_memory_percent)
        if config.cache_memory_mb is not None:
            self.memory_bytes = min(config.cache_memory_mb * MEGABYTE, free)

    def open(
        self, layout: BlockLayout | None, kinds: list[str], watcher: Watcher | None = None
    ) -> PrefixStore[PackedBlock] | None:
        """The store; None when prefixes are not to be cached, or the model's caches can't be cut into blocks."""
        config = self._config
        if not self._wanted:
            return None
        if layout is None:
            log.warning("no prefix is reused: this kind of cache can't be cut into blocks", caches=kinds)
            self._hashes = None
            return None
        self._layout = layout
        if self._hashes is not None:
            gigabytes = config.ssd_cache_max_gb
            self._ssd = SsdStore(
                Path(config.ssd_cache_dir),
                max_bytes=None if gigabytes is None else int(gigabytes * 1e9),
                write_bytes_per_second=config.ssd_write_mbps * 1e6,
                queue_bytes=self.queue_bytes,
            )
        self.store = PrefixStore(memory_bytes=self.memory_bytes, ssd=self._ssd, watcher=watcher)
        log.info(
            "prefix cache",
            memory_mb=self.memory_bytes >> 20,
            block_kb=layout.block.nbytes >> 10,
            snapshot_kb=layout.snapshot.nbytes >> 10,
            ssd=config.ssd_cache_dir if self._ssd is not None else "off",
        )
        return self.store

    def wait(self, seconds: float) -> None:
        """Wait until blocks on the SSD can be found, so that the first requests find them; not for ever."""
        until = time.monotonic() + seconds
        while self._ssd is not None and time.monotonic() < until and (self.pending or not self._ssd.ready):
            self.poll()
            time.sleep(0.005)

    @property
    def pending(self) -> bool:
        """Whether the fingerprint is still to come."""
        return self._hashes is not None and (self._hashes.found is not None or self._hashes.running)

    def poll(self) -> None:
        """Name the model once its fingerprint is known."""
        if self._hashes is None or self.store is None or self._layout is None or self._hashes.found is None:
            return
        weights, tokenizer = self._hashes.found
        self._hashes = None
        config = self._config
        name = fingerprint(
            weights=weights,
            tokenizer=tokenizer,
            adapter=None,
            kv_bits=config.kv_bits,
            kv_group_size=config.kv_group_size if config.kv_bits else None,
            layout=self._layout.description,
            library=version("mlx-lm"),
        )
        self.store.set_model(name, config.model_name)
