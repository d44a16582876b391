"""`BlockLayout`: how a model's caches become prefix blocks: its caches, and where each lies in a block.

Made once per model from the caches of a row that has seen a few tokens; used by `actors.engine.block_cuts` and
`actors.engine.block_restore` on the engine's one thread. Pure: it only looks at shapes.

A block is the state of 256 tokens, a snapshot that of all recurrent layers at a block's end. Either is packed into one
array of bytes per dtype: planes of one shape behind each other, each (heads, tokens, width).

    kind        a block holds of its 256 tokens     a hit at token b needs
    plain       all                                 all tokens before b
    quantized   all, packed, scales and biases      all tokens before b
    window      as many as the window, and the      the kept first tokens and the window before b
                kept first tokens of the row
    chunked     as many as the chunk                the chunk's length before b
    states      nothing                             a snapshot at b
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from actors.engine.scheduler import BLOCK

LAYOUT_VERSION = 1

PLAIN, QUANTIZED, WINDOW, CHUNKED, STATES = "plain", "quantized", "window", "chunked", "states"
_KINDS = {
    "KVCache": PLAIN,
    "QuantizedKVCache": QUANTIZED,
    "RotatingKVCache": WINDOW,
    "ChunkedKVCache": CHUNKED,
    "ArraysCache": STATES,
}


class Plane(NamedTuple):
    """One array of a cache: (heads, width) per token, or the whole shape of a state without its row."""

    shape: tuple[int, ...]
    dtype: Any  # mlx.core.Dtype
    itemsize: int


class Leaf(NamedTuple):
    """One cache: `path` is its layer, and its place in a list of caches; sizes are in tokens, 0 for no bound."""

    path: tuple[int, ...]
    kind: str
    planes: tuple[Plane, ...]
    size: int = 0
    keep: int = 0

    @property
    def tokens(self) -> int:
        """How many of a block's last tokens a block holds."""
        return min(BLOCK, self.size - self.keep) if self.size else BLOCK

    def first(self, end: int) -> int:
        """The first token, the kept ones aside, that a row of `end` tokens needs here."""
        return max(self.keep, end - (self.size - self.keep)) if self.size else 0


class Spot(NamedTuple):
    """Where a plane of a leaf lies in a pack: byte `at` of buffer `buffer`. `tokens` is 0 for a state."""

    leaf: int
    plane: int
    kept: bool
    tokens: int
    buffer: int
    at: int
    nbytes: int


class Pack(NamedTuple):
    """All spots of a block or a snapshot in their order, and the bytes of each of its buffers."""

    spots: list[Spot]
    dtypes: list[Any]
    sizes: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of one block or snapshot."""
        return sum(self.sizes)


class BlockLayout:
    """What a model's blocks and snapshots hold. `description` names it wherever blocks are kept."""

    def __init__(self, leaves: list[Leaf]) -> None:
        self.leaves = leaves
        self.block = _pack(leaves, states=False)
        self.snapshot = _pack(leaves, states=True)
        self.has_blocks = bool(self.block.spots)
        self.has_snapshots = bool(self.snapshot.spots)
        self.trims = all(leaf.kind in (PLAIN, QUANTIZED) for leaf in leaves)
        self.description = f"v{LAYOUT_VERSION};" + ";".join(_runs([_described(leaf) for leaf in leaves]))


def block_layout(caches: Sequence[Any]) -> BlockLayout | None:
    """The layout of a row's caches that have seen a few tokens; None when there is a kind that can't be cut."""
    leaves: list[Leaf] = []
    for path, cache in walk(caches):
        leaf = _leaf(path, cache)
        if leaf is None:
            return None
        leaves.append(leaf)
    return BlockLayout(leaves) if leaves else None


def walk(caches: Sequence[Any], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """All caches of a list, those in lists of caches too, with their paths."""
    for place, cache in enumerate(caches):
        if (parts := getattr(cache, "caches", None)) is not None:
            yield from walk(list(parts), (*path, place))
        else:
            yield (*path, place), cache


def _leaf(path: tuple[int, ...], cache: Any) -> Leaf | None:
    kind = _KINDS.get(type(cache).__name__)
    if kind is None:
        return None
    if kind is STATES:
        states = cache.cache
        if not states or any(state is None or state.shape[0] != 1 for state in states):
            return None
        return Leaf(path, kind, tuple(Plane(tuple(s.shape[1:]), s.dtype, s.itemsize) for s in states))
    if cache.keys is None:
        return None
    arrays = [*cache.keys, *cache.values] if kind is QUANTIZED else [cache.keys, cache.values]
    planes = tuple(Plane((a.shape[1], a.shape[3]), a.dtype, a.itemsize) for a in arrays)
    if kind is WINDOW:
        if not 0 <= cache.keep <= min(BLOCK, cache.max_size - 1):
            return None
        return Leaf(path, kind, planes, cache.max_size, cache.keep)
    if kind is CHUNKED:
        return Leaf(path, kind, planes, cache.chunk_size)
    return Leaf(path, kind, planes)


def _pack(leaves: list[Leaf], *, states: bool) -> Pack:
    """Planes of one dtype together, and within it those of one shape and length: each such run is one copy."""
    found: dict[Any, dict[tuple[int, ...], list[tuple[int, int, bool, int, int]]]] = {}
    for place, leaf in enumerate(leaves):
        if (leaf.kind is STATES) is not states:
            continue
        for number, plane in enumerate(leaf.planes):
            for tokens, kept in ((0, False),) if states else ((leaf.tokens, False), (leaf.keep, True)):
                if kept and not tokens:
                    continue
                count = max(tokens, 1) * plane.itemsize
                for length in plane.shape:
                    count *= length
                runs = found.setdefault(plane.dtype, {})
                runs.setdefault((tokens, *plane.shape), []).append((place, number, kept, tokens, count))
    spots: list[Spot] = []
    sizes: list[int] = []
    for buffer, runs in enumerate(found.values()):
        at = 0
        for run in runs.values():
            for place, number, kept, tokens, count in run:
                spots.append(Spot(place, number, kept, tokens, buffer, at, count))
                at += count
        sizes.append(at)
    return Pack(spots, list(found), sizes)


def _described(leaf: Leaf) -> str:
    planes = ",".join(
        "x".join(map(str, plane.shape)) + str(plane.dtype).rpartition(".")[2].replace("float", "f")
        for plane in leaf.planes
    )
    bounds = f"({leaf.size},{leaf.keep})" if leaf.size else ""
    nested = "." * (len(leaf.path) - 1)
    return f"{nested}{leaf.kind}{bounds}:{planes}"


def _runs(texts: list[str]) -> Iterator[str]:
    start = 0
    for place in range(1, len(texts) + 1):
        if place == len(texts) or texts[place] != texts[start]:
            count = place - start
            yield f"{count}*{texts[start]}" if count > 1 else texts[start]
            start = place
