"""Follows the view of a job from another process: live from its launcher, or from the events in its log directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.errors import ConfigurationError, FrameError, LinkClosedError
from phalanx.launcher.watching.job_connection import ANSWER_S, ControlAnswer, ControlRequest, send_request
from phalanx.monitoring.job_endings import RUNNING
from phalanx.monitoring.job_events import EVENTS_FILE, JobEvent
from phalanx.monitoring.job_view import JobView, advance, replay
from phalanx.transport.decoding import Decoder

SILENT_ANSWER_S = 1.0
"""Timeout after a request without an answer, shorter because a follower of several jobs waits for each in turn."""

_decoder: Decoder[JobEvent] = Decoder(JobEvent, json=True)


class JobFollower:
    """Fetches the latest changes with each `update`.

    Args:
        path: Path of the launcher's socket.

    Attributes:
        view: The last known view of the job.
        is_gone: Whether the job has ended, or its launcher no longer exists.
        is_silent: Whether the launcher exists but does not answer; it may be stopped, or its host overloaded.
    """

    def __init__(self, path: Path):
        self._path = path
        self._number = -1
        self.view = JobView()
        self.is_gone = self.is_silent = False

    @property
    def problem(self) -> str:
        """Reason that the view of a running job is outdated; empty if it is current. Thread-safe."""
        text = "launcher gone" if self.is_gone else "launcher does not answer" if self.is_silent else ""
        return text if self.view.status == RUNNING else ""  # in this order: the last view is set before `is_gone`

    def update(self) -> list[JobEvent]:
        """Update the view; return the events since the last update, if they were received individually."""
        if self.is_gone:
            return []
        try:
            answer = self._ask(self._number)
            try:
                events = [_decoder.decode(line) for line in answer.events]
            except FrameError:
                # A launcher of another version sent unknown events: fetch its view, which includes them.
                answer, events = self._ask(-1), []
        except LinkClosedError as error:
            # BlockingIOError: too many requests already wait at the socket.
            self.is_silent = isinstance(error.__cause__, TimeoutError | BlockingIOError)
            self.is_gone = not self.is_silent
            return []
        self.is_silent = False
        self._number = answer.number
        if answer.view is not None:
            self.view = answer.view
            self.is_gone = self.view.status != RUNNING
            return []
        for event in events:
            self.view = advance(self.view, event)
        self.is_gone = self.view.status != RUNNING
        return events

    def _ask(self, after: int) -> ControlAnswer:
        timeout_s = SILENT_ANSWER_S if self.is_silent else ANSWER_S
        return send_request(self._path, ControlRequest(after=after), timeout_s=timeout_s)


def read_events(log_dir: Path) -> Iterator[JobEvent]:
    """Yield the events of a job that was run with this log directory.

    Raises: ConfigurationError if there are none.
    """
    path = log_dir / EVENTS_FILE
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # otherwise it is being written, or the disk was full
                    yield _decoder.decode(line)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}. Name the directory that the job was given as --log-dir."
        ) from error
    except FrameError as error:
        raise ConfigurationError(f"{path} was not written by this version of Phalanx: {error}.") from error


def read_view(log_dir: Path) -> JobView:
    """The last view of a job that was run with this log directory. Raises: see `read_events`."""
    return replay(read_events(log_dir))
