"""The mesh: all channels of one process, driven by the thread that is in a collective.

Theory
------
There is no helper thread. Whoever waits, for bytes or for a counter in shared memory, waits here, in one
`poll` on *all* links, so that four things are noticed wherever this rank waits:

- a member died (its link ended): `PeerLostError`;
- a member failed (it sent ABORT, with its reason): the same class of error here;
- a member called something else (its packets carry another signature, or it sent DESCRIBE): every rank then
  sends its description to every other one, and all raise `CollectiveMismatchError` with the same text;
- the time is up: `CollectiveTimeoutError`, naming those who have not come. To know who they are, each rank
  that has waited for a while tells all others that it is PRESENT.

A peer may be ahead: it has finished collective k and sends for k + 1 while this rank still waits for others
in k. Its packet is then *parked*: the header is known and the payload stays in the kernel until this rank
gets there. Within one collective the packets of one link are wanted in the order in which they are sent, so
receives are simply queued for each peer and need no tags.

A link may end because its owner has finished the job and left. Then it has sent LEAVE, and its end matters
only to ranks that still need something from it. Without LEAVE the end of a link is a death, even if this
rank needs nothing more from that member in this collective; only then it gets `GRACE_S` to complete it.
"""

from __future__ import annotations

import errno
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import msgspec

from phalanx.cluster.membership import Membership, Rank
from phalanx.collectives.host.channel import Channel, PacketHeader, PacketKind, channel_of
from phalanx.collectives.operation import CollectiveCall, CollectiveDescription, explain_mismatch
from phalanx.errors import CollectiveMismatchError, CollectiveTimeoutError, LinkClosedError, PeerLostError, PhalanxError
from phalanx.monitoring import timeline
from phalanx.transport.link import ALIVE_CHECK_INTERVAL_S, DELIVERY_TIMEOUT_S
from phalanx.transport.throttle import Throttle

GRACE_S = 0.5
"""Time to complete a collective that needs nothing more from a member that just died. All its values are
in shared memory or on their way by then."""
PRESENCE_DELAY_S = 0.2
"""How long a rank waits before it tells the others that it is there: long against a step, short against a
timeout."""
DESCRIBE_S = 5.0
"""How long a mismatch waits for the descriptions of all ranks: they are all there or on their way, unless
one hangs."""
FLUSH_S = 0.5
"""How long a failing rank tries to tell the others. They notice anyway, from the end of its link."""
POLL_S = 0.05
"""Longest single wait. Everything that matters ends a wait at once; this bounds what could be overlooked."""
SPIN_S = 1e-3
"""How long to look for bytes before sleeping in `poll`: as long as a message takes on most networks. Waking takes
50 us on an idle core, and milliseconds on one that others use."""


def let_threads_run(timeout_ms: int) -> None:
    """Called with 0, it releases the interpreter's lock and takes it again, without giving up the core as
    `time.sleep(0)` or `sched_yield` do: on a core that is shared, those come back only milliseconds later."""
    select.poll().poll(timeout_ms)  # of its own: threads may not poll with the same one at once


_FATAL = (PacketKind.DESCRIBE, PacketKind.ABORT)
"""What ends a collective. From a peer that is ahead they wait: this rank can finish what the peer has finished."""

_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # Linux alone has it
_OF_NETWORK = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class _Abort(msgspec.Struct, frozen=True):
    """Why a rank failed: `lost` (and which rank), `timeout`, or `left` for anything else."""

    reason: str
    text: str
    rank: int = -1


class _Receive:
    """A payload that is expected from one peer, and what to do when it is there."""

    __slots__ = ("filled", "length", "position", "then", "views")

    def __init__(self, views: Sequence[memoryview], then: Callable[[], None] | None):
        self.views = views
        self.length = sum(len(view) for view in views)
        self.then = then
        self.position = 0
        self.filled = 0


class Mesh:
    """The channels to all other members. One thread at a time may use it.

    Attributes:
        spin_s: how long to look for bytes before sleeping; 0 where there are more ranks than cores.
        track: of the timeline, on which collectives are.
        stall_s: how long a collective may wait before `on_stall` is told, once, who has not come.
        bytes_shared: that this rank has given to others through shared memory; those that use it count them here.

    Args:
        throttle: bounds what this process sends, to simulate a slow network.
    """

    def __init__(self, membership: Membership, throttle: Throttle | None = None):
        self.spin_s = SPIN_S if throttle is None else 0.0  # who waits for long lets the others compute
        self.stall_s = float("inf")
        self.on_stall: Callable[[Sequence[Rank]], None] = lambda ranks: None
        self.bytes_shared = 0
        self.track = timeline.COLLECTIVES
        self._throttle = throttle
        self.membership = membership
        self.rank = membership.rank
        self._channels = {rank: channel_of(link) for rank, link in membership.links.items()}
        for channel in self._channels.values():
            channel.open(membership.generation)
        self._sent_before = sum(channel.sent for channel in self._channels.values())
        self._by_fileno = {channel.link.fileno(): rank for rank, channel in self._channels.items()}
        self._poller = select.poll()
        self._masks: dict[Rank, int] = {}
        self._call: CollectiveCall | None = None
        self._expected: dict[Rank, deque[_Receive]] = {}
        self._sending: set[Rank] = set()
        self._present: dict[Rank, int] = {}
        self._ended: dict[Rank, float] = {}
        self._why: dict[Rank, str] = {}  # what is known of those whose connection did not just close
        self._hung_up: dict[Rank, float] = {}
        self._left: set[Rank] = set()
        self._descriptions: dict[Rank, CollectiveDescription | None] = {}
        self._describing = False
        self._closing = False
        self._announce_at = 0.0
        self._health_at = 0.0
        self._stalled_at = 0.0

    @property
    def bytes_sent(self) -> int:
        """Bytes of packets that went over links, headers included."""
        return sum(channel.sent for channel in self._channels.values()) - self._sent_before

    @property
    def call(self) -> CollectiveCall:
        assert self._call is not None, "a mesh is used within a collective"
        return self._call

    # ------------------------------------------------------------------- calls

    def begin(self, call: CollectiveCall) -> None:
        """A new collective starts. All packets of the one before have been sent and received."""
        assert not self._expected
        self._call = call
        self._announce_at = call.started + min(PRESENCE_DELAY_S, (call.deadline - call.started) / 4)
        self._health_at = call.started + ALIVE_CHECK_INTERVAL_S
        self._stalled_at = call.started + self.stall_s

    def send(self, rank: Rank, payload: Sequence[memoryview] = ()) -> None:
        """Send a data packet. The payload must not change before `run` has returned."""
        channel = self._channels[rank]
        idle = not channel.sending
        channel.post(PacketKind.DATA, self.call.number, self.call.signature, payload)
        self._sending.add(rank)
        if idle:
            self._flush(rank)

    def expect(self, rank: Rank, views: Sequence[memoryview] = (), then: Callable[[], None] | None = None) -> None:
        """Put the payload of the next data packet from `rank` into `views`, then call `then`."""
        self._expected.setdefault(rank, deque()).append(_Receive(views, then))

    def run(self) -> None:
        """Return when all that was expected is there and the kernel has taken all that was sent."""
        if timeline.current.on and self._expected:
            self._wait_for_the_first()
        while self._expected or self._sending:
            if not self._advance() and not self._spin():
                self.pause(self._waited_for)

    def _wait_for_the_first(self) -> None:
        """Wait, for the timeline, until all from whom something is expected have come to this collective."""
        started, first = timeline.now(), {rank: queue[0] for rank, queue in self._expected.items()}
        absent, last = set(first), self.rank
        while absent:
            if not self._advance() and not self._spin():
                self.pause(self._waited_for)
            for rank in tuple(absent):
                queue = self._expected.get(rank)
                if not queue or queue[0] is not first[rank] or first[rank].filled or first[rank].position:
                    absent.discard(rank)
                    last = rank
        timeline.current.complete(self.track, "wait", started, {"for": last})

    def notify(self, rank: Rank, kind: PacketKind = PacketKind.WAKE) -> None:
        """Send an empty packet as a signal, unless others wait already: those will wake the peer as well."""
        channel = self._channels[rank]
        if not channel.sending and rank not in self._ended:
            channel.post(kind, self.call.number, self.call.signature)
            self._sending.add(rank)
            self._flush(rank)

    def pause(self, needed: Callable[[], Collection[Rank]], at_most_s: float = POLL_S) -> None:
        """Wait until something happens on any link, for at most `at_most_s`.

        Args:
            needed: gives the ranks that this rank cannot go on without. Asked after the links were read, so
                that what a member did before it left still counts.

        Raises: whatever the links or the clock tell (see the top of this file).
        """
        self._poll(at_most_s)
        now = time.monotonic()
        self._check_lost(needed, now)
        if now >= self._announce_at:
            self._announce_at = float("inf")
            for rank in self._channels:
                self.notify(rank, PacketKind.PRESENT)
        if now >= self._health_at:
            self._health_at = now + ALIVE_CHECK_INTERVAL_S
            self._check_hosts(now)
        if now >= self._stalled_at:
            self._stalled_at = float("inf")
            self.on_stall(self._missing(needed()))
        if now >= self.call.deadline:
            raise self._timed_out(needed())
        if now >= self.membership.state.abort_at:
            raise LinkClosedError(
                f"generation {self.membership.generation} of the job ended during {self.call}: another member was lost."
            )
        if self._closing:
            raise PhalanxError(f"{self.call} was cut short: this process closed its communicator meanwhile.")

    # ----------------------------------------------------------------- endings

    def mismatch(self) -> NoReturn:
        """The ranks called different things: exchange descriptions with all of them and raise."""
        self._describing = True
        self._expected.clear()
        own = self.call.operation.description
        self._descriptions[self.rank] = own
        encoded = memoryview(msgspec.msgpack.encode(own))
        for channel in self._channels.values():
            channel.post(PacketKind.DESCRIBE, self.call.number, self.call.signature, [encoded])
        until = time.monotonic() + DESCRIBE_S
        while time.monotonic() < until:
            moved = False
            for rank in self._channels:
                if rank in self._ended:
                    self._descriptions.setdefault(rank, None)
                elif rank not in self._descriptions or self._channels[rank].sending:
                    moved |= self._flush(rank) | self._receive(rank)
            if len(self._descriptions) == self.membership.world_size and not self._sending_any():
                break
            if not moved:
                self._poll(POLL_S)
        raise CollectiveMismatchError(explain_mismatch(self._descriptions))

    def abort(self, error: BaseException) -> None:
        """Tell all others why this rank gives up, as far as they listen. Raises nothing."""
        if isinstance(error, CollectiveMismatchError):
            return  # All know: that is how this rank does.
        if isinstance(error, PeerLostError):
            abort = _Abort("lost", str(error), error.rank)
        elif isinstance(error, CollectiveTimeoutError):
            abort = _Abort("timeout", str(error))
        else:
            abort = _Abort("left", f"{type(error).__name__}: {error}")
        self._expected.clear()
        self._tell_all(PacketKind.ABORT, memoryview(msgspec.msgpack.encode(abort)))

    def leave(self) -> None:
        """Tell all others that this rank has finished with its communicator. Raises nothing."""
        self._tell_all(PacketKind.LEAVE, memoryview(b""), DELIVERY_TIMEOUT_S)

    def interrupt(self) -> None:
        """Make a collective that waits in another thread give up; see `GroupCommunicator.close`."""
        self._closing = True

    # ------------------------------------------------------------ moving bytes

    def _advance(self) -> bool:
        """Move what can be moved now between the peers of this collective; whether anything moved."""
        moved = False
        for rank in tuple(self._sending):
            moved |= self._flush(rank)
        for rank in tuple(self._expected):
            moved |= self._receive(rank)
        return moved

    def _spin(self) -> bool:
        until = time.perf_counter() + self.spin_s
        while time.perf_counter() < until:
            if self._advance():
                return True
            let_threads_run(0)
        return not (self._expected or self._sending)

    def _flush(self, rank: Rank) -> bool:
        channel = self._channels[rank]
        try:
            moved = channel.flush(self._throttle)
        except LinkClosedError:
            self._hung_up.setdefault(rank, time.monotonic())
            moved = False
        if not channel.sending:
            self._sending.discard(rank)
        return moved

    def _receive(self, rank: Rank) -> bool:
        """Read up to one packet from a peer; whether anything was read."""
        if rank in self._ended:
            return False
        channel = self._channels[rank]
        try:
            header = channel.header()
            if header is None or header.epoch > channel.epoch:
                return False
            if header.epoch < channel.epoch:
                return channel.discard()
            if header.kind is PacketKind.DATA:
                return self._receive_data(rank, channel, header)
            if header.kind in _FATAL and self._is_ahead(header):
                return False
            message = channel.message()
        except LinkClosedError as error:
            self._ended[rank] = time.monotonic()
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _OF_NETWORK:
                self._why[rank] = f"{error} Its host is down, or the network between is."
            self._hung_up.pop(rank, None)
            return False
        if message is None:
            return False
        channel.next()
        self._control(rank, header, message)
        return True

    def _receive_data(self, rank: Rank, channel: Channel, header: PacketHeader) -> bool:
        if self._describing:
            return channel.discard()
        if self._is_ahead(header):
            return False
        call = self.call
        if header.call < call.number:
            raise PhalanxError(f"{self._name(rank)} sent values of collective {header.call} during {call}: a defect.")
        if header.signature != call.signature:
            self.mismatch()
        queue = self._expected.get(rank)
        if not queue:
            return False  # It is a stage ahead.
        receive = queue[0]
        if header.length != receive.length:
            raise PhalanxError(
                f"{self._name(rank)} sent {header.length} bytes in {call}, {receive.length} were expected: a defect."
            )
        moved = False
        while receive.position < len(receive.views):
            view = receive.views[receive.position]
            if receive.filled == len(view):
                receive.position += 1
                receive.filled = 0
                continue
            count = channel.read_into(view[receive.filled :] if receive.filled else view)
            if not count:
                return moved
            moved = True
            receive.filled += count
        channel.next()
        queue.popleft()
        if not queue:
            del self._expected[rank]
        if receive.then is not None:
            receive.then()
        return True

    def _is_ahead(self, header: PacketHeader) -> bool:
        """Whether a packet belongs to a later collective than this rank's; then it stays parked."""
        return not self._describing and (self._call is None or header.call > self._call.number)

    def _control(self, rank: Rank, header: PacketHeader, message: memoryview) -> None:
        if header.kind is PacketKind.PRESENT:
            self._present[rank] = header.call
        elif header.kind is PacketKind.LEAVE:
            self._left.add(rank)
        elif header.kind is PacketKind.DESCRIBE:
            self._descriptions[rank] = msgspec.msgpack.decode(message, type=CollectiveDescription)
            if not self._describing:
                self.mismatch()
        elif header.kind is PacketKind.ABORT and not self._describing:
            raise self._aborted(rank, msgspec.msgpack.decode(message, type=_Abort))

    # ----------------------------------------------------------------- waiting

    def _poll(self, timeout_s: float) -> None:
        """Wait for any link, then read and send what can be."""
        for rank, channel in self._channels.items():
            # Packets that were parked may be wanted by now. Of those that hung up, read the last words.
            if channel.parked or rank in self._hung_up:
                while self._receive(rank):
                    pass
        if self._throttle is not None:
            waiting = [channel.outgoing for channel in self._channels.values() if channel.sending]
            timeout_s = min([timeout_s, *map(self._throttle.wait_s, waiting)])
        for rank, channel in self._channels.items():
            self._set_mask(rank, channel)
        for fileno, events in self._poller.poll(timeout_s * 1000):
            rank = self._by_fileno[fileno]
            if events & select.POLLOUT:
                self._flush(rank)
            # To its end: TLS may hold decrypted bytes that poll does not see.
            while self._receive(rank):
                pass
            if events & (_PEER_CLOSED | select.POLLHUP | select.POLLERR) and rank not in self._ended:
                self._hung_up.setdefault(rank, time.monotonic())

    def _set_mask(self, rank: Rank, channel: Channel) -> None:
        if rank in self._ended or rank in self._hung_up:
            mask = 0
        else:
            # Not for input while a packet is parked, or poll would return at once for ever.
            mask = _PEER_CLOSED | (0 if self._is_parked(rank, channel) else select.POLLIN)
            mask |= select.POLLOUT if channel.sending and self._may_send(channel) else 0
        if mask != self._masks.get(rank, 0):
            if mask:
                self._poller.register(channel.link.fileno(), mask)
            else:
                self._poller.unregister(channel.link.fileno())
            self._masks[rank] = mask

    def _may_send(self, channel: Channel) -> bool:
        return self._throttle is None or self._throttle.available(channel.outgoing) > 0

    def _is_parked(self, rank: Rank, channel: Channel) -> bool:
        return channel.parked and rank not in self._expected and not self._describing

    def _waited_for(self) -> set[Rank]:
        return set(self._expected) | self._sending

    def _sending_any(self) -> bool:
        return any(channel.sending for rank, channel in self._channels.items() if rank not in self._ended)

    # ------------------------------------------------------------------ errors

    def _check_lost(self, needed: Callable[[], Collection[Rank]], now: float) -> None:
        if not (self._ended or self._hung_up or self._left):
            return
        wanted = needed()
        for rank in (*self._ended, *self._left):
            if rank in wanted:
                raise self._lost(rank)
        for rank, since in (*self._ended.items(), *self._hung_up.items()):
            if rank not in self._left and now > since + GRACE_S:
                raise self._lost(rank)

    def _check_hosts(self, now: float) -> None:
        for rank, channel in self._channels.items():
            if rank not in self._ended:
                try:
                    channel.link.check_alive()
                except LinkClosedError as error:
                    self._ended[rank] = now
                    self._why[rank] = str(error)
                    raise self._lost(rank) from error

    def _lost(self, rank: Rank) -> PeerLostError:
        if rank in self._left:
            return self._gone(rank, "closed its communicator and left")
        self.membership.state.unresponsive.add(rank)
        return self.membership.peer_lost(rank, str(self._call or "setup"), self._why.get(rank, ""))

    def _missing(self, needed: Collection[Rank]) -> list[Rank]:
        """The ranks that have not come to the running collective, as far as this rank knows."""
        absent = self._absent()
        return sorted((set(needed) & absent) or absent or needed)

    def _absent(self) -> set[Rank]:
        """All ranks from which this one has not heard in the running collective."""
        call = self.call
        present = {rank for rank, number in self._present.items() if number >= call.number}
        for rank, channel in self._channels.items():
            if channel.parked and (header := channel.header()) and header.call >= call.number:
                present.add(rank)
        return set(self._channels) - present

    def _note_unheard(self) -> None:
        """The collective ends by its time. Who came to it late itself has nothing to say about the others."""
        call = self.call
        if time.monotonic() - call.started >= (call.deadline - call.started) / 2:
            self.membership.state.unresponsive.update(self._absent())

    def _timed_out(self, needed: Collection[Rank]) -> CollectiveTimeoutError:
        call = self.call
        self._note_unheard()
        missing = self._missing(needed)
        names = self.names(missing)
        waited_s = time.monotonic() - call.started
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        me = self.membership.me
        return CollectiveTimeoutError(
            f"{me.task} (rank {me.rank}) waited {waited_s:.1f} s in {call}, since {since}, for {names}, "
            f"which {'is' if len(missing) == 1 else 'are'} connected but did not come. Look whether that "
            f"process hangs (`py-spy dump --pid PID`), is stopped, has more or other work per step than the "
            f"rest, or ended its loop early. If it only needs longer, raise timeout_seconds."
        )

    def _aborted(self, rank: Rank, abort: _Abort) -> PhalanxError:
        if abort.reason == "timeout":
            self._note_unheard()
            return CollectiveTimeoutError(f"{self._name(rank)} gave up: {abort.text}")
        if abort.reason == "left":
            return self._gone(rank, f"left because of its own error ({abort.text})")
        if abort.rank in (self.rank, -1):
            return self._gone(rank, "lost its connection to this process and left")
        member = self.membership.members[abort.rank]
        # In the words of the rank that saw it, which may know more than the end of a link tells.
        return PeerLostError(abort.text, rank=abort.rank, task=member.task, host=member.host)

    def _gone(self, rank: Rank, what: str) -> PeerLostError:
        member, me = self.membership.members[rank], self.membership.me
        return PeerLostError(
            f"{self._name(rank)} {what}, while {me.task} (rank {me.rank}) was in {self.call}. Look at the end of "
            f"that task's output for the cause.",
            rank=rank,
            task=member.task,
            host=member.host,
        )

    def names(self, ranks: Sequence[Rank]) -> str:
        """Of these ranks, for messages."""
        return " and ".join(self._name(rank) for rank in ranks)

    def _name(self, rank: Rank) -> str:
        member = self.membership.members[rank]
        return f"{member.task} (rank {rank}, pid {member.pid} on {member.host})"

    def _tell_all(self, kind: PacketKind, payload: memoryview, at_most_s: float = FLUSH_S) -> None:
        number = self._call.number if self._call else 0
        for channel in self._channels.values():
            channel.post(kind, number, 0, [payload])
        until = time.monotonic() + at_most_s
        while self._sending_any() and time.monotonic() < until:
            moved = False
            for rank in self._channels:
                moved |= self._flush(rank)
            if not moved:
                time.sleep(0.001)
