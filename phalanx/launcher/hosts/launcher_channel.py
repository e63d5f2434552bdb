"""The agent's end of the connection to its launcher: reads commands from stdin and writes answers to stdout.

The connection has a lease, because a launcher that is cut off may have started other workers instead of these. The
agent always tracks the time since the last command, even while it writes: writes block if the network is cut.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from phalanx.launcher.host_messages import LEASE_S, Answer, Command, LineReader
from phalanx.transport.decoding import Decoder

READ_BYTES = 65536
CHECK_S = 0.5


class LauncherLostError(Exception):
    """The launcher is gone or was silent for too long."""


class LauncherChannel:
    """See the module docstring.

    Args:
        selector: Wakes when a command may have arrived.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._lease_ends_at = float("inf")
        self._is_lost = False
        self._lines = LineReader()
        self._decoder: Decoder[Command] = Decoder(Command, json=True)
        self._commands: deque[Command] = deque()
        # End a partial line that a login script may have printed, such as a sequence that sets the terminal's title.
        os.write(1, b"\n")
        os.set_blocking(1, False)
        selector.register(0, selectors.EVENT_READ)

    def begin_lease(self) -> None:
        """Begin the lease, because workers are running from now on; also renew it."""
        self._lease_ends_at = time.monotonic() + LEASE_S

    def commands(self) -> Iterator[Command]:
        """Yield the commands that have arrived. Raises: LauncherLostError."""
        self._receive()
        while self._commands:
            yield self._commands.popleft()
        self._check()

    def send(self, answer: Answer) -> None:
        """Send an answer. Raises: LauncherLostError."""
        data = msgspec.json.encode(answer) + b"\n"
        while data:
            try:
                data = data[os.write(1, data) :]
            except BlockingIOError:  # the launcher does not read: it may be gone, or its terminal paused
                self._receive()
                self._check()
                _wait_for(1, select.POLLOUT, CHECK_S)
            except BrokenPipeError as error:
                raise LauncherLostError from error

    def _receive(self) -> None:
        # Read everything before the lease is checked. Only while data is available, because stdin blocks.
        while not self._is_lost and _wait_for(0, select.POLLIN, 0.0):
            data = os.read(0, READ_BYTES)
            self._is_lost = not data
            self._commands += map(self._decoder.decode, self._lines.feed(data))
            if self._lease_ends_at < float("inf"):
                self.begin_lease()

    def _check(self) -> None:
        """Check the lease. Call after `_receive`: heartbeats may have arrived while this process was stopped."""
        if not self._is_lost and time.monotonic() > self._lease_ends_at:
            print(f"phalanx: no sign of the launcher for {LEASE_S:g} s: ending its workers", file=sys.stderr)
            self._is_lost = True
        if self._is_lost:
            raise LauncherLostError


def _wait_for(descriptor: int, event: int, within_s: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(1000 * within_s))
