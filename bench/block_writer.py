"""A process that writes blocks without a model until it is killed: `python block_writer.py DIR LIMIT SIZE SEED`.

It opens the store when a line comes on its standard input.
"""

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.plain_blocks import PlainBlock, plain_chain
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore

FINGERPRINT = b"\x22" * 32
CHAIN = 12  # blocks


def main(directory: Path, limit: int, size: int, seed: int) -> None:
    """Write chains; every second one is also what another writer writes."""
    print("here", flush=True)
    sys.stdin.readline()
    ssd = SsdStore(directory, max_bytes=limit, write_bytes_per_second=1e12, queue_bytes=8 * size)
    store: PrefixStore[PlainBlock] = PrefixStore(memory_bytes=8 * CHAIN * size, ssd=ssd)
    store.set_model(FINGERPRINT, "plain")
    for number in itertools.count(seed):
        for key, parent, ids, block in plain_chain(number if number % 2 else number * 1000 + seed, CHAIN, size):
            store.put(key, parent, ids, block)
            while not ssd.has_room(size):
                store.poll()
                time.sleep(0.0005)
        store.poll()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
