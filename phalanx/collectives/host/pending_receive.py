"""Payloads that a rank expects. A peer's packets arrive in the order in which they are needed, so they have no tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.collectives.host.channel import Channel


class PendingReceive:
    """A payload that is expected from one peer.

    Args:
        views: Memory that receives the payload, filled in this order.
        on_arrival: Callback for the complete payload; None for no callback.
    """

    __slots__ = ("_filled", "_index", "_views", "length", "on_arrival")

    def __init__(self, views: Sequence[memoryview], on_arrival: Callable[[], None] | None):
        self._views = views
        self.length = sum(len(view) for view in views)
        self.on_arrival = on_arrival
        self._index = 0  # index of the view that is being filled
        self._filled = 0  # bytes of that view

    @property
    def is_complete(self) -> bool:
        return self._index == len(self._views)

    @property
    def has_started(self) -> bool:
        return bool(self._index or self._filled)

    def read_from(self, channel: Channel) -> bool:
        """Read the available part of the payload, and return whether there was any. Raises LinkClosedError."""
        moved = False
        while self._index < len(self._views):
            view = self._views[self._index]
            if self._filled == len(view):
                self._index += 1
                self._filled = 0
                continue
            count = channel.read_into(view[self._filled :] if self._filled else view)
            if not count:
                break
            moved = True
            self._filled += count
        return moved
