"""The selector of one job, and the hosts that it listens to."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from phalanx.launcher.host_messages import Event
from phalanx.launcher.hosts.base_host import WorkerHost

POLL_S = 0.05
"""Polling interval for hosts that cannot wake the selector."""
IDLE_S = 0.5
"""Longest sleep: hosts collect reports and reap orphans about this often."""


class HostEventLoop:
    """Sleeps until a host has something to report or another thread wakes it.

    All methods except `run_soon` and `wake` must be called in the thread that runs the job.
    """

    def __init__(self, selector: selectors.BaseSelector, hosts: Sequence[WorkerHost]):
        self._selector = selector
        self._waker = _Waker(selector)
        self._hosts = list(hosts)
        self._callbacks: deque[Callable[[], None]] = deque()  # append and popleft are atomic, so no lock

    @property
    def wakeup_fd(self) -> int:
        """Descriptor for `signal.set_wakeup_fd`, with which a signal interrupts the sleep immediately."""
        return self._waker.fileno()

    @property
    def hosts(self) -> list[WorkerHost]:
        return list(self._hosts)

    def run_soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the thread that runs the job. Safe in any thread and in signal handlers."""
        self._callbacks.append(callback)
        self._waker.wake()

    def wake(self) -> None:
        """End the current sleep. Safe in any thread and in signal handlers."""
        self._waker.wake()

    def add(self, host: WorkerHost) -> None:
        """Listen to this host, where workers may be started later."""
        if host not in self._hosts:
            self._hosts.append(host)
            host.start([])

    def remove(self, host: WorkerHost) -> None:
        """Stop listening to this host, where nothing runs anymore."""
        if host in self._hosts:
            self._hosts.remove(host)

    def wait(self, timeout_s: float) -> None:
        """Sleep until an event occurs, for at most this long, then run the callbacks."""
        longest_s = POLL_S if any(host.needs_polling for host in self._hosts) else IDLE_S
        self._selector.select(min(timeout_s, longest_s))
        # Drained before the callbacks run, or the wake-up for a callback added in between would be lost.
        self._waker.drain()
        while self._callbacks:
            self._callbacks.popleft()()

    def events(self) -> Iterator[Event]:
        """Yield the events that the hosts report now."""
        for host in self.hosts:
            yield from host.events()

    def close(self) -> None:
        """Close all hosts, which kills the remaining workers. Safe to call twice."""
        for host in self._hosts:
            host.close()
        self._waker.close()


class _Waker:
    """Ends the sleep of a selector, from a signal handler or another thread."""

    def __init__(self, selector: selectors.BaseSelector):
        self._selector = selector
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        selector.register(self._ours, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Descriptor for `signal.set_wakeup_fd`."""
        return self._theirs.fileno()

    def wake(self) -> None:
        # No lock: a signal handler may interrupt the thread that holds it.
        with contextlib.suppress(BlockingIOError, OSError):  # full: already awake; closed: nothing sleeps
            self._theirs.send(b"\0")

    def drain(self) -> None:
        """Reset the waker. Call this after `select`, before handling what the calls of `wake` announced."""
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass

    def close(self) -> None:
        """Close the sockets. Safe to call twice."""
        if self._ours.fileno() >= 0:
            self._selector.unregister(self._ours)
            self._ours.close()
            self._theirs.close()
