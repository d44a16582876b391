"""The process of one cast of a house of several models: the supervisor of one model's actors, under the house.

`python -P -m actors cast --run DIR --house DIR --index I --epoch E --lifeline FD`, started by `actors.house` alone. It
reads no signals but SIGUSR1, which replaces the engine; when the house is gone its lifeline ends it, and with it its
children, whose lifelines it holds.
"""

import argparse
import os
import sys

import structlog
import zmq

from actors.config import read_config
from actors.link import HouseLink
from actors.logs import configure_logs
from actors.rundir import PartDirectory
from actors.supervision import Supervision
from actors.supervisor import Supervisor


def run_cast(args: argparse.Namespace) -> int:
    """Run one cast until the house stops it, or it fails. Returns the exit code."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    link = HouseLink(context, args.house, args.index, args.epoch)
    log = structlog.get_logger()
    try:
        config = read_config(args.run)
        configure_logs(config.log_level, actor=f"cast{args.index}", pid=os.getpid(), epoch=args.epoch)

        def on_ready(table: Supervision) -> None:
            link.ready(table.of_role("streamer")[0].endpoint, table.card)

        return Supervisor(config, PartDirectory(args.run), None, on_ready, link=link).run()
    except Exception as error:
        log.exception("failed")
        link.failed(f"{type(error).__name__}: {error}")
        return 1
    finally:
        sys.stderr.flush()
        link.close()
        context.destroy(linger=500)
