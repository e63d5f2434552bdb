"""The mesh: all channels of one process, driven by the thread that runs a collective.

Theory
------
There is no helper thread. A rank that waits for bytes or for a counter in shared memory waits here, in one `poll` on
*all* links. It therefore always detects that

- a member died (its link ended): `PeerLostError`;
- a member failed (it sent ABORT with its reason): the same class of error here;
- a member called something else (its packets have a different signature, or it sent DESCRIBE): every rank then sends
  its description to every other rank, and all raise `CollectiveMismatchError` with the same text;
- the time is up: `CollectiveTimeoutError`, which names the ranks that have not arrived. To identify them, a rank that
  has waited for a while tells all others that it is PRESENT.

`PeerFailures` and `StallWatch` decide on these; the mesh moves bytes and matches packets.

A peer may be ahead: it has finished collective k and sends for k + 1 while this rank still waits for others in k. Its
packet is then *parked*: the header is read, and the payload stays in the kernel until this rank gets there. Within a
collective, the packets of a link arrive in the order in which they are needed, so receives are queued per peer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import msgspec

from phalanx.cluster.membership import Membership, Rank
from phalanx.collectives.host.channel import Channel, PacketHeader, PacketKind, channel_of
from phalanx.collectives.host.link_poller import LinkPoller, let_threads_run
from phalanx.collectives.host.peer_failures import AbortNotice, PeerFailures, member_names
from phalanx.collectives.host.pending_receive import PendingReceive
from phalanx.collectives.host.stall_watch import StallWatch
from phalanx.collectives.operation import CollectiveCall, CollectiveDescription, Operation, explain_mismatch
from phalanx.errors import CollectiveMismatchError, LinkClosedError, PhalanxError
from phalanx.monitoring import timeline
from phalanx.transport.decoding import decode_message
from phalanx.transport.throttle import Throttle

DESCRIBE_S = 5.0
"""How long a mismatch waits for the descriptions of all ranks. Unless a rank hangs, they have arrived or are on their
way."""
FLUSH_S = 0.5
"""How long a failing rank tries to notify the others. They notice anyway when its link ends."""
POLL_S = 0.05
"""Longest single wait. Everything relevant ends a wait at once; this limits the effect of anything overlooked."""
SPIN_S = 1e-3
"""How long to spin for bytes before sleeping in `poll`: as long as a message takes on most networks. Waking up takes
50 us on an idle core, and milliseconds on a shared one."""

_FATAL = (PacketKind.DESCRIBE, PacketKind.ABORT)
"""Packets that end a collective. From a peer that is ahead, they wait: this rank can finish what the peer has
finished."""

_SETUP = CollectiveCall(0, Operation(CollectiveDescription("setup")), 0.0, 0.0)
"""The call before the first collective. Packets of all collectives are ahead of it."""


class Mesh:
    """Channels to all other members. Only one thread at a time may use it.

    Args:
        membership: Members and the links to them.
        throttle: Limit on what this process sends, to simulate a slow network.

    Attributes:
        call: Running or last collective.
        failures: Peers that died, failed or left.
        stalls: Peers that have arrived at the running collective.
        spin_s: Seconds to spin for bytes before sleeping; 0 if there are more ranks than cores.
        track: Timeline track of the collectives.
        bytes_shared: Number of bytes that this rank has sent through shared memory, counted by the code that sends
            them.
        is_interrupted: Flag set by another thread to make the running collective give up.
    """

    def __init__(self, membership: Membership, throttle: Throttle | None = None):
        self.membership = membership
        self.spin_s = SPIN_S if throttle is None else 0.0  # long waits leave the core to others
        self.bytes_shared = 0
        self.track = timeline.COLLECTIVES
        self.is_interrupted = False
        self.call = _SETUP
        self._throttle = throttle
        self._channels = {rank: channel_of(link) for rank, link in membership.links.items()}
        for channel in self._channels.values():
            channel.open(membership.generation)
        self._sent_before = sum(channel.sent for channel in self._channels.values())
        self._poller = LinkPoller(self._channels)
        self.failures = PeerFailures(membership, self._channels)
        self.stalls = StallWatch(membership, self._channels)
        self._expected: dict[Rank, deque[PendingReceive]] = {}  # no empty queues: `run` waits while there is a key
        self._sending: set[Rank] = set()  # peers with bytes that `run` still has to send
        # Calls of the ranks, exchanged after a mismatch; None for a peer that left without sending it.
        self._descriptions: dict[Rank, CollectiveDescription | None] = {}

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that this rank has sent over links, including headers."""
        return sum(channel.sent for channel in self._channels.values()) - self._sent_before

    # ------------------------------------------------------------------- calls

    def begin(self, call: CollectiveCall) -> None:
        """Start a collective. All packets of the previous one have been sent and received."""
        assert not self._expected
        self.call = call
        self.stalls.begin(call)
        self.failures.begin(call)

    def send(self, rank: Rank, payload: Sequence[memoryview] = ()) -> None:
        """Send a data packet. The payload must not change before `run` has returned."""
        channel = self._channels[rank]
        idle = not channel.sending
        channel.post(PacketKind.DATA, self.call.number, self.call.signature, payload)
        self._sending.add(rank)
        if idle:  # otherwise, the kernel is full, and earlier bytes are queued
            self._flush(rank)

    def expect(
        self, rank: Rank, views: Sequence[memoryview] = (), on_arrival: Callable[[], None] | None = None
    ) -> None:
        """Put the payload of the next data packet from `rank` into `views`, then call `on_arrival`."""
        self._expected.setdefault(rank, deque()).append(PendingReceive(views, on_arrival))

    def run(self) -> None:
        """Return when everything expected has arrived and the kernel has accepted everything sent."""
        if timeline.current.on and self._expected:
            self._record_wait()
        while self._expected or self._sending:
            self._make_progress()

    def notify(self, rank: Rank, kind: PacketKind = PacketKind.WAKE) -> None:
        """Send an empty packet as a signal, unless other packets are queued, which wake the peer as well."""
        channel = self._channels[rank]
        if not channel.sending and rank not in self.failures.ended:
            channel.post(kind, self.call.number, self.call.signature)
            self._sending.add(rank)
            self._flush(rank)

    def pause(self, needed: Callable[[], Collection[Rank]]) -> None:
        """Wait until something happens on any link.

        Args:
            needed: Function that returns the ranks without which this rank cannot continue. Called after reading the
                links, so that what a member did before it left still counts.

        Raises: see the top of this file.
        """
        self._poll(POLL_S)
        now = time.monotonic()
        self.failures.check(self.call, needed, now)
        if self.stalls.is_announcement_due(now):
            for rank in self._channels:
                self.notify(rank, PacketKind.PRESENT)
        self.stalls.check(self.call, needed, now)
        if self.is_interrupted:
            raise PhalanxError(f"{self.call} was cut short: this process closed its communicator meanwhile.")

    # ----------------------------------------------------------------- endings

    def mismatch(self) -> NoReturn:
        """Exchange descriptions with all ranks and raise, because the ranks called different things."""
        self._expected.clear()
        own = self.call.operation.description
        # From here on, `_receive` drops values and accepts descriptions of any collective.
        self._descriptions[self.membership.rank] = own
        encoded = memoryview(msgspec.msgpack.encode(own))
        for channel in self._channels.values():
            channel.post(PacketKind.DESCRIBE, self.call.number, self.call.signature, [encoded])
        until = time.monotonic() + DESCRIBE_S
        while time.monotonic() < until:
            moved = False
            for rank, channel in self._channels.items():
                if rank in self.failures.ended:
                    self._descriptions.setdefault(rank, None)
                elif rank not in self._descriptions or channel.sending:
                    moved |= self._flush(rank) | self._receive(rank)
            if len(self._descriptions) == self.membership.world_size and not self._has_unsent():
                break
            if not moved:
                self._poll(POLL_S)
        silent: dict[Rank, CollectiveDescription | None] = dict.fromkeys(self._channels)
        raise CollectiveMismatchError(explain_mismatch(silent | self._descriptions))

    def abort(self, error: BaseException) -> None:
        """Tell all reachable peers why this rank gives up. Raises nothing."""
        if not isinstance(error, CollectiveMismatchError):  # a mismatch is already known to every rank
            self._expected.clear()
            self.send_all(PacketKind.ABORT, msgspec.msgpack.encode(AbortNotice.of(error)), FLUSH_S)

    # ------------------------------------------------------------ moving bytes

    def _make_progress(self) -> None:
        """Move bytes between this rank and its peers in the running collective, or wait until that is possible."""
        if self._advance():
            return
        until = time.perf_counter() + self.spin_s
        while time.perf_counter() < until:
            if self._advance():
                return
            let_threads_run()
        if self._expected or self._sending:
            self.pause(lambda: set(self._expected) | self._sending)

    def _advance(self) -> bool:
        """Move the bytes that can move now, and return whether there were any."""
        moved = False
        for rank in tuple(self._sending):
            moved |= self._flush(rank)
        for rank in tuple(self._expected):
            moved |= self._receive(rank)
        return moved

    def _record_wait(self) -> None:
        """Wait for the first byte of every rank from which data is expected, and record the wait in the timeline."""
        started, first = timeline.now(), {rank: queue[0] for rank, queue in self._expected.items()}
        absent, last = set(first), self.membership.rank
        while absent:
            self._make_progress()
            for rank in tuple(absent):
                queue = self._expected.get(rank)
                if not queue or queue[0] is not first[rank] or first[rank].has_started:
                    absent.discard(rank)
                    last = rank
        timeline.current.complete(self.track, "wait", started, {"for": last})

    def _flush(self, rank: Rank) -> bool:
        """Send bytes of a peer's queue, and return whether the kernel accepted any."""
        channel = self._channels[rank]
        try:
            moved = channel.flush(self._throttle)
        except LinkClosedError:
            self.failures.record_hang_up(rank)
            moved = False
        if not channel.sending:
            self._sending.discard(rank)
        return moved

    def _receive(self, rank: Rank) -> bool:
        """Read up to one packet from a peer, and return whether anything was read."""
        if rank in self.failures.ended:
            return False
        channel = self._channels[rank]
        try:
            header = channel.header()
            if header is None or header.epoch > channel.epoch:  # from a communicator that is not open here yet
                return False
            if header.epoch < channel.epoch:
                return channel.discard()
            is_ahead = header.call > self.call.number and not self._descriptions
            if header.kind is PacketKind.DATA:
                return not is_ahead and self._receive_data(rank, channel, header)
            if header.kind in _FATAL and is_ahead:
                return False
            message = channel.message()
        except LinkClosedError as error:
            self.failures.record_end(rank, error)
            return False
        if message is None:
            return False
        channel.next()
        self._handle(rank, header, message)
        return True

    def _receive_data(self, rank: Rank, channel: Channel, header: PacketHeader) -> bool:
        if self._descriptions:
            return channel.discard()
        call = self.call
        if header.call < call.number:  # `run` returned when all values of that collective had arrived
            sender = member_names(self.membership, [rank])
            raise PhalanxError(f"{sender} sent values of collective {header.call} during {call}: a defect.")
        if header.signature != call.signature:
            self.mismatch()
        queue = self._expected.get(rank)
        if not queue:
            return False  # the peer is a stage ahead
        receive = queue[0]
        if header.length != receive.length:
            sender = member_names(self.membership, [rank])
            raise PhalanxError(
                f"{sender} sent {header.length} bytes in {call}, {receive.length} were expected: a defect."
            )
        moved = receive.read_from(channel)
        if not receive.is_complete:
            return moved
        channel.next()
        queue.popleft()
        if not queue:
            del self._expected[rank]
        if receive.on_arrival is not None:
            receive.on_arrival()
        return True

    def _handle(self, rank: Rank, header: PacketHeader, message: memoryview) -> None:
        """Act on a packet without values. WAKE needs no action: it has ended the wait."""
        if header.kind is PacketKind.PRESENT:
            self.stalls.record_presence(rank, header.call)
        elif header.kind is PacketKind.LEAVE:
            self.failures.left.add(rank)
        elif header.kind is PacketKind.DESCRIBE:
            is_first = not self._descriptions
            self._descriptions[rank] = decode_message(message, CollectiveDescription)
            if is_first:
                self.mismatch()
        elif header.kind is PacketKind.ABORT and not self._descriptions:
            notice = decode_message(message, AbortNotice)
            if notice.reason == "timeout":
                self.stalls.record_unheard(self.call)
            raise self.failures.error_of(rank, notice, self.call)

    def _poll(self, timeout_s: float) -> None:
        """Wait for an event on any link, then read and send what can move."""
        ended, hung_up = self.failures.ended, self.failures.hung_up
        for rank, channel in self._channels.items():
            # A parked packet may be needed now. A peer may have sent more before it hung up.
            if channel.parked or rank in hung_up:
                while self._receive(rank):
                    pass
        throttle = self._throttle
        if throttle is not None:
            waiting = [channel.outgoing for channel in self._channels.values() if channel.sending]
            timeout_s = min([timeout_s, *map(throttle.wait_s, waiting)])
        for rank, channel in self._channels.items():
            if rank in ended or rank in hung_up:
                self._poller.ignore(rank)
                continue
            # Do not poll for reading while a packet is parked, or `poll` would always return at once.
            is_parked = channel.parked and rank not in self._expected and not self._descriptions
            may_send = channel.sending and (throttle is None or throttle.available(channel.outgoing) > 0)
            self._poller.watch(rank, to_read=not is_parked, to_write=may_send)
        for event in self._poller.wait(timeout_s):
            if event.is_writable:
                self._flush(event.rank)
            # Read to the end: TLS may hold decrypted bytes that `poll` does not see.
            while self._receive(event.rank):
                pass
            if event.is_closed:  # last, after reading what the peer sent before, if needed
                self.failures.record_hang_up(event.rank)

    def send_all(self, kind: PacketKind, payload: bytes, at_most_s: float) -> None:
        """Send a packet without values to every peer, trying for `at_most_s` to hand it to the kernel. Raises
        nothing."""
        for channel in self._channels.values():
            channel.post(kind, self.call.number, 0, [memoryview(payload)])
        until = time.monotonic() + at_most_s
        while self._has_unsent() and time.monotonic() < until:
            moved = False
            for rank in self._channels:
                moved |= self._flush(rank)
            if not moved:
                time.sleep(0.001)

    def _has_unsent(self) -> bool:
        return any(channel.sending for rank, channel in self._channels.items() if rank not in self.failures.ended)
