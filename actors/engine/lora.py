"""`Lora`: linear layers to which rows of a batch may each add the low-rank change of an adapter of their own.

Used by `actors.engine.model` and `actors.engine.adapters` on the engine's one thread. Each changed layer has a table
with room for a few adapters, all padded to one rank: A (slots × rank, inputs) and B (slots × rank, outputs). A forward
multiplies with a range of the table at once, and sets to zero between the two products what belongs to another
adapter than the row's own: two plain products of small matrices, whatever the mixture. A row without an adapter gets
exactly 0 added, and a forward in which no row has one builds the graph of the bare model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten

from actors.adapter_files import AdapterFiles, Matrices

NONE = -1  # the slot of a row without an adapter

_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


class Selection(NamedTuple):
    """The adapters of a forward's rows: slots from `first` to before `last` of every table.

    `mask` (rows, 1, slots, 1) says which one is a row's own; None: the only one is that of all rows.
    """

    rows: int
    first: int
    last: int
    mask: mx.array | None


def select(slots: Sequence[int]) -> Selection | None:
    """What rows with these slots, NONE among them, compute with; None when no row has one."""
    wanted = np.array(slots, np.int32)
    used = wanted[wanted != NONE]
    if not len(used):
        return None
    first, last = int(used.min()), int(used.max()) + 1
    if last - first == 1 and len(used) == len(wanted):
        return Selection(len(wanted), first, last, None)
    mask = wanted[:, None] == np.arange(first, last, dtype=np.int32)
    return Selection(len(wanted), first, last, mx.array(mask[:, None, :, None]))


class Chosen:
    """The selection of the forward that is being built; all layers look here."""

    def __init__(self) -> None:
        self.selection: Selection | None = None


class Table:
    """The adapters' matrices for one layer."""

    def __init__(self, slots: int, rank: int, inputs: int, outputs: int, dtype: mx.Dtype) -> None:
        self.rank = rank
        self.a = mx.zeros((slots * rank, inputs), dtype)
        self.b = mx.zeros((slots * rank, outputs), dtype)
        self._parts: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    def put(self, slot: int, matrices: Matrices | None) -> None:
        """Write an adapter into its slot; None for one that leaves this layer as it is."""
        self._parts.clear()  # so that nobody else holds the arrays, and they are written in place
        rows = slice(slot * self.rank, (slot + 1) * self.rank)
        if matrices is None:
            self.a[rows] = 0
            self.b[rows] = 0
            return
        self.a[rows] = self._padded(_array(matrices.a, matrices.dtype))
        self.b[rows] = self._padded(_array(matrices.b, matrices.dtype).astype(self.b.dtype) * matrices.scale)

    def _padded(self, matrix: mx.array) -> mx.array:
        return mx.pad(matrix.astype(self.a.dtype), [(0, self.rank - matrix.shape[0]), (0, 0)])

    def change(self, x: mx.array, selection: Selection) -> mx.array:
        """What is added to the layer's output for `x` (rows, …, inputs)."""
        a, b = self._part(selection.first, selection.last)
        low = x @ a.T
        if selection.mask is not None:
            # Whatever lies between rows and inputs, even folded into the rows: these come first.
            parts = low.reshape(selection.rows, -1, selection.last - selection.first, self.rank)
            low = mx.where(selection.mask, parts, 0).reshape(low.shape)
        return low @ b

    def _part(self, first: int, last: int) -> tuple[mx.array, mx.array]:
        if last * self.rank - first * self.rank == self.a.shape[0]:
            return self.a, self.b
        part = self._parts.get((first, last))
        if part is None:
            rows = slice(first * self.rank, last * self.rank)
            part = self._parts[first, last] = self.a[rows], self.b[rows]
        return part


def _array(matrix: Any, dtype: str) -> mx.array:
    array = mx.array(matrix)
    return array.view(mx.bfloat16) if dtype == "BF16" else array


class LoraLinear(Module):
    """A linear layer, quantized or not, in the place of which it stands."""

    def __init__(self, linear: Module, table: Table, chosen: Chosen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX's
        self.linear = linear
        self._table = table
        self._chosen = chosen

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's output for `x` (rows, …, inputs), changed for the rows that have adapters."""
        y: mx.array = self.linear(x)
        selection = self._chosen.selection
        if selection is None:
            return y
        return y + self._table.change(x, selection).astype(y.dtype)


class Lora:
    """The tables of all layers that one of the adapters changes."""

    def __init__(self, network: Any, adapters: Sequence[AdapterFiles], slots: int) -> None:
        """Puts layers with tables of `slots` adapters in the place of the network's own.

        Raises ValueError for an adapter that doesn't fit the network, or that changes a kind of layer that can't be
        changed row by row.
        """
        modules = dict(network.named_modules())
        dtype = _common_dtype(adapters)
        ranks: dict[str, int] = {}
        for adapter in adapters:
            for name, part in adapter.layers.items():
                _check(adapter, name, modules.get(name), part.inputs, part.outputs)
                ranks[name] = max(ranks.get(name, 0), part.rank)
        self.slots = slots
        self.chosen = Chosen()
        self._tables: dict[str, Table] = {}
        layers: list[tuple[str, Module]] = []
        for name, rank in sorted(ranks.items()):
            inputs, outputs = _size(modules[name])
            self._tables[name] = Table(slots, rank, inputs, outputs, dtype)
            layers.append((name, LoraLinear(modules[name], self._tables[name], self.chosen)))
        network.update_modules(tree_unflatten(layers))
        mx.eval(self._arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(array.nbytes for array in self._arrays())

    def put(self, slot: int, layers: Mapping[str, Matrices]) -> None:
        """Write an adapter into a slot, which no row in flight may be using. Waits for it."""
        for name, table in self._tables.items():
            table.put(slot, layers.get(name))
        mx.eval(self._arrays())

    def _arrays(self) -> list[mx.array]:
        return [array for table in self._tables.values() for array in (table.a, table.b)]


def _common_dtype(adapters: Sequence[AdapterFiles]) -> mx.Dtype:
    dtypes = {dtype for adapter in adapters for dtype in adapter.dtypes}
    return _DTYPES[dtypes.pop()] if len(dtypes) == 1 else mx.float32


def _size(linear: Any) -> tuple[int, int]:
    outputs, inputs = linear.weight.shape
    return (inputs * 32 // linear.bits if isinstance(linear, QuantizedLinear) else inputs), outputs


def _check(adapter: AdapterFiles, name: str, module: Any, inputs: int, outputs: int) -> None:
    what = f"the adapter {adapter.name!r} in {adapter.folder} doesn't fit this model"
    if module is None:
        raise ValueError(f"{what}: it changes {name}, which the model doesn't have; is it of another base?")
    if type(module) not in (Linear, QuantizedLinear):
        raise ValueError(
            f"the adapter {adapter.name!r} in {adapter.folder} can't be served: it changes {name}, a "
            f"{type(module).__name__}, and only linear layers can be changed request by request; make one model of it "
            "and its base with `mlx_lm.fuse`, and serve that"
        )
    if (inputs, outputs) != _size(module):
        wide = " × ".join(map(str, _size(module)))
        raise ValueError(f"{what}: its {name} is {inputs} × {outputs}, the model's {wide}")
