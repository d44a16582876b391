"""`RequestTrace`: when one traced request was where, as the streamer learns of it. Pure; the streamer's one thread."""

from protocol.messages import Encoded, EngineTrace, Trace


class RequestTrace:
    """Fills a `Trace`; see there what each mark means. Times are seconds of the monotonic clock."""

    def __init__(self, received: float) -> None:
        self.received = received
        self.asked = -1.0
        self.encoded = -1.0
        self.submitted = -1.0
        self.arrived = -1.0
        self._tokenizer: Encoded | None = None
        self._engine: EngineTrace | None = None

    def ids_known(self, result: Encoded, now: float) -> None:
        """The prompt's ids are known."""
        self._tokenizer = result
        self.encoded = now

    def stepped(self, engine: EngineTrace, now: float) -> None:
        """The step with the first token has come."""
        self._engine = engine
        self.arrived = now

    def ended(self, now: float) -> Trace:
        """All of it, once the stream ends at `now`."""
        text, engine = self._tokenizer, self._engine
        return Trace(
            self.received,
            self.asked,
            -1.0 if text is None else text.began,
            -1.0 if text is None else text.ended,
            self.encoded,
            self.submitted,
            -1.0 if engine is None else engine.queued,
            -1.0 if engine is None else engine.stepped,
            self.arrived,
            now,
            -1.0 if engine is None else engine.in_model,
            -1.0 if engine is None else engine.in_python,
            -1.0 if engine is None else engine.in_sockets,
        )
