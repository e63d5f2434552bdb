"""Asks whether the TensorFlow server of a task answers.

A gRPC server speaks HTTP/2, whose server sends a SETTINGS frame as soon as it has a connection (RFC 9113, section
3.4). So a connection that brings one ends at a server, while one that brings nothing may end at a port that the
launcher has opened for a task that is still starting, or at a process that hangs.
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
"""What a client sends first, with an empty SETTINGS frame."""
FRAME_HEADER_BYTES = 9
SETTINGS = 4
ANSWER_S = 5.0
"""A server on a busy host answers within milliseconds to a second."""
POLL_S = 0.2


class Answer(enum.Enum):
    """What became of a connection to a task."""

    SERVES = "serves"
    """A TensorFlow server answered."""
    REFUSED = "refuses connections"
    """Its host says that no process listens there."""
    SILENT = "does not answer"
    """Nothing came in time: the process hangs or starts, or the host cannot be reached."""


def probe(address: Address, within_s: float = ANSWER_S) -> Answer:
    """Connect to a task and see whether a TensorFlow server answers."""
    try:
        with connect(address, str(address), deadline=time.monotonic() + within_s) as connection:
            connection.settimeout(within_s)
            connection.sendall(CLIENT_PREFACE)
            header = b""
            while len(header) < FRAME_HEADER_BYTES:
                received = connection.recv(FRAME_HEADER_BYTES - len(header))
                if not received:  # it has closed the connection: a server would have sent SETTINGS
                    return Answer.REFUSED
                header += received
            return Answer.SERVES if header[3] == SETTINGS else Answer.SILENT
    except (UnreachableError, LinkTimeoutError):  # a name that is unknown yet, a network that is down
        return Answer.SILENT
    except (LinkClosedError, ConnectionError):
        return Answer.REFUSED
    except OSError:  # it sent nothing in time
        return Answer.SILENT


def wait_for_tasks(
    addresses: Mapping[str, Address],
    bound_s: float,
    error_of: Callable[[str], Exception],
    ask: Callable[[Address], Answer] = probe,
) -> None:
    """Return when the TensorFlow servers of these tasks have answered.

    Args:
        addresses: of the tasks by name.
        bound_s: seconds to wait at most.
        error_of: makes the error of a text that names the tasks that did not answer.
        ask: tells whether a task's server answers.

    Raises: what `error_of` makes.
    """
    until = time.monotonic() + bound_s
    missing = dict(addresses)
    answers: dict[str, Answer] = {}
    while True:
        for task, address in list(missing.items()):
            answers[task] = ask(address)
            if answers[task] is Answer.SERVES:
                del missing[task]
        if not missing:
            return
        if time.monotonic() > until:
            raise error_of(", ".join(f"{task} at {address} {answers[task].value}" for task, address in missing.items()))
        time.sleep(POLL_S)


class JobEnd:
    """Notices when the tasks of a job have finished or are gone. Times are arguments, by one monotonic clock.

    Args:
        tasks: names of the tasks that the job consists of.
        start_s: seconds that they have to appear.
        silent_s: seconds after which a task that does not answer counts as gone.
        now: the present time.
    """

    GONE_S = 60.0
    """A killed task may be started again, and imports TensorFlow before it serves."""

    def __init__(self, tasks: Iterable[str], start_s: float, silent_s: float, now: float):
        self._tasks = tuple(tasks)
        self._start_s = start_s
        self._silent_s = silent_s
        self._began = now
        self._served: dict[str, float] = {}  # when each task has last served
        self._present = dict.fromkeys(self._tasks, now)  # when each task was last not known to be gone

    def is_over(self, answers: Mapping[str, Answer], finished: Set[str], now: float) -> bool:
        """Whether the job is over.

        Args:
            answers: of the tasks that have not finished.
            finished: tasks that have said that they have.
            now: the present time.

        Raises: RendezvousError naming the tasks if none has appeared in time.
        """
        for task, answer in answers.items():
            if answer is Answer.SERVES:
                self._served[task] = now
            # What never served has been silent since the beginning.
            hangs = now - self._served.get(task, self._began) > self._silent_s
            if answer is Answer.SERVES or (answer is Answer.SILENT and not hangs):
                self._present[task] = now
        if not (self._served or finished):
            if now - self._began > self._start_s:
                raise RendezvousError(
                    f"None of {', '.join(self._tasks)} has started its TensorFlow server within {self._start_s:g} s "
                    f"({RENDEZVOUS_TIMEOUT}). Are they started, with the same cluster?"
                )
            return False
        return all(now - self._present[task] > self.GONE_S for task in self._tasks if task not in finished)
