"""`poll` over the links of a mesh."""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from phalanx.cluster.membership import Rank
from phalanx.collectives.host.channel import Channel

_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # Linux only


def let_threads_run() -> None:
    """Release and re-acquire the interpreter lock without giving up the core. `time.sleep(0)` and `sched_yield` give it
    up, and on a shared core they return only milliseconds later."""
    select.poll().poll(0)  # a new object, because threads must not use the same one concurrently


class LinkEvent(NamedTuple):
    """An event on a peer's link."""

    rank: Rank
    is_writable: bool
    is_closed: bool


class LinkPoller:
    """Waits for events on several links.

    Args:
        channels: Channels of the peers, by rank.
    """

    def __init__(self, channels: Mapping[Rank, Channel]):
        self._poller = select.poll()
        self._filenos = {rank: channel.link.fileno() for rank, channel in channels.items()}
        self._ranks = {fileno: rank for rank, fileno in self._filenos.items()}
        self._masks: dict[Rank, int] = {}  # registered masks; only changes need a system call

    def watch(self, rank: Rank, *, to_read: bool, to_write: bool) -> None:
        """Choose the events of a peer's link to wait for. Closing is always one of them."""
        mask = _PEER_CLOSED | (select.POLLIN if to_read else 0) | (select.POLLOUT if to_write else 0)
        if mask != self._masks.get(rank, 0):
            self._poller.register(self._filenos[rank], mask)
            self._masks[rank] = mask

    def ignore(self, rank: Rank) -> None:
        """Stop waiting for events of this peer's link."""
        if self._masks.pop(rank, 0):
            self._poller.unregister(self._filenos[rank])

    def wait(self, timeout_s: float) -> Iterator[LinkEvent]:
        """Return events of the links after at most `timeout_s` seconds."""
        for fileno, events in self._poller.poll(timeout_s * 1000):
            is_closed = bool(events & (_PEER_CLOSED | select.POLLHUP | select.POLLERR))
            yield LinkEvent(self._ranks[fileno], bool(events & select.POLLOUT), is_closed)
