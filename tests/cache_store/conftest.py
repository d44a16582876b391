"""Stores that are closed when a test ends, and reports for the checks that tests run small."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for stores.py

from stores import FINGERPRINT, Open, Store, until

from bench.checks.report import Report
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Open a store on the test's directory, ready and with a model."""
    stores: list[Store] = []

    def open_(memory_bytes: int = 64 << 20, directory: Path | None = None, **options: Any) -> Store:
        ssd = SsdStore(directory or tmp_path / "cache", write_bytes_per_second=1e12, **options)
        store: Store = PrefixStore(memory_bytes=memory_bytes, ssd=ssd)
        stores.append(store)
        store.set_model(FINGERPRINT, "model")
        until(lambda: ssd.ready)
        return store

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def report() -> Report:
    """For the checks of `bench/checks`."""
    return Report(print)
