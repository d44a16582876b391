"""Bodies that are about several models: how each one stands, and orders to load or unload it."""

from msgspec import Struct


class HeldModel(Struct):
    """One of several models, as the house sees it: in `GET /health`, and in answers to `POST /models/…`.

    Bytes and seconds; see `ModelState` in docs/protocol.md."""

    name: str
    state: str
    aliases: list[str]
    message: str
    progress: float
    claim: int
    memory: int
    size: int
    pinned: bool
    idle_ttl: float
    expires: float
    retry_after: float
    streams: int
    loads: int
    task: str


class ModelOrderRequest(Struct):
    """Body of `POST /models/load`, `unload`, `pin` and `unpin`. `keep_alive` is how many seconds the model may stay
    without streams; below 0 means for ever."""

    model: str
    keep_alive: float | None = None


class ModelOrderBody(Struct):
    """Answer to such an order: how the model stands now."""

    model: HeldModel
    success: bool = True
