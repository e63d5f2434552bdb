"""A channel: packets over one link, sent and received without blocking.

A packet is a fixed header and a payload. The payload of a data packet is not stored here: the reader of the packet
provides the memory, so that the bytes are written only once, to where they are needed.

A link has one channel for its lifetime, even if several communicators use it one after another, because a packet may be
half sent or half read when one of them fails or is closed. Each communicator has an *epoch*, which is part of every
packet: packets of an older epoch are read and dropped, packets of a newer epoch wait.
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
"""Limit on packets that are stored completely (descriptions, errors): far above the list of a large model's arrays,
100 bytes each."""

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
    """This rank has arrived at collective `call` and waits for others."""
    DESCRIBE = 4
    """This rank's call, because the calls of the ranks differ."""
    ABORT = 5
    """This rank has failed, for the reason in the payload."""
    LEAVE = 6
    """This rank closes its communicator. The end of its link is then no failure."""


class PacketHeader(NamedTuple):
    """The start of a packet.

    Attributes:
        kind: See `PacketKind`.
        epoch: Epoch of the communicator that sent it.
        call: Number of the collective that it belongs to.
        signature: Signature of that collective's operation.
        length: Number of payload bytes that follow.
    """

    kind: PacketKind
    epoch: int
    call: int
    signature: int
    length: int


class Channel:
    """Packets to and from one peer. The link belongs to the membership and is not closed here.

    Attributes:
        epoch: Epoch of the communicator that uses the channel now; set by `open`.
        remaining: Number of bytes of the current packet's payload that have not been read.
        sent: Number of bytes that the kernel has accepted so far.
    """

    def __init__(self, link: Link):
        # Weak, because the table of channels has links as keys and must not keep them alive.
        self._link = weakref.ref(link)
        self.epoch = 0
        self.remaining = 0
        self.sent = 0
        self._outgoing: list[memoryview] = []  # from the first byte that the kernel has not accepted
        self._offered = 0  # how many of them were offered to the link and not accepted
        self._raw = memoryview(bytearray(_HEADER.size))
        self._filled = 0  # valid bytes in `_raw`
        self._header: PacketHeader | None = None  # of the current packet; None between two packets
        self._message: memoryview | None = None  # payload of the current packet, if it is stored here

    @property
    def link(self) -> Link:
        link = self._link()
        assert link is not None, "the membership keeps its links alive"
        return link

    def open(self, generation: int) -> None:
        """Hand the channel to a new communicator, and start the next epoch of this generation."""
        # Each end counts separately. Within a generation, both create the same communicators, one after another. The
        # next generation begins above all of them, even if one end has not reached the last one.
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
        """Hand queued bytes to the kernel, and return whether it accepted any. Raises LinkClosedError."""
        if not self._outgoing:
            return False
        pieces = self._outgoing
        if throttle is not None:
            # Never fewer than before, although other links may have spent the tokens: see `Link.try_send`.
            self._offered = max(self._offered, throttle.available(self.outgoing))
            pieces = first_bytes(pieces, self._offered)
        try:
            count = self.link.try_send(pieces)
        except LinkClosedError:
            # What the peer sent before it left, such as its reason, can still be read.
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
        """Return the header of the current packet; None if it has not arrived completely. Raises LinkClosedError."""
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
        """Read a part of the current packet's payload, and return its number of bytes. Raises LinkClosedError."""
        count = self.link.try_receive_into(view)
        self.remaining -= count
        return count

    def message(self) -> memoryview | None:
        """Return the whole payload of the current packet; None if it has not arrived completely."""
        if self._message is None:
            self._message = memoryview(bytearray(self.remaining))
        while self.remaining:
            if not self.read_into(self._message[-self.remaining :]):
                return None
        return self._message

    def discard(self) -> bool:
        """Skip the current packet, and return whether all of it had arrived."""
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
        """Whether a packet has begun. Nothing more is then read from the link until a receiver takes it."""
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
    """Return the channel of a link, always the same one."""
    return _channels.setdefault(link, Channel(link))
