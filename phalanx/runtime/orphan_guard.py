"""Ensures that no worker outlives its launcher, whatever kills the launcher.

The launcher holds the write end of a pipe and never writes; the worker holds the read end. When the launcher dies, even
by SIGKILL, the kernel closes its end. On Linux, the read end is set up so that the kernel then sends SIGKILL to the
worker's whole process group (`fcntl(2)`: O_ASYNC, F_SETOWN, F_SETSIG). No thread waits, the GIL is not needed, and
processes that the worker has started die with it.

PR_SET_PDEATHSIG (`prctl(2)`) would interfere with this. It fires when the *thread* that started the worker ends, and
the threads of a killed launcher end one by one before its pipes close. The worker, and with it the read end, would be
gone before the kernel looks up the process group, and the worker's children would survive. Without F_SETSIG (macOS), a
thread waits.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
import weakref


class OrphanGuard:
    """The launcher's end: the worker lives until `kill_group` is called or this process exits."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        _open_guards.add(self)

    def started(self) -> None:
        """Close the worker's end in this process, once the worker has inherited it."""
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def kill_group(self) -> None:
        """Kill the worker's process group, if it still runs. Safe to call twice."""
        self.started()
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1


_open_guards: weakref.WeakSet[OrphanGuard] = weakref.WeakSet()


def _close_guards() -> None:
    # A fork of the launcher (a DataLoader worker of rank 0, say) must not keep the other workers alive.
    for guard in list(_open_guards):
        guard.kill_group()


os.register_at_fork(after_in_child=_close_guards)


def die_with_launcher(fd: int) -> None:
    """Make this worker die with its launcher. Called first in the worker, which must lead its own process group.

    Args:
        fd: Read end of the launcher's pipe; it stays open for the life of the process.
    """
    if sys.platform == "linux":
        os.set_inheritable(fd, False)
        # Owner and signal before O_ASYNC, which enables sending: without them, the kernel sends SIGIO, to no process.
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, fcntl.F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_wait_for_end, args=(fd,), name="phalanx-orphan-guard", daemon=True).start()
    if select.select([fd], [], [], 0)[0]:  # closed before O_ASYNC was set
        os.killpg(0, signal.SIGKILL)


def _wait_for_end(fd: int) -> None:
    os.read(fd, 1)
    os.killpg(0, signal.SIGKILL)
