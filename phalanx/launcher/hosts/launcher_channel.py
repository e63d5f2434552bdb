"""The agent's end of the connection to its launcher: commands come on stdin, answers go to stdout, under a lease.

A launcher that is cut off may have started other workers instead of these. So whatever the agent does, it counts the
time since the last command: also while it writes, which a network that was cut keeps from getting on.
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

from phalanx.launcher.host_messages import SILENCE_S, Answer, Command, LineReader
from phalanx.transport.decoding import Decoder

READ_BYTES = 65536
CHECK_S = 0.5


class LauncherLostError(Exception):
    """The launcher is gone, or was silent for too long."""


class LauncherChannel:
    """See the top of the file.

    Args:
        selector: wakes when a command may have come.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._lease_ends_at = float("inf")
        self._is_lost = False
        self._lines = LineReader()
        self._decoder: Decoder[Command] = Decoder(Command, json=True)
        self._commands: deque[Command] = deque()
        # A login script may have left a line without its end, such as a sequence that sets a terminal's title.
        os.write(1, b"\n")
        os.set_blocking(1, False)
        selector.register(0, selectors.EVENT_READ)

    def begin_lease(self) -> None:
        """Workers run from now on."""
        self._lease_ends_at = time.monotonic() + SILENCE_S

    def commands(self) -> Iterator[Command]:
        """The commands that have arrived. Raises: LauncherLostError."""
        self._receive()
        while self._commands:
            yield self._commands.popleft()
        self._check()

    def send(self, answer: Answer) -> None:
        """Raises: LauncherLostError."""
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
        # All that has come, before the lease is judged: stdin blocks, so it is read only while it has something.
        while not self._is_lost and _wait_for(0, select.POLLIN, 0.0):
            data = os.read(0, READ_BYTES)
            self._is_lost = not data
            self._commands += map(self._decoder.decode, self._lines.feed(data))
            if self._lease_ends_at < float("inf"):
                self.begin_lease()

    def _check(self) -> None:
        """To be called after `_receive`: heartbeats may have come while this process was stopped."""
        if not self._is_lost and time.monotonic() > self._lease_ends_at:
            print(f"phalanx: no sign of the launcher for {SILENCE_S:g} s: ending its workers", file=sys.stderr)
            self._is_lost = True
        if self._is_lost:
            raise LauncherLostError


def _wait_for(descriptor: int, event: int, within_s: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(1000 * within_s))
