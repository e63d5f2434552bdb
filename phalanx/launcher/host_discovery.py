"""The hosts that a `--host-discovery-script` names, asked every few seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.launcher.host_discovery_poller import DiscoveryAnswer
from phalanx.launcher.host_slots import HostShare, parse_discovered
from phalanx.launcher.orphan_reaper import await_end
from phalanx.runtime.orphan_guard import OrphanGuard

CLOSE_S = 5.0
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Not `-m`, which would need this very package on the path that the script is to inherit as it is.
_PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from phalanx.launcher.host_discovery_poller import main; main()"


class HostDiscovery:
    """Asks until it is closed. An answer that is none is told once, and the last good one holds. What an answer takes
    away goes when the next one does not name it either: the first may have been read from a file in the making.

    Args:
        command: the script, as for a shell.
        slots: of a host that is printed without their number.
        every_s: seconds between two questions.
        timeout_s: seconds that the script may take.
        found: is told the hosts whenever they are others than before. Called from a thread.
        say: is told what is wrong with the script, and when it is well again, a line each. Called from a thread.
    """

    def __init__(
        self,
        command: str,
        *,
        slots: int,
        every_s: float,
        timeout_s: float,
        found: Callable[[list[HostShare]], None],
        say: Callable[[str], None],
    ):
        self._command, self._slots = command, slots
        self._every_s, self._timeout_s = every_s, timeout_s
        self._found, self._say = found, say
        self._last: list[HostShare] | None = None
        self._before: list[HostShare] = []  # the answer before this one
        self._problem = ""
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = OrphanGuard()
        self._thread = threading.Thread(target=self._listen, name="phalanx-discovery", daemon=True)

    @property
    def problem(self) -> str:
        """What is wrong with the last answer; empty if nothing is."""
        return self._problem

    def start(self) -> None:
        """Begin to ask."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(self._every_s), str(self._timeout_s), self._command],
            stdin=self._lifeline.worker_end,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        await_end(self._process)
        self._lifeline.started()
        self._thread.start()

    def take(self, answer: DiscoveryAnswer) -> None:
        """What the script has said."""
        problem = answer.problem
        shares: Sequence[HostShare] = ()
        if not problem:
            try:
                shares = parse_discovered(answer.text, self._slots)
            except ConfigurationError as error:
                problem = str(error)
        if problem:
            if problem != self._problem:
                held = "the hosts of before are kept" if self._last is not None else "no hosts are known yet"
                self._say(f"the host discovery script {self._command} gave no answer: {problem.rstrip('.')}; {held}")
            self._problem = problem
            return
        if self._problem:
            self._say(f"the host discovery script {self._command} answers again")
            self._problem = ""
        known = _larger(self._before, shares)
        self._before = list(shares)
        if self._last is None or known != self._last:
            self._last = known
            self._found(self._last)

    def close(self) -> None:
        """Stop asking; a script that still runs is killed. Safe to call twice."""
        self._closed = True
        self._lifeline.cut()
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait(CLOSE_S)
            self._thread.join(CLOSE_S)

    def _listen(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.take(msgspec.json.decode(line, type=DiscoveryAnswer))
        if not self._closed:
            self._say("nobody asks the host discovery script any more (the process was killed); the hosts stay")


def _larger(before: Sequence[HostShare], now: Sequence[HostShare]) -> list[HostShare]:
    """The hosts of both answers, with the larger numbers of slots; those of `now` in their order, then the others."""
    former = {share.name: share for share in before}
    merged = [max(share, former.pop(share.name, share), key=lambda each: each.workers) for share in now]
    return [*merged, *former.values()]
