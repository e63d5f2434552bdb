"""Checks whether the TensorFlow server of a task answers.

A gRPC server speaks HTTP/2, in which the server sends a SETTINGS frame as soon as it has a connection (RFC 9113,
section 3.4). So a connection that receives one leads to a server. A connection that receives nothing may lead to a port
that the launcher has opened for a task that is still starting, or to a hanging process.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Set

from phalanx.config.environment_variables import RENDEZVOUS_TIMEOUT
from phalanx.errors import LinkClosedError, LinkTimeoutError, RendezvousError
from phalanx.transport.address import Address
from phalanx.transport.dial import UnreachableError, connect

CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes that a client sends, with an empty SETTINGS frame."""
FRAME_HEADER_BYTES = 9
SETTINGS = 4
ANSWER_S = 5.0
"""Time limit for an answer. A server on a busy host answers within milliseconds to a second."""
POLL_S = 0.2


class ProbeResult(enum.Enum):
    """The outcome of a connection to a task."""

    SERVES = "serves"
    """A TensorFlow server answered."""
    REFUSED = "refuses connections"
    """Its host reports that no process listens there."""
    SILENT = "does not answer"
    """Nothing arrived in time: the process hangs or is starting, or the host cannot be reached."""


def probe(address: Address, within_s: float = ANSWER_S) -> ProbeResult:
    """Connect to a task and check whether a TensorFlow server answers."""
    try:
        with connect(address, str(address), deadline=time.monotonic() + within_s) as connection:
            connection.settimeout(within_s)
            connection.sendall(CLIENT_PREFACE)
            header = b""
            while len(header) < FRAME_HEADER_BYTES:
                received = connection.recv(FRAME_HEADER_BYTES - len(header))
                if not received:  # the connection was closed: a server would have sent SETTINGS
                    return ProbeResult.REFUSED
                header += received
            return ProbeResult.SERVES if header[3] == SETTINGS else ProbeResult.SILENT
    except (UnreachableError, LinkTimeoutError):  # a name that is not known yet, or a network that is down
        return ProbeResult.SILENT
    except (LinkClosedError, ConnectionError):
        return ProbeResult.REFUSED
    except OSError:  # it sent nothing in time
        return ProbeResult.SILENT


def wait_for_tasks(
    addresses: Mapping[str, Address],
    bound_s: float,
    make_error: Callable[[str], Exception],
    probe_task: Callable[[Address], ProbeResult] = probe,
) -> None:
    """Wait until the TensorFlow servers of these tasks have answered.

    Args:
        addresses: Addresses of the tasks by name.
        bound_s: Maximum number of seconds to wait.
        make_error: Function that returns the error for a text that names the tasks that did not answer.
        probe_task: Function that probes a task's server.

    Raises: the result of `make_error`.
    """
    until = time.monotonic() + bound_s
    missing = dict(addresses)
    answers: dict[str, ProbeResult] = {}
    while True:
        for task, address in list(missing.items()):
            answers[task] = probe_task(address)
            if answers[task] is ProbeResult.SERVES:
                del missing[task]
        if not missing:
            return
        if time.monotonic() > until:
            silent = [f"{task} at {address} {answers[task].value}" for task, address in missing.items()]
            raise make_error(", ".join(silent))
        time.sleep(POLL_S)


class TrainingEndDetector:
    """Detects when the tasks of a job have finished or are gone. Times are arguments, all from one monotonic clock.

    Args:
        tasks: Names of the tasks of the job.
        start_s: Seconds within which they must appear.
        silent_s: Seconds after which a task that does not answer counts as gone.
        now: The current time.
    """

    GONE_S = 60.0
    """How long tasks must be gone. A killed task may restart, and imports TensorFlow before it serves."""

    def __init__(self, tasks: Iterable[str], start_s: float, silent_s: float, now: float):
        self._tasks = tuple(tasks)
        self._start_s = start_s
        self._silent_s = silent_s
        self._began = now
        self._served: dict[str, float] = {}  # when each task last served
        self._present = dict.fromkeys(self._tasks, now)  # when each task was last not known to be gone

    def is_over(self, answers: Mapping[str, ProbeResult], finished: Set[str], now: float) -> bool:
        """Return whether the job is over.

        Args:
            answers: Answers of the tasks that have not finished.
            finished: Tasks that have reported their end.
            now: The current time.

        Raises: RendezvousError naming the tasks if none has appeared in time.
        """
        for task, answer in answers.items():
            if answer is ProbeResult.SERVES:
                self._served[task] = now
            # A task that never served has been silent since the start.
            hangs = now - self._served.get(task, self._began) > self._silent_s
            if answer is ProbeResult.SERVES or (answer is ProbeResult.SILENT and not hangs):
                self._present[task] = now
        if not (self._served or finished):
            if now - self._began > self._start_s:
                raise RendezvousError(
                    f"None of {', '.join(self._tasks)} has started its TensorFlow server within {self._start_s:g} s "
                    f"({RENDEZVOUS_TIMEOUT}). Are they started, with the same cluster?"
                )
            return False
        return all(now - self._present[task] > self.GONE_S for task in self._tasks if task not in finished)
