"""Child process of the launcher that runs the host discovery script repeatedly.

Its arguments are EVERY_S TIMEOUT_S COMMAND. Each answer is a line of JSON on stdout (`DiscoveryAnswer`). It is a
separate process with an orphan guard (its stdin), so that the kernel kills a hanging script and everything that it has
started when the launcher exits, for whatever reason.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time

import msgspec

from phalanx.launcher.orphan_reaper import adopt_orphans, end_orphans
from phalanx.runtime.orphan_guard import die_with_launcher

MAX_BYTES = 100_000
"""Limit for the output of a script, which has one line per host."""


class DiscoveryAnswer(msgspec.Struct, frozen=True):
    """The output of a script, or the problem that prevented it."""

    text: str = ""
    problem: str = ""


def run_script(command: str, timeout_s: float) -> DiscoveryAnswer:
    """Run the script once in a shell and kill what it leaves behind. This process must have no other children."""
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as script:
        try:
            out, err = _read_outputs(script, time.monotonic() + timeout_s)
        except (TimeoutError, OverflowError) as error:
            script.kill()
            script.wait()
            end_orphans()  # the script's children, adopted only now
            late = f"it has not ended within {timeout_s:g} s"
            return DiscoveryAnswer(problem=late if isinstance(error, TimeoutError) else str(error))
    end_orphans()
    if script.returncode:
        words = err.decode(errors="replace").strip().splitlines()
        last = f": {words[-1][:200]}" if words else ""
        return DiscoveryAnswer(problem=f"it ended with exit code {script.returncode}{last}")
    return DiscoveryAnswer(out.decode(errors="replace"))


def _read_outputs(script: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Read stdout, and the end of stderr, of a script until it exits.

    Raises: TimeoutError; OverflowError if it prints more than `MAX_BYTES`.
    """
    assert script.stdout is not None
    assert script.stderr is not None
    texts = {script.stdout.fileno(): b"", script.stderr.fileno(): b""}
    out, err = texts
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                read = os.read(key.fd, MAX_BYTES)
                texts[key.fd] = (texts[key.fd] + read)[-MAX_BYTES - 1 :]
                if not read:
                    selector.unregister(key.fd)
            if len(texts[out]) > MAX_BYTES:
                raise OverflowError(f"it prints more than {MAX_BYTES} bytes")
    try:
        script.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    return texts[out], texts[err]


def main() -> None:
    every_s, timeout_s, command = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    die_with_launcher(0)
    adopt_orphans()
    while True:
        began = time.monotonic()
        sys.stdout.buffer.write(msgspec.json.encode(run_script(command, timeout_s)) + b"\n")
        sys.stdout.buffer.flush()
        time.sleep(max(0.0, began + every_s - time.monotonic()))
