"""Watches a collective that waits: announces this rank to the others, warns of a stall, and ends it at its deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from phalanx.cluster.membership import Membership, Rank
from phalanx.collectives.host.channel import Channel
from phalanx.collectives.host.peer_failures import member_names
from phalanx.collectives.operation import CollectiveCall
from phalanx.errors import CollectiveTimeoutError, LinkClosedError

_log = logging.getLogger(__name__)

PRESENCE_DELAY_S = 0.2
"""How long a rank waits before it announces its presence: long compared with a step, short compared with a timeout."""


class StallWatch:
    """Tracks which ranks have arrived at the running collective.

    Attributes:
        stall_s: Seconds after which a waiting collective calls `on_stall`, once.
        on_stall: Callback that receives the running call and the ranks that have not arrived.
    """

    def __init__(self, membership: Membership, channels: Mapping[Rank, Channel]):
        self.stall_s = float("inf")
        self.on_stall: Callable[[CollectiveCall, Sequence[Rank]], None] = lambda call, ranks: None
        self._membership = membership
        self._channels = channels
        self._present: dict[Rank, int] = {}  # last collective at which each peer announced its arrival
        self._announce_at = 0.0
        self._warn_at = 0.0

    def begin(self, call: CollectiveCall) -> None:
        """Start watching over a collective."""
        # Before any deadline, even a short one: the rank that gives up first must know which ranks have arrived.
        self._announce_at = call.started + min(PRESENCE_DELAY_S, (call.deadline - call.started) / 4)
        self._warn_at = call.started + self.stall_s

    def is_announcement_due(self, now: float) -> bool:
        """Return whether to send PRESENT to all peers now; True once per collective."""
        if now < self._announce_at:
            return False
        self._announce_at = float("inf")
        return True

    def record_presence(self, rank: Rank, number: int) -> None:
        """Record that a peer has arrived at collective `number` and waits there."""
        self._present[rank] = number

    def check(self, call: CollectiveCall, needed: Callable[[], Collection[Rank]], now: float) -> None:
        """Report a stall if one is due.

        Args:
            call: The running collective.
            needed: Function that returns the ranks that this rank still waits for.
            now: Current time, by `time.monotonic`.

        Raises:
            CollectiveTimeoutError: The deadline has passed; the message names the ranks that have not arrived.
            LinkClosedError: The generation has ended because another member was lost.
        """
        if now >= self._warn_at:
            self._warn_at = float("inf")
            self.on_stall(call, self._missing(call, needed()))
        if now >= call.deadline:
            raise self._timed_out(call, needed())
        if now >= self._membership.state.abort_at:
            raise LinkClosedError(
                f"generation {self._membership.generation} of the job ended during {call}: another member was lost."
            )

    def record_unheard(self, call: CollectiveCall) -> None:
        """Report the absent ranks of a collective that timed out, unless this rank arrived late and cannot know
        them."""
        if time.monotonic() - call.started >= (call.deadline - call.started) / 2:
            self._membership.state.unresponsive.update(self._absent(call))

    def warn_after(self, stall_s: float, timeout_s: float) -> None:
        """Log a warning for each stall, on the lowest rank that has arrived.

        Args:
            stall_s: Seconds of waiting before the warning.
            timeout_s: Seconds of waiting before the job ends, for the message.
        """

        def warn(call: CollectiveCall, missing: Sequence[Rank]) -> None:
            present = set(range(self._membership.world_size)) - set(missing)
            # All ranks that have arrived wait equally long; one line is enough.
            if self._membership.rank == min(present, default=self._membership.rank):
                _log.warning(
                    "stalled for more than %g s: %s waits for %s. The job ends after %g s "
                    "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, PHALANX_TIMEOUT).",
                    stall_s,
                    call,
                    member_names(self._membership, missing),
                    timeout_s,
                )

        self.stall_s, self.on_stall = stall_s, warn

    def _missing(self, call: CollectiveCall, needed: Collection[Rank]) -> list[Rank]:
        absent = self._absent(call)
        return sorted((set(needed) & absent) or absent or needed)

    def _absent(self, call: CollectiveCall) -> set[Rank]:
        """All peers that this rank has not heard from in the running collective."""
        present = {rank for rank, number in self._present.items() if number >= call.number}
        for rank, channel in self._channels.items():
            # Its packet is waiting here for this rank.
            if channel.parked and (header := channel.header()) and header.call >= call.number:
                present.add(rank)
        return set(self._channels) - present

    def _timed_out(self, call: CollectiveCall, needed: Collection[Rank]) -> CollectiveTimeoutError:
        self.record_unheard(call)
        missing = self._missing(call, needed)
        waited_s = time.monotonic() - call.started
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        me = self._membership.local_member
        return CollectiveTimeoutError(
            f"{me.task} (rank {me.rank}) waited {waited_s:.1f} s in {call}, since {since}, for "
            f"{member_names(self._membership, missing)}, which {'is' if len(missing) == 1 else 'are'} connected but "
            f"did not arrive. Check whether that process hangs (`py-spy dump --pid PID`), is stopped, has more or "
            f"other work per step than the rest, or ended its loop early. If it only needs longer, raise "
            f"timeout_seconds."
        )
