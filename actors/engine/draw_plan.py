"""`DrawPlan`: how one step of the rows of a sampler is drawn, with all that stays the same from step to step.

Made by `actors.engine.sampler` when rows join, leave or pass their min_tokens; used on the engine's one thread.
Rows are sorted by what their options need: those whose logits are edited from the others, then each by `Kind`.
"""

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from actors.engine.draws import draw_candidates, draw_floor, draw_greedy, draw_nucleus, draw_whole, draw_xtc
from actors.engine.noise import coins, noise_keys
from actors.engine.penalties import Penalties
from actors.engine.row_options import FEW, MANY, Kind, RowOptions, kind_of
from actors.engine.weights import allowed_only


class DrawPlan:
    """The edits and draws of the rows in `options`, by slot; None where a slot is free.

    `masked` tells which rows may not draw their stop ids. `asked` are the slots that want log-probabilities.
    """

    def __init__(
        self,
        options: list[RowOptions | None],
        masked: npt.NDArray[np.bool_],
        penalties: Penalties,
        vocab_size: int,
    ) -> None:
        self.masked = masked
        self._penalties = penalties
        self._penalized = penalties.slots.copy()
        live = [(slot, row) for slot, row in enumerate(options) if row is not None]
        self.asked = [slot for slot, row in live if row.logprobs >= 0]
        self.asked_counts = [row.logprobs for _, row in live if row.logprobs >= 0]
        if self.asked:
            self.asked_mx = mx.array(self.asked, mx.uint32)
        self.constrained = [slot for slot, row in live if row.constrained]
        with_edits = [slot for slot, row in live if row.logit_bias or masked[slot] or row.constrained]
        edited = self._penalized + [slot for slot in with_edits if slot not in set(self._penalized)]
        self._edit = _Edit(edited, options, masked, vocab_size) if edited else None
        plain = sorted({slot for slot, _ in live} - set(edited))
        slots = len(options)
        self._plain = _Draws(plain, [*range(slots)], options, vocab_size)
        self._edited = _Draws(edited, edited, options, vocab_size)
        order = self._plain.order + self._edited.order
        self._order: mx.array | None = None
        if order != [*range(slots)]:
            place = {slot: i for i, slot in enumerate(order)}
            self._order = mx.array([place.get(slot, 0) for slot in range(slots)], mx.uint32)
        if self._penalized:
            self._penalized_mx = mx.array(self._penalized, mx.uint32)

    def draw(
        self,
        logits: mx.array,
        streams: npt.NDArray[np.uint64],
        indices: npt.NDArray[np.uint64],
        allowed: mx.array | None = None,
    ) -> mx.array:
        """Tokens of all slots. `allowed`, bool, has a row of the vocabulary for each slot of `constrained`."""
        drawn = self._plain.draw(logits, streams, indices)
        if self._edit is not None:
            drawn += self._edited.draw(self._edit.apply(logits, self._penalties, allowed), streams, indices)
        if not drawn:
            return mx.zeros((logits.shape[0],), mx.uint32)
        tokens = drawn[0] if len(drawn) == 1 else mx.concatenate(drawn)
        if self._order is not None:
            tokens = tokens[self._order]
        if self._penalized:
            self._penalties.count(tokens[self._penalized_mx])
        return tokens


class _Edit:
    """Bias, masks and penalties of the rows that have any; those with penalties come first."""

    def __init__(
        self, slots: list[int], options: list[RowOptions | None], masked: npt.NDArray[np.bool_], vocab_size: int
    ) -> None:
        self._slots = mx.array(slots, mx.uint32)
        bias: list[tuple[int, int, float]] = []
        stops: list[tuple[int, int]] = []
        for place, slot in enumerate(slots):
            row = options[slot]
            assert row is not None
            bias += [(place, token, value) for token, value in row.logit_bias.items() if 0 <= token < vocab_size]
            if masked[slot] and not row.constrained:
                stops += [(place, token) for token in row.stop_ids if 0 <= token < vocab_size]
        self._bias = _pairs([(place, token) for place, token, _ in bias])
        self._values = mx.array([value for _, _, value in bias], mx.float32)
        self._stops = _pairs(stops)
        held = sorted(slot for slot in slots if _is_held(options[slot]))
        # The mask of each row; behind the last one is that of rows that have none.
        number = {slot: i for i, slot in enumerate(held)}
        self._masks = mx.array([number.get(slot, len(held)) for slot in slots], mx.uint32) if held else None

    def apply(self, logits: mx.array, penalties: Penalties, allowed: mx.array | None) -> mx.array:
        """The logits to draw from, float32, of these rows."""
        rows = self._penalized(self._biased(logits), penalties)
        if allowed is not None and self._masks is not None:
            everything = mx.ones((1, allowed.shape[1]), mx.bool_)
            rows = allowed_only(rows, mx.concatenate([allowed, everything])[self._masks])
        return rows

    def _biased(self, logits: mx.array) -> mx.array:
        rows = logits[self._slots].astype(mx.float32)
        if self._stops is not None:
            rows[self._stops] = -mx.inf
        if self._bias is not None:
            rows = rows.at[self._bias].add(self._values)
        return rows

    def _penalized(self, rows: mx.array, penalties: Penalties) -> mx.array:
        penalized = len(penalties.slots)
        if penalized == rows.shape[0]:
            return penalties.apply(rows)
        if penalized:
            return mx.concatenate([penalties.apply(rows[:penalized]), rows[penalized:]])
        return rows


class _Draws:
    """The draws of one array of logits, a part for each kind of row.

    `rows` tells the slot of each row of the logits; rows that are not in `slots` are free or drawn elsewhere.
    """

    def __init__(self, slots: list[int], rows: list[int], options: list[RowOptions | None], vocab_size: int) -> None:
        self.order: list[int] = []  # the slot of each token that `draw` returns
        self._parts: list[_Part] = []
        kinds: dict[Kind, list[int]] = {}
        for slot in slots:
            row = options[slot]
            assert row is not None
            kinds.setdefault(kind_of(row, vocab_size), []).append(slot)
        place = {slot: i for i, slot in enumerate(rows)}
        free = {slot for slot in rows if options[slot] is None}
        for kind, members in kinds.items():
            # Free rows are drawn along when that spares gathering the others. An argmax is so cheap that this holds
            # for some rows of other kinds, too.
            whole = len(members) + len(free) == len(rows)
            whole = whole or (kind is Kind.GREEDY and 4 * len(members) >= 3 * len(rows))
            if whole:
                mine = set(members)
                part = _Part(kind, rows, None, [options[s] if s in mine else None for s in rows], vocab_size)
                self.order += [slot if slot in mine else -1 for slot in rows]
            else:
                places = mx.array([place[slot] for slot in members], mx.uint32)
                part = _Part(kind, members, places, [options[slot] for slot in members], vocab_size)
                self.order += members
            self._parts.append(part)

    def draw(
        self, logits: mx.array, streams: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]
    ) -> list[mx.array]:
        """Tokens of each part."""
        return [part.draw(logits, streams, indices) for part in self._parts]


class _Part:
    """Rows of one kind: where they are, and their options in columns on the device."""

    def __init__(
        self,
        kind: Kind,
        slots: list[int],
        places: mx.array | None,
        options: list[RowOptions | None],
        vocab_size: int,
    ) -> None:
        self._kind = kind
        self._slots = np.array(slots, np.int64)
        self._places = places
        if kind is Kind.GREEDY:
            return
        rows = [row or RowOptions(temperature=1.0) for row in options]
        top_k = np.array([row.top_k if row.top_k < vocab_size else 0 for row in rows], np.int32)
        top_p = np.array([row.top_p for row in rows], np.float32)
        self._inverse_temperature = _column([1 / row.temperature for row in rows])
        self._top_k = mx.array(top_k)[:, None] if top_k.any() else None
        self._top_p = mx.array(top_p)[:, None]
        self._any_top_p = bool((top_p < 1).any())
        self._min_p = _column([row.min_p for row in rows])
        self._xtc_probability = _column([row.xtc_probability for row in rows])
        self._xtc_threshold = _column([row.xtc_threshold for row in rows])
        self._excepted: mx.array | None = None  # stop ids, a row of ids for each row
        self._excepted_pairs: tuple[mx.array, mx.array] | None = None
        stops = [row.stop_ids if row.xtc_probability > 0 else () for row in rows]
        if any(stops):
            width = max(len(ids) for ids in stops)
            padded = [[*ids, *[vocab_size] * (width - len(ids))] for ids in stops]
            self._excepted = mx.array(np.array(padded, np.uint32))
            self._excepted_pairs = _pairs(
                [(row, token) for row, ids in enumerate(stops) for token in ids if 0 <= token < vocab_size]
            )

    def draw(self, logits: mx.array, streams: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> mx.array:
        """Tokens of these rows from the array of logits that they are part of."""
        if self._places is not None:
            logits = logits[self._places]
        if self._kind is Kind.GREEDY:
            return draw_greedy(logits)
        logits = logits.astype(mx.float32)
        streams, indices = streams[self._slots], indices[self._slots]
        keys, scale = noise_keys(streams, indices), self._inverse_temperature
        match self._kind:
            case Kind.WHOLE:
                return draw_whole(logits, scale, keys)
            case Kind.FLOOR:
                return draw_floor(logits, scale, keys, self._top_k, self._min_p)
            case Kind.NUCLEUS:
                return draw_nucleus(logits, scale, keys, self._top_k, self._top_p, self._min_p)
        excluding = coins(streams, indices) < self._xtc_probability
        if self._kind is Kind.XTC:
            top_p = self._top_p if self._any_top_p else None
            options = (self._top_k, top_p, self._min_p, self._xtc_threshold)
            return draw_xtc(logits, scale, keys, *options, excluding, self._excepted_pairs)
        assert self._top_k is not None
        most = FEW if self._kind is Kind.FEW else MANY
        rest = (self._top_k, self._top_p, self._min_p, self._xtc_threshold)
        return draw_candidates(logits, most, scale, keys, *rest, excluding, self._excepted)


def _is_held(row: RowOptions | None) -> bool:
    return row is not None and row.constrained


def _column(values: list[float]) -> mx.array:
    return mx.array(np.array(values, np.float32))[:, None]


def _pairs(places: list[tuple[int, int]]) -> tuple[mx.array, mx.array] | None:
    """Indices of entries of a matrix, or None when there are none."""
    if not places:
        return None
    both = np.array(places, np.uint32)
    return mx.array(both[:, 0]), mx.array(both[:, 1])
