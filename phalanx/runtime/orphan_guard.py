"""Why no worker outlives its launcher, whatever kills the launcher.

The launcher holds the writing end of a pipe and never writes; the worker holds the reading end. When the
launcher dies, even by SIGKILL, the kernel closes its end. On Linux the reading end is set up so that the
kernel itself then sends SIGKILL to the worker's whole process group (`fcntl(2)`: O_ASYNC, F_SETOWN,
F_SETSIG): no thread waits, the interpreter lock is not needed, and processes that the worker has started die
with it.

PR_SET_PDEATHSIG (`prctl(2)`) is set as well, for the case that a copy of the writing end leaked into some
other process. It alone would not do: it reaches no grandchildren, and fires when the *thread* that started
the worker ends, so it is only used for workers started by a main thread. Where F_SETSIG is unknown (macOS), a
thread waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class OrphanGuard:
    """The launcher's end: the worker lives until `cut`, or until this process ends."""

    def __init__(self) -> None:
        self.worker_end, self._own_end = os.pipe()
        _open_lifelines.add(self)

    def started(self) -> None:
        """Give up the worker's end, once the worker has it."""
        if self.worker_end >= 0:
            os.close(self.worker_end)
            self.worker_end = -1

    def cut(self) -> None:
        """End the worker's process group, if it still runs. Safe to call twice."""
        self.started()
        if self._own_end >= 0:
            os.close(self._own_end)
            self._own_end = -1


_open_lifelines: weakref.WeakSet[OrphanGuard] = weakref.WeakSet()


def _drop_lifelines() -> None:
    # A fork of the launcher (a DataLoader worker of rank 0, say) must not keep the other workers alive.
    for lifeline in list(_open_lifelines):
        lifeline.cut()


os.register_at_fork(after_in_child=_drop_lifelines)


def hold(fd: int, parent: int, *, die_with_parent: bool) -> None:
    """Called first in the worker, whose process group must be its own: bind its life to the lifeline.

    Args:
        fd: the worker's end; it stays open for the life of the process.
        parent: process id of the launcher.
        die_with_parent: whether the launcher's starting thread lives as long as the launcher.
    """
    if sys.platform == "linux":
        os.set_inheritable(fd, False)
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, fcntl.F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        if die_with_parent:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != parent:  # it died before the line above: that signal will never come
                os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_wait_for_end, args=(fd,), name="phalanx-lifeline", daemon=True).start()
    if select.select([fd], [], [], 0)[0]:  # closed before O_ASYNC was set
        os.killpg(0, signal.SIGKILL)


_adopts = False
_strangers: set[int] = set()
"""Children that this process had before it adopted any, as in `tensorboard & exec phalanx run ...`: not ours to end."""
_awaited: dict[int, subprocess.Popen[bytes]] = {}


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent dies, so that it can end them."""
    global _adopts
    if sys.platform == "linux":
        _strangers.update(_children())
        _adopts = True
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def await_end(process: subprocess.Popen[bytes]) -> None:
    """This process is no orphan: its `Popen` waits for it, and nobody else may."""
    if _adopts:
        _awaited[process.pid] = process


def reap_orphans() -> None:
    """Let those go that have ended, where this process adopts any: as zombies they count in a container's limit.

    By the main thread, which alone `_children` lists the children of: it starts none meanwhile.
    """
    if not _adopts:
        return
    for pid, process in list(_awaited.items()):
        if process.returncode is not None:  # its number may be an orphan's by now
            _awaited.pop(pid)
    for pid in _children():
        if pid not in _strangers and pid not in _awaited:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


REAP_WAIT_S = 5.0


def end_orphans() -> None:
    """Kill and reap every child of this process that it has started or adopted, and what these leave behind."""
    spared = set(_strangers)
    for _ in range(100):  # each round may bring up children of those it killed
        orphans = [pid for pid in _children() if pid not in spared]
        if not orphans:
            return
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + REAP_WAIT_S
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    if time.monotonic() > deadline:  # inside the kernel, on a dead file system: nobody can end it
                        spared.add(pid)
                        break
                    time.sleep(0.001)
            except (ProcessLookupError, ChildProcessError):
                continue


def prctl(option: int, value: int) -> None:
    """Call prctl(2). A kernel or sandbox that refuses is no reason to fail: the pipe is the main line."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            return [int(pid) for pid in children.read().split()]
    except OSError:  # no /proc, or a kernel without CONFIG_PROC_CHILDREN
        return []


def _wait_for_end(fd: int) -> None:
    os.read(fd, 1)
    os.killpg(0, signal.SIGKILL)
