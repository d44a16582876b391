"""`Repeats`: requests that the server of one of several models has done nothing for before it was unloaded, to be asked
again of its successor. Used by `Client` and `AsyncClient`, under the former's lock and on the latter's event loop."""

from protocol.errors import DRAINING
from protocol.messages import End, Generate


class Repeats:
    """The requests of which nothing has come yet."""

    def __init__(self) -> None:
        self._requests: dict[int, Generate] = {}  # by the ref of each choice

    def sent(self, request: Generate) -> None:
        """A request was sent to a server that may be unloaded."""
        self._requests.update(dict.fromkeys(_refs(request), request))

    def begun(self, ref: int) -> None:
        """Something has come for a stream, or nobody wants it any more: its request is not repeated."""
        request = self._requests.get(ref)
        if request is not None:
            for each in _refs(request):
                self._requests.pop(each, None)

    def holds_back(self, end: End) -> bool:
        """Whether an end is not for the consumer: the model is being unloaded, and the request will be repeated."""
        return end.code == DRAINING and end.ref in self._requests

    def due(self) -> list[Generate]:
        """What is to be asked again now that the server is lost."""
        return [request for ref, request in self._requests.items() if ref == request.ref]

    def forget(self) -> None:
        """Repeat nothing: there is no successor."""
        self._requests.clear()

    def __contains__(self, ref: int) -> bool:
        return ref in self._requests


def _refs(request: Generate) -> list[int]:
    return [request.ref, *request.more_refs]
