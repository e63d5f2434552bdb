"""Ends the sleep of a selector, from a signal handler or another thread."""

from __future__ import annotations

import contextlib
import selectors
import socket


class SelectorWaker:
    """Registered with a selector, whose `select` returns after `wake`, or after a byte to `fileno`."""

    def __init__(self, selector: selectors.BaseSelector):
        self._selector = selector
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        selector.register(self._ours, selectors.EVENT_READ)

    def fileno(self) -> int:
        """The descriptor for `signal.set_wakeup_fd`."""
        return self._theirs.fileno()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake; closed: nobody sleeps
            self._theirs.send(b"\0")

    def drain(self) -> None:
        """Forget the wakes so far; to be called after `select`, before looking for what they were about."""
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass

    def close(self) -> None:
        """Safe to call twice."""
        if self._ours.fileno() >= 0:
            self._selector.unregister(self._ours)
            self._ours.close()
            self._theirs.close()
