"""The environment of a server whose engine fails at chosen prompts (`injected/sitecustomize.py`)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

INJECTED = Path(__file__).parent / "injected"


def faults_at(*faults: tuple[str, Sequence[int]]) -> dict[str, str]:
    """Environment for `RunningServer`: each fault is `("crash" or "hang", the first ids of a prompt)`."""
    paths = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "BENCH_FAULTS": json.dumps([(how, list(ids)) for how, ids in faults])}
