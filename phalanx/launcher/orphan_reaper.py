"""Makes the launcher the parent of processes that its workers leave behind, and kills them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_PR_SET_CHILD_SUBREAPER = 36
REAP_WAIT_S = 5.0
# Each round of `end_orphans` may reveal children of the processes that it killed.
MAX_ROUNDS = 100

_is_adopting = False
_exempt_pids: set[int] = set()
"""Children that existed before this process adopted any, as in `tensorboard & exec phalanx run ...`. Never killed."""
_popen_children: dict[int, subprocess.Popen[bytes]] = {}
"""Children with a `Popen`, by process id. If they were reaped here, their `Popen` would report exit code 0."""


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parent dies, so that it can kill them."""
    global _is_adopting
    if sys.platform == "linux":
        _exempt_pids.update(_children())
        _is_adopting = True
        # Ignore a refusal by the kernel or a sandbox: the orphan guards still kill the workers' process groups.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def exempt(pid: int) -> None:
    """Spare this child, which does not belong to the job, from being killed with it."""
    _exempt_pids.add(pid)


def exclude_from_reaping(process: subprocess.Popen[bytes]) -> None:
    """Exclude this process from reaping: only its `Popen` may wait for it."""
    if _is_adopting:
        _popen_children[process.pid] = process


def reap_orphans() -> None:
    """Reap the orphans that have exited, if this process adopts any: zombies count towards a container's limit.

    Must be called in the main thread, because `_children` lists only that thread's children.
    """
    if not _is_adopting:
        return
    for pid, process in list(_popen_children.items()):
        if process.returncode is not None:  # its id may be reused by an orphan
            _popen_children.pop(pid)
    for pid in _children():
        if pid not in _exempt_pids and pid not in _popen_children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_orphans() -> None:
    """Kill and reap every child that this process has started or adopted, and what these leave behind."""
    spared = set(_exempt_pids)
    for _ in range(MAX_ROUNDS):
        orphans = [pid for pid in _children() if pid not in spared]
        if not orphans:
            return
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + REAP_WAIT_S
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    if time.monotonic() > deadline:  # stuck in the kernel, on a dead file system
                        spared.add(pid)
                        break
                    time.sleep(0.001)
            except (ProcessLookupError, ChildProcessError):
                continue


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            return [int(pid) for pid in children.read().split()]
    except OSError:  # no /proc, or a kernel without CONFIG_PROC_CHILDREN
        return []
