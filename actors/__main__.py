"""Entry of every actor process: `python -P -m actors ROLE --run DIR --index I --epoch E --lifeline FD`.

Started by the supervisor only, and the casts of several models, which have `--house DIR` too, by the house. Signals are
the supervisor's business, so children ignore them; a child ends by a `Stop` order, by SIGKILL, or with its lifeline.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import structlog
import zmq

from actors.base import Actor, Incarnation, StartError
from actors.config import CastConfig, read_config
from actors.logs import configure_logs
from protocol.control import ControlChannel, hold_lifeline
from protocol.messages import StartFailed

ROLES = ("streamer", "tokenizer", "engine")


def make_actor(incarnation: Incarnation, config: CastConfig, control: ControlChannel) -> Actor:
    """The actor for a role. Each is imported here alone, so that only the engine process loads MLX."""
    match incarnation.role:
        case "tokenizer":
            from actors.tokenizer.actor import TokenizerActor

            return TokenizerActor(incarnation, config, control)
        case "streamer":
            from actors.streamer.actor import StreamerActor

            return StreamerActor(incarnation, config, control)
        case "engine":
            from actors.engine.actor import EngineActor

            return EngineActor(incarnation, config, control)
    raise StartError(f"no actor has the role {incarnation.role!r}")


def main() -> int:
    """Run one actor. Exit code 0 after a `Stop` order, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m actors", description=__doc__)
    parser.add_argument("role", choices=(*ROLES, "cast"))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--house", type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    args = parser.parse_args()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hold_lifeline(args.lifeline)
    if args.role == "cast":
        from actors.cast import run_cast

        return run_cast(args)
    me = Incarnation(args.run, args.role, args.index, args.epoch)
    if args.role == "engine" and hasattr(os, "SCHED_BATCH"):
        # Woken by a send, ZeroMQ's thread would take the core from the engine's own, and the streamer after it.
        zmq.Context.instance().set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    control = ControlChannel(zmq.Context.instance(), me.run_dir, me.role, me.index, me.epoch)
    log = structlog.get_logger()
    code = 0
    try:
        config = read_config(me.run_dir)
        configure_logs(config.log_level, actor=me.name, pid=os.getpid(), epoch=me.epoch)
        actor = make_actor(me, config, control)
        actor.run()
        if actor.abandoned:
            os._exit(0)
    except StartError as error:
        control.report(StartFailed(me.role, me.index, me.epoch, str(error)))
        code = 1
    except Exception as error:
        log.exception("failed")
        control.report(StartFailed(me.role, me.index, me.epoch, f"{type(error).__name__}: {error}"))
        code = 1
    control.close()
    zmq.Context.instance().destroy(linger=500)
    return code


if __name__ == "__main__":
    sys.exit(main())
