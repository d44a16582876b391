"""The prefix blocks of a model as a tree of chains, for those that watch a server. Pure; called when somebody asks.

A chain is a run of blocks of which each is the only successor of the one before; where prompts part, new chains begin.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cache_store.keys import BLOCK_SIZE
from protocol.figures import PrefixChain


@dataclass
class Node:
    """One block: its bytes in each tier, 0 where it isn't. `used` is in Unix seconds."""

    key: bytes
    parent: bytes | None
    memory: int = 0
    ssd: int = 0
    used: float = 0.0
    hits: int = 0
    pinned: bool = False


@dataclass
class _Walk:
    """What is still to be shown: blocks at which chains begin, each with its place in the tree."""

    heads: list[tuple[Node, int, int]] = field(default_factory=list)

    def add(self, nodes: Iterable[Node], parent: int, depth: int, latest: Mapping[bytes, float]) -> None:
        """Take in heads of chains that go on from chain `parent`; the one used last comes next."""
        in_turn = sorted(nodes, key=lambda node: latest[node.key])
        self.heads += [(node, parent, depth) for node in in_turn]


def chains(nodes: Mapping[bytes, Node], most: int) -> list[PrefixChain]:
    """The blocks as at most `most` chains: parents before their children, and of those the ones used last first.

    A block whose parent isn't there begins a chain of unknown depth, -1.
    """
    after: dict[bytes | None, list[Node]] = defaultdict(list)
    roots = []
    for node in nodes.values():
        if node.parent in nodes:
            after[node.parent].append(node)
        else:
            roots.append(node)
    walk = _Walk()
    latest = _latest(nodes, after)
    for root in roots:
        walk.add([root], -1, 0 if root.parent is None else -1, latest)
    walk.heads.sort(key=lambda head: latest[head[0].key])
    found: list[PrefixChain] = []
    while walk.heads and len(found) < most:
        node, parent, depth = walk.heads.pop()
        run = [node]
        while len(after[run[-1].key]) == 1:
            run.append(after[run[-1].key][0])
        found.append(_chain(run, parent, depth))
        end = depth + len(run) * BLOCK_SIZE if depth >= 0 else -1
        walk.add(after[run[-1].key], len(found) - 1, end, latest)
    return found


def _latest(nodes: Mapping[bytes, Node], after: Mapping[bytes | None, list[Node]]) -> dict[bytes, float]:
    """When each block, or one behind it, was used last."""
    latest = {key: node.used for key, node in nodes.items()}
    ends = [node for key, node in nodes.items() if key not in after]
    for end in ends:
        used, node = end.used, nodes.get(end.parent) if end.parent is not None else None
        while node is not None and latest[node.key] < used:
            latest[node.key] = used
            node = nodes.get(node.parent) if node.parent is not None else None
    return latest


def _chain(run: list[Node], parent: int, depth: int) -> PrefixChain:
    return PrefixChain(
        run[-1].key[:6].hex(),
        parent,
        depth,
        len(run) * BLOCK_SIZE,
        sum(node.memory > 0 for node in run),
        sum(node.memory for node in run),
        sum(node.ssd > 0 for node in run),
        sum(node.ssd for node in run),
        max(node.used for node in run),
        max(node.hits for node in run),
        any(node.pinned for node in run),
    )
