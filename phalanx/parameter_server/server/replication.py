"""Keeps a replica of a group's shards on another server equal, by a stream of updates.

Chain replication (van Renesse and Schneider 2004) with a chain of two: the leader of a group sends each merged update
to the replica, which applies it in the same way, and answers the workers when both have applied it. A lost server then
costs no update that was answered: the chief, and only the chief, promotes the replica to lead.

If two servers both believe that they lead, one is wrong: it was stopped or cut off while the chief promoted the other,
whose lead has the greater term. They exchange their terms, and the wrong one steps back. Until then it answers nothing,
because its lease has ended (`leader_lease`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.errors import LinkClosedError, LinkTimeoutError
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.server_messages import GroupState
from phalanx.transport.decoding import Decoder
from phalanx.transport.frames import encode_frame
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Record = GroupState | messages.AppliedUpdate | messages.SetLearningRate | messages.EndFit | messages.JobOver
State = tuple[GroupState, list[Array]]

REPLICA_TIMEOUT_S = 20.0
"""Seconds that a replica may take for an update. A stopped one is then dropped, and replaced when it runs again."""
PART_BYTES = 64 * 1024**2
"""Number of bytes of a record that the replica must receive in that time. All values with the optimizer's state take
minutes on a slow network; in parts, a replica that is stopped meanwhile is dropped as soon as any other."""
LINK_ERRORS = (LinkClosedError, LinkTimeoutError)

_RECORDS = Decoder(Record)
_encode = msgspec.msgpack.Encoder().encode
_ACKNOWLEDGED = _encode(messages.Acknowledged())


class ReplicaStream:
    """The leader's end of the stream, if there is a replica. Protected by the store's lock.

    Args:
        group: Number of the shard group.
        lock: The store's lock.

    Attributes:
        losses: Number of times that a replica was lost.
    """

    def __init__(self, group: int, lock: threading.Condition):
        self._group = group
        self._lock = lock
        self._link: Link | None = None
        self._has_state = False  # the replica has received the state; valid while there is a link
        self._unacknowledged = 0  # number of records sent over this link without an answer
        self.losses = 0

    @property
    def is_attached(self) -> bool:
        """Whether another server has a replica, as far as is known."""
        with self._lock:
            if self._link is not None and self._link.peer_closed():
                self._detach()
            return self._link is not None

    @property
    def has_link(self) -> bool:
        """Whether `send` sends anything."""
        return self._link is not None

    @property
    def is_current(self) -> bool:
        """Whether the replica has all updates that were answered. One that has just connected initially lacks them."""
        # Read without the lock, and in this order: `attach` clears the state before it sets the link.
        return self._link is not None and self._has_state

    def attach(self, link: Link, state: Callable[[], State | None]) -> bool:
        """Keep a replica at the other end, which first receives the current state. Returns False if that failed."""
        with self._lock:
            self._has_state = False  # before it has a link: `is_current` reads both without the lock
            self._link, self._unacknowledged = link, 0
            self.send_state(state())
            self._has_state = self._link is not None
            return self._has_state

    def send_state(self, state: State | None) -> None:
        """Send the replica the complete state; None before the first `fit`."""
        if state is not None:
            self.send(*state)
            self.wait()

    def send(self, record: Record, arrays: Sequence[Array] = ()) -> None:
        """Send a record for the replica to apply; `wait` waits until it has."""
        if self._link is not None:
            try:
                contents = [np.ascontiguousarray(array) for array in arrays]
                for part in _parts(encode_frame(_encode(record), contents)):
                    self._link.send_bytes(part, deadline=time.monotonic() + REPLICA_TIMEOUT_S)
                self._unacknowledged += 1
            except LINK_ERRORS:
                self._detach()

    def wait(self) -> None:
        """Wait until the replica has applied everything that was sent."""
        try:
            while self._link is not None and self._unacknowledged:
                self._link.receive(deadline=time.monotonic() + REPLICA_TIMEOUT_S)
                self._unacknowledged -= 1
        except LINK_ERRORS:
            self._detach()

    def replicate(self, record: Record) -> None:
        """Call `send` and `wait`."""
        with self._lock:
            self.send(record)
            self.wait()

    def end(self) -> None:
        """Tell the replica that the job is over."""
        with self._lock:
            self.replicate(messages.JobOver())
            if self._link is not None:
                self._link.close()
                self._link = None

    def _detach(self) -> None:
        assert self._link is not None
        logger.warning("The copy of the shards of group %d is lost; training continues without one.", self._group)
        self._link.close()
        self.losses += 1  # before it counts as lost
        self._link = None


def _parts(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in parts of `PART_BYTES`; the last part may be smaller."""
    part, room = list[memoryview](), PART_BYTES
    for piece in pieces:
        while piece.nbytes >= room:
            yield [*part, piece[:room]]
            part, piece, room = [], piece[room:], PART_BYTES
        part.append(piece)
        room -= piece.nbytes
    yield part


def receive(link: Link, idle_s: float) -> tuple[Record, list[memoryview]]:
    """Receive the next record, at the replica's end; `acknowledge` answers it."""
    header, buffers = link.receive(deadline=time.monotonic() + idle_s)
    return _RECORDS.decode(header), buffers


def acknowledge(link: Link) -> None:
    """Confirm that the record was applied."""
    link.send(_ACKNOWLEDGED, deadline=time.monotonic() + REPLICA_TIMEOUT_S)
