"""Who goes first where the CPU computes the model, too.

Used by the supervisor and the house when they start an actor, and by the tokenizers.
"""

import contextlib
import os
import sys

from actors.blas import has_cuda_backend

NICE = 5  # a third of the weight; what more of it brings is lost in the noise
_SERVING = frozenset({"http", "streamer"})  # tokenizers give way by themselves, wherever the model computes


def give_way(role: str, pid: int) -> None:
    """Let an actor that has just been started go behind the engine, if it serves streams and does not compute them.

    A crowd's tokens wait for the model. What sends them has less to do, but much of it at once, whenever a step is
    done, and would take the next step's core. Nothing happens where the model computes elsewhere, or the actor is
    gone.
    """
    if role not in _SERVING or sys.platform != "linux" or has_cuda_backend():
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19))
