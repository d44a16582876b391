"""`Request`: a row as it was submitted, and what it has generated here: all that is needed to begin it anew.

Made by `actors.engine.engine`; read by `actors.engine.prefix`, which keeps those whose blocks are on their way.
"""

import msgspec
import numpy as np

from actors.engine.prefill import Ids, Row
from actors.engine.row_options import RowOptions
from cache_store.keys import chain_keys


class Request:
    """One row. `ids` are its prompt and what it had generated when it was submitted; `salt` parts tenants."""

    __slots__ = (
        "_keys",
        "cached_told",
        "generated",
        "ids",
        "options",
        "pin",
        "priority",
        "prompt_tokens",
        "rid",
        "salt",
    )

    def __init__(
        self,
        rid: int,
        ids: Ids,
        prompt_tokens: int,
        options: RowOptions,
        *,
        salt: str = "",
        priority: int = 0,
        pin: bool = False,
    ) -> None:
        self.rid = rid
        self.ids = ids
        self.prompt_tokens = prompt_tokens
        self.options = options
        self.salt = salt
        self.priority = priority
        self.pin = pin
        self.generated: list[int] = []
        self.cached_told = False
        self._keys: list[bytes] = []

    def all_ids(self) -> Ids:
        """All ids so far."""
        return np.concatenate([self.ids, np.array(self.generated, np.uint32)]) if self.generated else self.ids

    def row(self) -> Row:
        """The row to compute, from its beginning to the last token so far."""
        if not self.generated:
            return Row(self.rid, self.ids, self.prompt_tokens, self.options)
        index = self.options.index + len(self.generated)
        return Row(self.rid, self.all_ids(), self.prompt_tokens, msgspec.structs.replace(self.options, index=index))

    def keys(self, blocks: int) -> list[bytes]:
        """Keys of its first `blocks` blocks, of which it has all ids."""
        if len(self._keys) < blocks:
            self._keys = chain_keys(self.all_ids(), self.salt)
        return self._keys[:blocks]
