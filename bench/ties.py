"""Whether a difference between two runs of one request is a tie, as DESIGN.md defines it for float32.

`python -m bench.ties --child MODEL` answers questions line by line (`bench.mlx_child`): ids up to the first
difference, where the prompt ends, and the options; it answers how far the runner-up was behind, relative to the
magnitude of the scores.
"""

import sys
from typing import Any

import mlx.core as mx
import numpy as np

from actors.engine.model import Model, load
from actors.engine.row_options import RowOptions
from actors.engine.sampler import Sampler
from bench.mlx_child import CHILD, answer_for_ever

MARGIN = 1e-4
NUDGES = 8


def gap(model: Model, ids: list[int], prompt_tokens: int, options: dict[str, Any]) -> float:
    """Relative gap at the token after `ids`. For a row that draws: 0 when scores nudged by less than the margin
    draw another token, else 1."""
    caches = model.new_caches()
    if len(ids) > 1:
        model.forward(mx.array([ids[:-1]], mx.uint32), caches)
    logits = model.forward(mx.array([ids[-1:]], mx.uint32), caches)[0, -1].astype(mx.float32)
    scores = np.array(logits)
    magnitude = max(1.0, float(np.abs(scores).max()))
    if not options["temperature"]:
        second, first = np.partition(scores, -2)[-2:]
        return float(first - second) / magnitude
    row = RowOptions(**options, index=len(ids) - prompt_tokens)

    def draw(some: "np.ndarray[Any, Any]") -> int:
        sampler = Sampler(model.vocab_size)
        sampler.append(row)
        return int(sampler.draw(mx.array(some.astype(np.float32))[None]).tokens[0])

    token = draw(scores)
    random = np.random.default_rng(0)
    nudged = (scores + random.uniform(-MARGIN, MARGIN, scores.shape) * magnitude for _ in range(NUDGES))
    return 0.0 if any(draw(some) != token for some in nudged) else 1.0


def main() -> None:
    """Answer for ever."""
    if sys.argv[1:2] != [CHILD]:
        sys.exit(__doc__)
    model = load(sys.argv[2])
    answer_for_ever(lambda question: gap(model, *question))


if __name__ == "__main__":
    main()
