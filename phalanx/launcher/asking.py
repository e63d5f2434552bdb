"""A process beside the launcher that asks a discovery script again and again which hosts there are.

Its arguments are EVERY_S TIMEOUT_S COMMAND. Each answer is a line of JSON on stdout (`Answer`). It is a process of its
own, under a lifeline (its stdin), so that a script that hangs, and whatever it has started, ends with the launcher by
the kernel's doing, whatever ends that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec

from phalanx.launcher.lifeline import adopt_orphans, end_orphans, hold

MAX_CHARACTERS = 100_000
"""Of a script's output; a host is a line."""


class Answer(msgspec.Struct, frozen=True):
    """What a script printed, or why there is no answer."""

    text: str = ""
    problem: str = ""


def ask(command: str, timeout_s: float) -> Answer:
    """Run the script once, as a shell does; what it leaves behind is ended. The process must have no other children."""
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as script:
        try:
            out, err = script.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            script.kill()
            script.wait()
            end_orphans(set())  # what it has started, which is ours only now
            return Answer(problem=f"it has not ended within {timeout_s:g} s")
    end_orphans(set())
    if script.returncode:
        words = err.decode(errors="replace").strip().splitlines()
        last = f": {words[-1][:200]}" if words else ""
        return Answer(problem=f"it ended with exit code {script.returncode}{last}")
    return Answer(out.decode(errors="replace")[:MAX_CHARACTERS])


def main() -> None:
    every_s, timeout_s, command = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    # A launcher with threads ends one by one: PR_SET_PDEATHSIG could come before its end of the pipe closes, and would
    # take this process alone, and with it the lifeline by which the script goes.
    hold(0, os.getppid(), die_with_parent=False)
    adopt_orphans()
    while True:
        began = time.monotonic()
        sys.stdout.buffer.write(msgspec.json.encode(ask(command, timeout_s)) + b"\n")
        sys.stdout.buffer.flush()
        time.sleep(max(0.0, began + every_s - time.monotonic()))
