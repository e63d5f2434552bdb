"""A channel: packets over one link, sent and received without ever blocking.

A packet is a fixed header and a payload. The payload of a data packet is not stored here: the reader of the packet says
where its bytes go, so that they are written once, to where they are needed.

A link has one channel for its life, even if several communicators use it one after the other, because a packet may be
half sent or half read when one of them fails or is closed. Each communicator has an *epoch*, which is in every packet:
packets of an older epoch are read and dropped, those of a newer epoch wait.
"""

from __future__ import annotations

import enum
import struct
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.errors import FrameError, LinkClosedError
from phalanx.transport.link import Link
from phalanx.transport.throttle import Throttle, first_bytes
from phalanx.transport.wires import skip_bytes

MAX_MESSAGE_BYTES = 16 * 2**20
"""Limit on packets that are stored whole (descriptions, errors): far above the list of a large model's arrays, 100
bytes each."""

_HEADER = struct.Struct("<HHIQQQ")  # magic, kind, epoch, call, signature, length
_MAGIC = 0x9C1A
_SINK = memoryview(bytearray(256 * 1024))
"""Receives bytes that are no longer wanted. Never read."""


class PacketKind(enum.IntEnum):
    """The kinds of packets."""

    DATA = 1
    """Values of a collective."""
    WAKE = 2
    """Look at the shared memory again."""
    PRESENT = 3
    """This rank has come to collective `call` and waits for others."""
    DESCRIBE = 4
    """What this rank called, because calls differ."""
    ABORT = 5
    """This rank has failed, for the reason in the payload."""
    LEAVE = 6
    """This rank closes its communicator. The end of its link is then no failure."""


class PacketHeader(NamedTuple):
    """The start of a packet.

    Attributes:
        kind: See `PacketKind`.
        epoch: The epoch of the communicator that sent it.
        call: The number of the collective it belongs to.
        signature: The signature of that collective's operation.
        length: Bytes of payload that follow.
    """

    kind: PacketKind
    epoch: int
    call: int
    signature: int
    length: int


class Channel:
    """Packets to and from one peer. The link belongs to the membership and is not closed here.

    Attributes:
        epoch: The epoch of the communicator that uses the channel now; set by `open`.
        remaining: Bytes of the current packet's payload that have not been read.
        sent: Bytes that the kernel has taken so far.
    """

    def __init__(self, link: Link):
        # Weak, because the table of channels is keyed by links, which it must not keep alive.
        self._link = weakref.ref(link)
        self.epoch = 0
        self.remaining = 0
        self.sent = 0
        self._outgoing: list[memoryview] = []  # from the first byte that the kernel has not taken
        self._offered = 0  # how many of them the link was offered and has not taken
        self._raw = memoryview(bytearray(_HEADER.size))
        self._filled = 0  # bytes of `_raw`
        self._header: PacketHeader | None = None  # of the current packet; None between two packets
        self._message: memoryview | None = None  # the current packet's payload, if it is stored here

    @property
    def link(self) -> Link:
        link = self._link()
        assert link is not None, "the membership keeps its links alive"
        return link

    def open(self, generation: int) -> None:
        """Hand the channel to a new communicator: the next epoch of this generation starts."""
        # Each end counts for itself. In one generation both create the same communicators, one after the other. The
        # next generation begins above all of them, also if an end has not come to the last one.
        self.epoch = max(generation << 16, self.epoch) + 1

    # ----------------------------------------------------------------- sending

    @property
    def sending(self) -> bool:
        """Whether bytes are queued for the kernel."""
        return bool(self._outgoing)

    @property
    def outgoing(self) -> int:
        """Bytes that are queued for the kernel."""
        return sum(map(len, self._outgoing))

    def post(self, kind: PacketKind, call: int, signature: int, payload: Sequence[memoryview] = ()) -> None:
        """Queue a packet. Its payload must not change until `sending` is false again."""
        length = sum(len(view) for view in payload)
        self._outgoing.append(memoryview(_HEADER.pack(_MAGIC, kind, self.epoch, call, signature, length)))
        self._outgoing.extend(payload)

    def flush(self, throttle: Throttle | None = None) -> bool:
        """Hand as many queued bytes to the kernel as it takes now; returns whether it took any. Raises
        LinkClosedError."""
        if not self._outgoing:
            return False
        pieces = self._outgoing
        if throttle is not None:
            # Never fewer than before, though other links may have spent the tokens: see `Link.try_send`.
            self._offered = max(self._offered, throttle.available(self.outgoing))
            pieces = first_bytes(pieces, self._offered)
        try:
            count = self.link.try_send(pieces)
        except LinkClosedError:
            # What the peer sent before it left (its reason, perhaps) can still be read.
            self._outgoing = []
            raise
        if count:
            self.sent += count
            self._offered = max(0, self._offered - count)
            self._outgoing = skip_bytes(self._outgoing, count)
            if throttle is not None:
                throttle.spend(count)
        return count > 0

    # --------------------------------------------------------------- receiving

    def header(self) -> PacketHeader | None:
        """The header of the current packet, None if it has not arrived completely. Raises LinkClosedError."""
        while self._header is None:
            count = self.link.try_receive_into(self._raw[self._filled :])
            if not count:
                return None
            self._filled += count
            if self._filled == _HEADER.size:
                self._header = self._parse()
                self.remaining = self._header.length
        return self._header

    def read_into(self, view: memoryview) -> int:
        """Read some of the current packet's payload; returns the number of bytes. Raises LinkClosedError."""
        count = self.link.try_receive_into(view)
        self.remaining -= count
        return count

    def message(self) -> memoryview | None:
        """The whole payload of the current packet, None if it has not arrived completely."""
        if self._message is None:
            self._message = memoryview(bytearray(self.remaining))
        while self.remaining:
            if not self.read_into(self._message[-self.remaining :]):
                return None
        return self._message

    def discard(self) -> bool:
        """Read past the current packet; returns whether all of it had arrived."""
        while self.remaining:
            if not self.read_into(_SINK[: self.remaining]):
                return False
        self.next()
        return True

    def next(self) -> None:
        """Finish the current packet."""
        self._header = None
        self._filled = 0
        self._message = None

    @property
    def parked(self) -> bool:
        """Whether a packet has begun, so that nothing more is read from the link until a receiver takes it."""
        return self._header is not None

    def _parse(self) -> PacketHeader:
        magic, kind, epoch, call, signature, length = _HEADER.unpack(self._raw)
        if magic != _MAGIC or kind not in PacketKind._value2member_map_:
            raise FrameError(
                f"{self.link.peer} sent something that is not a collective ({bytes(self._raw[:8]).hex()}...). "
                f"Do both tasks run the same version of Phalanx?"
            )
        if kind != PacketKind.DATA and length > MAX_MESSAGE_BYTES:
            raise FrameError(
                f"{self.link.peer} announced a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed."
            )
        return PacketHeader(PacketKind(kind), epoch, call, signature, length)


_channels: weakref.WeakKeyDictionary[Link, Channel] = weakref.WeakKeyDictionary()


def channel_of(link: Link) -> Channel:
    """The channel of a link: the same one each time."""
    return _channels.setdefault(link, Channel(link))
