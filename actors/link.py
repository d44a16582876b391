"""`HouseLink`: a cast's end of the control channel to the house of several models. Used by its supervisor's loop."""

import os
from pathlib import Path

import zmq

from actors.supervision import Supervision
from protocol.control import ControlChannel
from protocol.messages import Alive, CastUse, ModelCard, Probe, Ready, StartFailed, SupervisorOrder, SystemState

ROLE = "cast"


class HouseLink:
    """Tells the house how the cast `index` is and what it has to do; the house's probes are answered by its loop."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", house: Path, index: int, epoch: int) -> None:
        self._control = ControlChannel(context, house, ROLE, index, epoch)
        self._index = index
        self._epoch = epoch
        self._streams = 0

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """Readable when there are orders."""
        return self._control.socket

    def orders(self) -> list[SupervisorOrder]:
        """Those that have come, without the probes, which are answered."""
        orders: list[SupervisorOrder] = []
        for order in self._control.orders():
            if isinstance(order, Probe):
                self._control.report(Alive(ROLE, self._index, self._epoch, order.seq, self._streams))
            else:
                orders.append(order)
        return orders

    def ready(self, endpoint: str, card: ModelCard | None) -> None:
        """Every actor of the cast can serve."""
        self._control.report(Ready(ROLE, self._index, self._epoch, os.getpid(), endpoint, card))

    def failed(self, cause: str) -> None:
        """The cast gives up."""
        self._control.report(StartFailed(ROLE, self._index, self._epoch, cause))

    def show(self, state: SystemState, table: Supervision, own_memory: int) -> None:
        """How all is, and how much it is used."""
        streamers = table.of_role("streamer")
        self._streams = sum(slot.streams for slot in streamers)
        ended = sum(slot.ended for slot in streamers)
        memory = own_memory + sum(slot.memory for slot in table.slots)
        self._control.report(state)
        self._control.report(CastUse(self._epoch, self._streams, ended, memory))

    def close(self) -> None:
        """Give what was reported last a moment to leave."""
        self._control.close()
