"""Discovers the hosts of an elastic job by running a script (`--host-discovery-script`) every few seconds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.launcher.elastic_hosts.host_discovery_poller import DiscoveryAnswer
from phalanx.launcher.host_slots import HostSpec, parse_discovered
from phalanx.launcher.orphan_reaper import exclude_from_reaping
from phalanx.runtime.orphan_guard import OrphanGuard
from phalanx.transport.decoding import decode_json

CLOSE_S = 5.0
_ROOT = str(Path(__file__).resolve().parents[3])
# Not `-m`, which needs this package on the path: the script must inherit the path unchanged.
_POLLER = "phalanx.launcher.elastic_hosts.host_discovery_poller"
_PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from {_POLLER} import main; main()"


@dataclass(frozen=True)
class DiscoveryScript:
    """A host discovery script.

    Attributes:
        command: Shell command line.
        slots: Number of slots of a host that is listed without one.
        every_s: Seconds between two runs.
        timeout_s: Time limit of a run, in seconds.
    """

    command: str
    slots: int
    every_s: float
    timeout_s: float


class HostDiscovery:
    """Runs a script repeatedly until it is closed. If a run fails, the last valid answer remains in effect, and the
    failure is logged once. A host is withdrawn only if two consecutive answers lack it, since the first may come from a
    file that is being written.

    Args:
        script: The script.
        on_change: Receives all hosts whenever they change. Called in a thread.
        log: Shows a line. Called in a thread.

    Attributes:
        problem: Reason for the failure of the last run; empty if it succeeded.
    """

    def __init__(
        self, script: DiscoveryScript, *, on_change: Callable[[list[HostSpec]], None], log: Callable[[str], None]
    ):
        self._script, self._on_change, self._log = script, on_change, log
        self.problem = ""
        self._hosts: list[HostSpec] | None = None  # as last passed to `on_change`
        self._last_answer: list[HostSpec] = []  # as printed by the script
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = OrphanGuard()
        self._thread = threading.Thread(target=self._receive, name="phalanx-discovery", daemon=True)

    def start(self) -> None:
        """Start running the script."""
        script = self._script
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(script.every_s), str(script.timeout_s), script.command],
            stdin=self._guard.read_fd,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        exclude_from_reaping(self._process)
        self._guard.started()
        self._thread.start()

    def handle(self, answer: DiscoveryAnswer) -> None:
        """Handle one run of the script, which printed the hosts or failed."""
        problem, name = answer.problem, f"the host discovery script {self._script.command}"
        host_specs: Sequence[HostSpec] = ()
        if not problem:
            try:
                host_specs = parse_discovered(answer.text, self._script.slots)
            except ConfigurationError as error:
                problem = str(error)
        if problem:
            if problem != self.problem:
                consequence = "no hosts are known yet" if self._hosts is None else "the known hosts are kept"
                self._log(f"{name} failed: {problem.rstrip('.')}; {consequence}")
            self.problem = problem
            return
        if self.problem:
            self._log(f"{name} recovered")
            self.problem = ""
        hosts = _merge_answers(self._last_answer, host_specs)
        self._last_answer = list(host_specs)
        if hosts != self._hosts:
            self._hosts = hosts
            self._on_change(hosts)

    def close(self) -> None:
        """Stop running the script, and kill it if it is running. Safe to call twice."""
        self._closed = True
        self._guard.kill_group()
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait(CLOSE_S)
            self._thread.join(CLOSE_S)

    def _receive(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # otherwise the process was killed while writing
                    self.handle(decode_json(line, DiscoveryAnswer))
        if not self._closed:
            self._log("the process that runs the host discovery script was killed; the known hosts are kept")


def _merge_answers(before: Sequence[HostSpec], now: Sequence[HostSpec]) -> list[HostSpec]:
    """Merge the hosts of two answers, keeping the larger numbers of slots. Those of `now` come first, in order."""
    former = {host_spec.name: host_spec for host_spec in before}
    merged = [max(host_spec, former.pop(host_spec.name, host_spec), key=lambda each: each.workers) for host_spec in now]
    return [*merged, *former.values()]
