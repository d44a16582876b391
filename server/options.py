"""`HttpOptions`: the settings of one HTTP worker, written by the CLI and passed to the process as JSON."""

from typing import Annotated

from msgspec import Meta, Struct

from server.key_file import ApiKey

API_KEYS_VARIABLE = "CALLBOARD_WORKER_API_KEYS"

Seconds = Annotated[float, Meta(gt=0)]


class HttpOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an HTTP worker. Times are in seconds.

    `model_name` is what clients may write in `model`; with several models it is the first one, and `models` are the
    names of all. A request waits `load_wait` seconds at most for its model to be loaded.
    `allow_origins` are the origins (or `*`) that CORS lets in; empty means no CORS headers at all.
    `keepalive_interval` is how long an SSE response may stay silent until a comment is sent, for proxies.
    `max_body_bytes` bounds a request's body; ids of such a body still fit the largest ZeroMQ message.
    `max_header_bytes` bounds the request line and headers together.
    `body_timeout` is how long a client may take to send the body.
    `send_timeout` is how long a client may leave a response unread until its connection is closed.
    `idle_timeout` is how long a connection may stay open between requests, or without sending a whole header.
    `request_timeout` ends a request that takes longer; None leaves it to the streamer's own limit.
    `api_keys` are the keys one of which a request must bring; none lets everybody in. The worker takes them from its
    environment (`API_KEYS_VARIABLE`, a JSON list), for a command line can be read by everybody.
    `trusted_hosts` are the names under which the server may be asked; none means any.
    `tls_cert` and `tls_key` are PEM files. With `log_prompts` the bodies of requests are logged.
    With `traces` requests are traced to `otlp_endpoint`, or to where OpenTelemetry's variables say when that is "".
    `log_level` is that of structlog.
    """

    model_name: str
    models: list[str] = []
    load_wait: Annotated[float, Meta(ge=0)] = 120.0
    allow_origins: list[str] = []
    keepalive_interval: Seconds = 5.0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=32 << 20)] = 16 << 20
    max_header_bytes: Annotated[int, Meta(ge=1024)] = 64 << 10
    body_timeout: Seconds = 60.0
    send_timeout: Seconds = 120.0
    idle_timeout: Annotated[int, Meta(ge=1)] = 75
    request_timeout: Seconds | None = None
    api_keys: list[ApiKey] = []
    trusted_hosts: list[str] = []
    tls_cert: str = ""
    tls_key: str = ""
    log_prompts: bool = False
    traces: bool = False
    otlp_endpoint: str = ""
    log_level: str = "info"
