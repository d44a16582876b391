"""`HouseOrders`: orders about models that are not answered yet, and what becomes of them. Used by the house's loop.

`load` waits until its model is ready and can be reached, or has failed; `unload` until it is gone; `restart` until the
engines of the model, or of all that are loaded, were replaced.
"""

from typing import Any, NamedTuple

from actors.residency import Place, Refused, Residency
from protocol import errors
from protocol.messages import ModelAnswer, ModelOrder

ACTIONS = ("list", "load", "unload", "pin", "unpin", "restart")


class Open(NamedTuple):
    """An order that waits. `socket` and `sender` say who gets the answer."""

    order: ModelOrder
    sender: bytes
    socket: Any
    places: list[Place]
    engines: list[int]
    since: float


class HouseOrders:
    """All open orders, oldest first."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._open: list[Open] = []
        self._answers: list[tuple[bytes, Any, ModelAnswer]] = []
        self._replace: list[Place] = []

    def take(self, order: ModelOrder, sender: bytes, socket: Any, now: float) -> None:
        """Begin to carry out an order; `done` brings its answer."""
        residency = self._residency

        def answer(code: str = "", message: str = "", **more: Any) -> None:
            self._answers.append((sender, socket, ModelAnswer(order.rid, code, message, **more)))

        place = residency.find(order.model)
        if order.action not in ACTIONS:
            answer(errors.INVALID_REQUEST, f"{order.action!r} is none of {', '.join(ACTIONS)}")
        elif order.action == "list" and not order.model:
            answer(models=residency.states(now))
        elif place is None:
            names = ", ".join(residency.places)
            answer(errors.MODEL_NOT_FOUND, f"there is no model {order.model!r}; there are {names}")
        elif order.action in ("list", "load", "unload", "pin", "unpin"):
            try:
                self._begin(order, place, now)
            except Refused as error:
                answer(errors.INVALID_REQUEST, str(error), models=[residency.state(place, now)])
                return
            if order.action in ("load", "unload"):
                self._open.append(Open(order, sender, socket, [place], [], now))
            else:
                answer(models=[residency.state(place, now)])
        else:
            places = [place] if order.model else [*residency.places.values()]
            places = [place for place in places if place.state == "ready"]
            self._replace += places
            self._open.append(Open(order, sender, socket, places, [place.engine for place in places], now))

    def _begin(self, order: ModelOrder, place: Place, now: float) -> None:
        match order.action:
            case "load":
                self._residency.want(place, now, order.keep_alive)
            case "unload":
                self._residency.unload(place)
            case "pin":
                self._residency.pin(place, now)
            case "unpin":
                self._residency.unpin(place, now)

    def waiting_for(self) -> list[Place]:
        """Models that somebody has ordered to be loaded."""
        return [place for one in self._open if one.order.action == "load" for place in one.places]

    def engines_to_replace(self) -> list[Place]:
        """The models, all of them ready, whose engines are to be replaced. Told once."""
        places, self._replace = self._replace, []
        return places

    def done(self, now: float) -> list[tuple[bytes, Any, ModelAnswer]]:
        """The answers that are due, each with its receiver."""
        still = []
        for one in self._open:
            answer = self._answer_to(one, now)
            if answer is None:
                still.append(one)
            else:
                self._answers.append((one.sender, one.socket, answer))
        self._open = still
        answers, self._answers = self._answers, []
        return answers

    def _answer_to(self, one: Open, now: float) -> ModelAnswer | None:
        rid = one.order.rid
        shown = [self._residency.state(place, now) for place in one.places]
        if one.order.action == "restart":
            waits = [p.state == "ready" and p.engine in (0, e) for p, e in zip(one.places, one.engines, strict=True)]
            return None if any(waits) else ModelAnswer(rid, models=shown)
        place = one.places[0]
        if one.order.action == "unload":
            # Somebody else may want it again at once.
            gone = place.state in ("unloaded", "waiting", "failed") or place.loading_at > one.since
            return ModelAnswer(rid, models=shown) if gone else None
        if place.state == "ready" and place.endpoint:
            return ModelAnswer(rid, models=shown, endpoint=place.endpoint)
        if place.state == "failed":
            text = f"the model {place.model.name} can't be loaded: {place.message}"
            return ModelAnswer(rid, errors.LOADING, text, shown, retry_after=shown[0].retry_after)
        return None

    def give_up(self) -> list[tuple[bytes, Any, ModelAnswer]]:
        """The answers to all that wait, as the server is being stopped."""
        answers = [
            (one.sender, one.socket, ModelAnswer(one.order.rid, errors.DRAINING, "the server is being stopped"))
            for one in self._open
        ]
        self._open = []
        return answers
