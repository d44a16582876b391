"""Log set-up of the supervisor and the actor processes: structlog lines on stderr.

Each line of a child names its actor, pid and epoch. On a terminal lines are laid out for people, elsewhere
they are JSON.
"""

import logging
import os
import sys
from typing import TextIO

import structlog


def configure_logs(level: str, to: TextIO | None = None, **context: object) -> None:
    """Set up structlog for this process, on stderr or `to`; `context` stands in every line it writes."""
    renderer: structlog.typing.Processor
    if sys.stderr.isatty() or os.environ.get("CALLBOARD_LOG_FORMAT") == "text":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    else:
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(to or sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
