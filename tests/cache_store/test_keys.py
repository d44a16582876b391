"""Keys: what makes two prefixes the same."""

import hashlib
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_store.keys import BLOCK_SIZE, chain_keys, fingerprint, snapshot_key

IDS = np.arange(5 * BLOCK_SIZE + 17, dtype=np.uint32)


def test_whole_blocks_only_and_each_stands_for_all_before_it():
    keys = chain_keys(IDS)
    assert len(keys) == 5
    changed = IDS.copy()
    changed[2 * BLOCK_SIZE] += 1
    assert [a == b for a, b in zip(keys, chain_keys(changed), strict=True)] == [True, True, False, False, False]


def test_the_chain_is_sha256_of_parent_and_little_endian_ids():
    root = hashlib.sha256(b"callboard prefix").digest()
    ids = struct.pack("<256I", *range(256))
    assert chain_keys(IDS[:256]) == [hashlib.sha256(root + ids).digest()]
    assert chain_keys(IDS.astype("<u4").tobytes()) == chain_keys(IDS)


def test_a_salt_parts_everything_and_an_image_what_follows_it():
    keys = chain_keys(IDS)
    assert not set(keys) & set(chain_keys(IDS, salt="tenant"))
    adapted = chain_keys(IDS, adapter="a1")
    assert not set(keys) & set(adapted)
    assert not set(adapted) & set(chain_keys(IDS, salt="a1"))
    assert chain_keys(IDS, adapter="a1", known=adapted[:2]) == adapted
    with_image = chain_keys(IDS, images=[(2 * BLOCK_SIZE + 5, b"cat")])
    assert [a == b for a, b in zip(keys, with_image, strict=True)] == [True, True, False, False, False]
    assert with_image != chain_keys(IDS, images=[(2 * BLOCK_SIZE + 5, b"dog")])
    assert with_image != chain_keys(IDS, images=[(2 * BLOCK_SIZE + 6, b"cat")])


@given(st.lists(st.binary(max_size=3), max_size=3), st.lists(st.binary(max_size=3), max_size=3))
def test_extras_do_not_run_into_each_other(some: list[bytes], others: list[bytes]):
    ids = IDS[:BLOCK_SIZE]
    same = chain_keys(ids, images=[(0, each) for each in some]) == chain_keys(ids, images=[(0, x) for x in others])
    assert same == (sorted(some) == sorted(others))


def test_a_fingerprint_differs_with_any_part():
    parts = {"weights": "abc", "kv_bits": 4, "adapter": None}
    base = fingerprint(**parts)
    assert len(base) == 32
    assert base == fingerprint(**dict(reversed(parts.items())))
    for change in ({"weights": "abd"}, {"kv_bits": 8}, {"kv_bits": "4"}, {"adapter": ""}, {"adapter": "None"}):
        assert fingerprint(**(parts | change)) != base


def test_a_snapshot_has_a_key_of_its_own():
    (key,) = chain_keys(IDS[:BLOCK_SIZE])
    assert snapshot_key(key) != key
