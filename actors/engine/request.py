"""`Request`: a row as it was submitted, and what it has generated here: all that is needed to begin it anew.

Made by `actors.engine.engine`; read by `actors.engine.prefix`, which keeps those whose blocks are on their way.
"""

import msgspec
import numpy as np

from actors.engine.prefill import Ids, Row
from actors.engine.row_options import RowOptions
from cache_store.keys import chain_keys


class Request:
    """One row. `ids` are its prompt and what it had generated when it was submitted; `salt` parts tenants.

    It may generate `budget` tokens until one of `ending`. `cached` tokens of its prompt were found, not computed. Row
    `like` has the same prompt. `adapter` is the name of its LoRA adapter, if any, and `digest` a hash of that.
    """

    __slots__ = (
        "_digest",
        "_keys",
        "adapter",
        "budget",
        "cached",
        "cached_told",
        "ending",
        "generated",
        "ids",
        "like",
        "options",
        "pin",
        "priority",
        "prompt_tokens",
        "rid",
        "salt",
        "turn",
    )

    def __init__(
        self,
        rid: int,
        ids: Ids,
        prompt_tokens: int,
        options: RowOptions,
        *,
        budget: int = 1,
        ending: frozenset[int] = frozenset(),
        like: int = 0,
        salt: str = "",
        priority: int = 0,
        turn: int = 0,
        pin: bool = False,
        adapter: str = "",
    ) -> None:
        self.rid = rid
        self.ids = ids
        self.prompt_tokens = prompt_tokens
        self.options = options
        self.budget = budget
        self.ending = ending
        self.like = like
        self.salt = salt
        self.priority = priority
        self.turn = turn
        self.pin = pin
        self.adapter = adapter
        self.generated: list[int] = []
        self.cached = 0
        self.cached_told = False
        self._keys: list[bytes] = []
        self._digest = ""

    def all_ids(self) -> Ids:
        """All ids so far."""
        return np.concatenate([self.ids, np.array(self.generated, np.uint32)]) if self.generated else self.ids

    def row(self) -> Row:
        """The row to compute, from its beginning to the last token so far."""
        if not self.generated:
            return Row(self.rid, self.ids, self.prompt_tokens, self.options)
        index = self.options.index + len(self.generated)
        return Row(self.rid, self.all_ids(), self.prompt_tokens, msgspec.structs.replace(self.options, index=index))

    def begins_like(self, other: "Request") -> bool:
        """Whether both are at their beginning, and it is the same."""
        if self.generated or other.generated or (self.salt, self.adapter) != (other.salt, other.adapter):
            return False
        return np.array_equal(self.ids, other.ids)

    def share_prefix(self, other: "Request") -> None:
        """It starts from the caches of `other`, which it begins like; what it finds later it has computed itself."""
        self.cached, self.cached_told = other.cached, True
        self._keys, self._digest = other._keys, other._digest

    @property
    def digest(self) -> str:
        """Hash of the adapter as it was loaded for this row; its blocks are those of this very adapter."""
        return self._digest

    @digest.setter
    def digest(self, digest: str) -> None:
        if digest != self._digest:
            self._digest = digest
            self._keys = []

    def keys(self, blocks: int) -> list[bytes]:
        """Keys of its first `blocks` blocks, of which it has all ids."""
        if len(self._keys) < blocks:
            self._keys = chain_keys(self.all_ids(), self.salt, known=self._keys, adapter=self._digest)
        return self._keys[:blocks]
