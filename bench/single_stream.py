"""One stream of `mlx_lm.generate`'s own kind, for comparison with one through the whole system.

    python -m bench.single_stream [--tokens 64] [--rounds 5]      starts a server with the demo model and compares

`python -m bench.single_stream --child MODEL` answers requests line by line (`bench.mlx_child`): when each token of
`mlx_lm.stream_generate` came, in seconds from its start.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.mlx_child import CHILD, answer_for_ever


def child(folder: str) -> None:
    """Answer `{"prompt": ids, "tokens": n}` with times and ids."""
    from mlx_lm import load, stream_generate

    network, tokenizer = load(folder)[:2]
    tokenizer.eos_token_ids = []  # as with ignore_eos

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        times, ids = [], []
        for response in stream_generate(network, tokenizer, request["prompt"], max_tokens=request["tokens"]):
            times.append(time.perf_counter() - began)
            ids.append(response.token)
        return {"times": times, "ids": ids}

    answer_for_ever(answer)


def compare(tokens: int, rounds: int) -> None:
    """Start a server and compare."""
    from bench.checks.limits import single_stream
    from bench.checks.report import Report
    from bench.harness import RunningServer
    from bench.models import demo_folder

    folder = demo_folder()
    with RunningServer(folder, ready_seconds=300) as server:
        single_stream(Report(print), server, folder, tokens=tokens, rounds=rounds, bar=0.95)


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    compare(args.tokens, args.rounds)


if __name__ == "__main__":
    main()
