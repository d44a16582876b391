"""Content hashes: by content, remembered, and never stale."""

import os
from pathlib import Path

import pytest

from cache_store import content_hash as module
from cache_store.content_hash import content_hash


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    found: list[str] = []
    read = module._read
    monkeypatch.setattr(module, "_read", lambda path: found.append(path.name) or read(path))
    return found


def make(path: Path, data: bytes, age: float = 100.0) -> Path:
    path.write_bytes(data)
    os.utime(path, (path.stat().st_mtime - age,) * 2)
    return path


def test_it_is_by_name_and_content_and_read_once(tmp_path: Path, reads: list[str]):
    memo = tmp_path / "memo" / "hashes.json"
    files = [make(tmp_path / name, name.encode()) for name in ("a", "b")]
    first = content_hash(files, memo)
    assert content_hash(files[::-1], memo) == first
    assert reads == ["a", "b"]
    make(files[1], b"B", 50.0)
    assert content_hash(files, memo) != first
    assert reads == ["a", "b", "b"]
    make(files[1], b"b", 70.0)
    assert content_hash(files, memo) == first


def test_a_file_changed_just_now_is_not_remembered(tmp_path: Path, reads: list[str]):
    path = make(tmp_path / "a", b"a", age=0.0)
    content_hash([path], tmp_path / "memo")
    content_hash([path], tmp_path / "memo")
    assert reads == ["a", "a"]


def test_a_blob_of_the_hub_brings_its_own(tmp_path: Path, reads: list[str]):
    (tmp_path / "blobs").mkdir()
    make(tmp_path / "blobs" / ("0" * 64), b"a")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / ("0" * 64))
    assert content_hash([tmp_path / "model.safetensors"], tmp_path / "memo")
    assert reads == []


def test_a_memo_that_is_damaged_or_cannot_be_written_does_no_harm(tmp_path: Path):
    path = make(tmp_path / "a", b"a")
    memo = tmp_path / "memo"
    memo.write_bytes(b"[1, 2")
    digest = content_hash([path], memo)
    assert content_hash([path], memo) == digest
    assert content_hash([path], tmp_path / "a" / "memo") == digest
