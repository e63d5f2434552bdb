"""The copy of a group's shards on another server: the stream that keeps it equal, and who leads.

Chain replication (van Renesse and Schneider 2004) with a chain of two: the leader of a group sends each merged update
on to the copy, which applies it as the leader does, and answers the workers when both have. A server that is lost then
costs no update that was answered: the chief, which alone may do so, calls upon the copy to lead.

Of two servers that both think they lead, one is wrong: it was stopped or cut off while the chief called upon the other,
whose lead has the greater term. They tell each other the terms, and it steps back. Until then it answers no update: a
leader does so only while the chief is linked to it, and the chief is linked to one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.errors import LinkClosedError, LinkTimeoutError
from phalanx.parameter_server.server_messages import (
    Acknowledged,
    AppliedUpdate,
    EndFit,
    GroupState,
    JobOver,
    SetLearningRate,
)
from phalanx.transport.link import Link

Array = np.ndarray[Any, Any]
Record = GroupState | AppliedUpdate | SetLearningRate | EndFit | JobOver

COPY_S = 20.0
"""How long a copy may take for an update; a stopped one is then left behind, and made anew when it goes on."""

_RECORDS = msgspec.msgpack.Decoder(Record)
_encode = msgspec.msgpack.Encoder().encode
_DONE = msgspec.msgpack.encode(Acknowledged())


class ReplicaStream:
    """The leader's end of the stream. Used by one thread at a time.

    Raises (all methods): LinkClosedError or LinkTimeoutError if the copy is lost.
    """

    def __init__(self, link: Link):
        self._link = link
        self._sent = 0

    @property
    def is_lost(self) -> bool:
        """Whether its process has ended, as far as the system knows."""
        return self._link.peer_closed()

    def send(self, record: Record, arrays: Sequence[Array] = ()) -> None:
        """Have it applied there too; `wait` says when it has been."""
        self._link.send(
            _encode(record), [np.ascontiguousarray(array) for array in arrays], deadline=time.monotonic() + COPY_S
        )
        self._sent += 1

    def wait(self) -> None:
        """Wait until all that was sent has been applied."""
        while self._sent:
            self._link.receive(deadline=time.monotonic() + COPY_S)
            self._sent -= 1

    def close(self) -> None:
        self._link.close()


def receive(link: Link, idle_s: float) -> tuple[Record, list[memoryview]]:
    """The copy's end: the next record, which `acknowledge` answers."""
    header, buffers = link.receive(deadline=time.monotonic() + idle_s)
    return _RECORDS.decode(header), buffers


def acknowledge(link: Link) -> None:
    link.send(_DONE, deadline=time.monotonic() + COPY_S)


LOST = (LinkClosedError, LinkTimeoutError)
