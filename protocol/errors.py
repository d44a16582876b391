"""What can go wrong with a request: the codes on the wire and the exceptions of the Python client.

HTTP maps each code to a status in one place (`server.errors`).
"""

# The request itself is wrong; sending it again unchanged fails again.
INVALID_REQUEST = "invalid_request"
PROMPT_TOO_LONG = "prompt_too_long"
MODEL_NOT_FOUND = "model_not_found"
PROTOCOL_MISMATCH = "protocol_mismatch"

# The server can't take it now; later may work.
QUEUE_FULL = "queue_full"
OUT_OF_MEMORY = "out_of_memory"
RATE_LIMITED = "rate_limit_exceeded"
DRAINING = "draining"
LOADING = "loading"

# The stream began, or could have, and did not get to its end.
CANCELLED = "cancelled"
TIMEOUT = "timeout"
SLOW_CONSUMER = "slow_consumer"
SERVER_LOST = "server_lost"
SERVER_STOPPED = "server_stopped"
ENGINE_LOST = "engine_lost"
TOKENIZER_LOST = "tokenizer_lost"
CRASHED_ENGINE = "crashed_engine"
INTERNAL_ERROR = "internal_error"


class CallboardError(Exception):
    """Base of everything the client raises. `code` is one of this module's constants."""

    def __init__(self, code: str, message: str, *, param: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


class RequestRejected(CallboardError):
    """The server refused the request before it ran."""


class RequestFailed(CallboardError):
    """The request was accepted and then failed."""


class ServerLost(RequestFailed):
    """The server is gone, silent for 3 s, or was replaced: every open stream of the connection is lost.

    `streams` names all that were lost with it: their labels, or the numbers of those without one.
    """

    streams: tuple[str, ...] = ()


class ServerNotFound(CallboardError):
    """No running server by that name, or several and none was named."""
