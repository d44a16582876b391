"""Log set-up of an HTTP worker: structlog lines on stderr, uvicorn's stdlib logging among them.

Each line names the worker, its pid and epoch. It is JSON unless stderr is a terminal or the supervisor, which
passes this process's stderr on to one, asks for text.
"""

import logging
import os
import sys

import structlog


class _ToStructlog(logging.Handler):
    """Hands the records of stdlib loggers on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage().strip(), logger=record.name, exc_info=record.exc_info
        )


def configure_logs(level: str, **context: object) -> None:
    """Set up logging for this process; `context` stands in every line it writes."""
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
    logging.basicConfig(handlers=[_ToStructlog()], level=logging.WARNING, force=True)
