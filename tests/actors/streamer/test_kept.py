"""Values that clients keep in the streamer."""

from actors.streamer.kept import KeptValues


def test_what_was_used_least_recently_goes_first():
    kept = KeptValues(max_bytes=100, max_values=2)
    assert kept.put("a", b"1")
    assert kept.put("b", b"2")
    assert kept.get("a") == b"1"
    assert kept.put("c", b"3")
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (b"1", None, b"3")


def test_bytes_are_bounded():
    kept = KeptValues(max_bytes=100, max_values=10)
    assert not kept.put("a", b"x" * 100)
    for key in "abc":
        assert kept.put(key, b"x" * 40)
    assert kept.get("a") is None
    assert kept.drop("b")
    assert not kept.drop("b")
    assert kept.get("c") == b"x" * 40
