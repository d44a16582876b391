"""Block files: readable by any safetensors tool, and no damaged byte goes unnoticed."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from bench.checks.blocks import DAMAGE, damaged
from bench.plain_blocks import PlainBlock, fill
from cache_store.block import Tensor
from cache_store.block_file import BadBlock, build_header, check_block, read_block, read_header, write_block

FINGERPRINT = b"\x11" * 32
KEY = b"\x22" * 32


def write(path: Path, block: PlainBlock) -> bytes:
    header, _ = build_header(
        fingerprint=FINGERPRINT,
        model="m",
        key=KEY,
        parent=None,
        ids=b"\1\0\0\0" * 256,
        is_snapshot=False,
        layout=block.layout,
        tensors=block.tensors(),
    )
    write_block(path, header, block.tensors())
    return path.read_bytes()


def read(path: Path, size: int) -> bytes:
    memory = bytearray(size)
    read_block(path, FINGERPRINT, KEY, "plain", fill(memory))
    return bytes(memory)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 10_000), st.randoms())
def test_what_is_written_is_read(tmp_path: Path, size: int, random: Random):
    path = tmp_path / "b"
    path.unlink(missing_ok=True)
    data = random.randbytes(size)
    write(path, PlainBlock(data))
    assert read(path, size) == data
    header = check_block(path)
    assert (header.key, header.fingerprint, header.parent, header.ids) == (KEY, FINGERPRINT, None, b"\1\0\0\0" * 256)
    assert header.start % 4096 == 0
    assert header.size == path.stat().st_size == header.start + size


def test_large_pieces_are_read_in_parts(tmp_path: Path):
    data = np.random.default_rng(1).bytes(11_000_001)
    write(tmp_path / "b", PlainBlock(data))
    memory = bytearray(len(data))
    read_block(tmp_path / "b", FINGERPRINT, KEY, "plain", [memoryview(memory)])
    assert memory == data


def test_other_tools_read_it(tmp_path: Path):
    halves = np.arange(12, dtype=np.float16).reshape(3, 4)
    words = np.arange(5, dtype=np.uint32)
    tensors = [
        Tensor("halves", "F16", halves.shape, memoryview(halves)),
        Tensor("words", "U32", words.shape, memoryview(words)),
    ]
    header, _ = build_header(
        fingerprint=FINGERPRINT,
        model="m",
        key=KEY,
        parent=KEY,
        ids=b"",
        is_snapshot=True,
        layout="",
        tensors=tensors,
    )
    write_block(tmp_path / "b", header, tensors)
    loaded = load_file(tmp_path / "b")
    np.testing.assert_array_equal(loaded["halves"], halves)
    np.testing.assert_array_equal(loaded["words"], words)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_any_kind_is_noticed(tmp_path: Path, kind: str):
    path = tmp_path / "b"
    whole = write(path, PlainBlock(b"0123456789" * 60))
    for changed in damaged(whole, kind):
        path.write_bytes(changed)
        with pytest.raises(BadBlock):
            read(path, 600)
        with pytest.raises(BadBlock):
            check_block(path)


def test_another_block_layout_or_size_is_not_served(tmp_path: Path):
    path = tmp_path / "b"
    write(path, PlainBlock(bytes(600)))
    memory = [memoryview(bytearray(600))]
    for fingerprint, key, layout, targets in (
        (bytes(32), KEY, "plain", memory),
        (FINGERPRINT, bytes(32), "plain", memory),
        (FINGERPRINT, KEY, "other", memory),
        (FINGERPRINT, KEY, "plain", [memoryview(bytearray(599))]),
        (FINGERPRINT, KEY, "plain", [memoryview(bytearray(601))]),
    ):
        with pytest.raises(BadBlock):
            read_block(path, fingerprint, key, layout, targets)
    assert read_header(path).layout == "plain"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(file: int, views: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.writev", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "b", PlainBlock(bytes(600)))
    assert list(tmp_path.iterdir()) == []
