"""The tree of prefix blocks: chains of any forest, and those of a store with both tiers."""

from hypothesis import given
from hypothesis import strategies as st
from stores import Open, put_chain, until

from bench.plain_blocks import PlainBlock
from cache_store.keys import BLOCK_SIZE
from cache_store.store import PrefixStore
from cache_store.tree import Node, chains


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@given(st.lists(st.tuples(st.integers(-2, 30), st.integers(0, 9)), max_size=30), st.integers(1, 40))
def test_every_block_is_in_one_chain_behind_its_parents(given_blocks: list[tuple[int, int]], most: int):
    nodes = {}
    for number, (above, used) in enumerate(given_blocks):
        parent = None if above < -1 else b"gone" if above < 0 or above >= number else key(above)
        nodes[key(number)] = Node(key(number), parent, memory=100, ssd=7 * (used % 2), used=float(used))
    everything = chains(nodes, 1000)
    assert sum(chain.tokens for chain in everything) == len(nodes) * BLOCK_SIZE
    assert sum(chain.memory_bytes for chain in everything) == len(nodes) * 100
    assert sum(chain.ssd_bytes for chain in everything) == 7 * sum(node.ssd > 0 for node in nodes.values())
    for place, chain in enumerate(everything):
        assert chain.parent < place
        if chain.parent >= 0:
            above = everything[chain.parent]
            assert chain.depth == (above.depth + above.tokens if above.depth >= 0 else -1)
        else:
            assert chain.depth in (0, -1)
    children = [chain.parent for chain in everything if chain.parent >= 0]
    assert all(children.count(parent) > 1 for parent in children)
    assert chains(nodes, most) == everything[:most]


def test_what_was_used_last_comes_first():
    old, new, tip = Node(b"o", None, used=1.0), Node(b"n", None, used=2.0), Node(b"t", b"o", used=3.0)
    found = chains({node.key: node for node in (old, new, tip)}, 9)
    assert [chain.name for chain in found] == [b"t".hex(), b"n".hex()]
    assert (found[0].tokens, found[0].used) == (2 * BLOCK_SIZE, 3.0)


def test_a_store_shows_both_tiers_and_what_was_found(open_store: Open):
    store = open_store(memory_bytes=250_000)
    first, second = put_chain(store, 1, 3), put_chain(store, 2, 2)
    store.flush(10.0)
    assert len(store.acquire(second)) == 2
    store.release(second)
    until(lambda: store.stats().ssd.blocks == 5)
    tree = store.tree(100, 10)
    assert (tree.memory_blocks, tree.memory_looked, tree.ssd_blocks, tree.ssd_looked) == (2, 2, 5, 5)
    by_name = {chain.name: chain for chain in tree.chains}
    shown, hidden = by_name[second[-1][:6].hex()], by_name[first[-1][:6].hex()]
    assert (shown.memory_blocks, shown.memory_bytes, shown.ssd_blocks, shown.hits) == (2, 200_000, 2, 1)
    assert (hidden.memory_blocks, hidden.ssd_blocks, hidden.depth, hidden.hits) == (0, 3, 0, 0)
    assert hidden.ssd_bytes > 300_000
    assert not tree.left_out
    assert store.tree(100, 1).left_out
    assert len(store.tree(1, 10).chains) == 1
    assert store.tree(1, 10).memory_looked == 1


def test_snapshots_belong_to_their_block_in_either_tier(open_store: Open):
    store = open_store()
    (block,) = put_chain(store, 1, 1)
    store.put(b"s" * 32, block, b"", PlainBlock(b"\0" * 50_000), snapshot=True)
    store.flush(10.0)
    store.poll()
    until(lambda: store.stats().ssd.blocks == 2)
    [chain] = store.tree(100, 10).chains
    assert (chain.memory_blocks, chain.memory_bytes, chain.ssd_blocks) == (1, 150_000, 1)
    assert chain.ssd_bytes > 150_000


def test_without_the_ssd_there_is_memory():
    store: PrefixStore[PlainBlock] = PrefixStore(memory_bytes=1_000_000)
    put_chain(store, 1, 3)
    [chain] = store.tree(100, 10).chains
    assert (chain.memory_blocks, chain.ssd_blocks, chain.tokens) == (3, 0, 3 * BLOCK_SIZE)
