"""The facade with a real directory: hits by tier, restarts, eviction with writes under way."""

from stores import Open, load, put_chain

from bench.plain_blocks import content
from cache_store.store import Hit


def test_a_block_is_found_at_once_and_after_a_restart(open_store: Open):
    store = open_store()
    keys = put_chain(store, 1, 5)
    assert store.lookup(keys) == Hit(5, 0)
    assert store.flush(10)
    store.close()
    again = open_store()
    assert again.lookup(keys) == Hit(0, 5)
    done, data = load(again, keys)
    assert done == 5
    assert data == [content(key, 100_000) for key in keys]
