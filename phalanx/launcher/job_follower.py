"""Follows the view of a job from another process: live from its launcher, or from the events in its log directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.errors import ConfigurationError, FrameError, LinkClosedError
from phalanx.launcher.job_connection import ControlRequest, send_request
from phalanx.monitoring.job_events import EVENTS_FILE, JobEvent
from phalanx.monitoring.job_view import RUNNING, JobView, advance, replay
from phalanx.transport.decoding import Decoder

_decoder: Decoder[JobEvent] = Decoder(JobEvent, json=True)


class JobFollower:
    """Fetches what has changed, with each `update`.

    Args:
        path: the socket of the job's launcher.

    Attributes:
        view: as far as it is known.
        is_gone: whether the launcher no longer answers.
    """

    def __init__(self, path: Path):
        self._path = path
        self._number = -1
        self.view = JobView()
        self.is_gone = False

    def update(self) -> list[JobEvent]:
        """Bring the view up to date; returns the events that did, if they are known one by one."""
        if self.is_gone:
            return []
        try:
            answer = send_request(self._path, ControlRequest(after=self._number))
            try:
                events = [_decoder.decode(line) for line in answer.events]
            except FrameError:
                # A launcher of another version, with events that this one does not know: what they mean is in its view.
                answer, events = send_request(self._path, ControlRequest()), []
        except LinkClosedError:
            # A launcher ends with its job, and a job may end between two looks.
            self.is_gone = True
            return []
        self._number = answer.number
        if answer.view is not None:
            self.view = answer.view
            return []
        for event in events:
            self.view = advance(self.view, event)
        self.is_gone = self.view.status != RUNNING
        return events


def read_events(log_dir: Path) -> Iterator[JobEvent]:
    """The events of a job that was run with this log directory.

    Raises: ConfigurationError if there are none.
    """
    path = log_dir / EVENTS_FILE
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # else it is being written, or the disk was full
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
