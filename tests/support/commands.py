"""Runs a command with a time limit."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def finish(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    bound_s: float,
    folder: Path = ROOT,
    start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
) -> tuple[int | None, str]:
    """Run a command; return its exit code and output. If it takes longer than `bound_s`, it is killed, the exit code is
    None, and the output says so. The command never outlives this process, and the tasks of a job die with their
    launcher.

    Args:
        start: Function that starts the process; `fork_server.popen` to share the imports of Keras.
    """
    with start(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    ) as process:
        try:
            output, _ = process.communicate(timeout=bound_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, process.communicate()[0] + "\nstopped by the test: it took too long"
    return process.returncode, output


def die_with_parent() -> None:
    """In a new process, before its program starts: let the kernel kill it when the thread that created it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
