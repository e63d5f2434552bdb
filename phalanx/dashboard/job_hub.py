"""Follows the running jobs of this user for the dashboard. Starts no thread.

`update` queries launchers and can take a while, so callers run it in threads: periodically for the page, and for each
request from Prometheus. Meanwhile, the event loop reads `jobs`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from phalanx.errors import LinkClosedError
from phalanx.launcher.watching.job_connection import ControlAnswer, ControlRequest, send_request
from phalanx.launcher.watching.job_follower import JobFollower
from phalanx.launcher.watching.job_registry import RegisteredJob, running
from phalanx.monitoring.job_view import JobView

MAX_ENDED = 20
"""Number of ended jobs that stay visible."""


@dataclass(frozen=True)
class FollowedJob:
    """A job and its follower."""

    entry: RegisteredJob
    follower: JobFollower

    @property
    def view(self) -> JobView:
        return self.follower.view


class JobHub:
    """All jobs, or one of them.

    Args:
        only: ID of the one job to follow; None for all jobs.

    Attributes:
        only: The argument.
        jobs: Jobs by ID, newest last. `update` replaces the dictionary and never modifies it, so that other threads
            can iterate over it.
    """

    def __init__(self, only: str | None = None):
        self.only = only
        self._updating = threading.Lock()  # two threads would make a follower read the same events twice
        self.jobs: dict[str, FollowedJob] = {}

    def update(self) -> None:
        """Find new jobs and update the known ones. May be called from any thread."""
        with self._updating:
            jobs = dict(self.jobs)
            for entry in running():
                if entry.is_local and entry.job not in jobs and self.only in (None, entry.job):
                    jobs[entry.job] = FollowedJob(entry, JobFollower(entry.socket_path))
            for job in jobs.values():
                job.follower.update()
            ended = [name for name, job in jobs.items() if job.follower.is_gone]
            for name in ended[: max(0, len(ended) - MAX_ENDED)]:
                del jobs[name]
            self.jobs = jobs

    def find(self, name: str) -> FollowedJob | None:
        """Return the job with this ID. If the ID is empty: the newest running job, or else the newest job."""
        if name:
            return self.jobs.get(name)
        live = [job for job in self.jobs.values() if not job.follower.is_gone]
        return next(reversed(live or list(self.jobs.values())), None)

    def listing(self) -> list[dict[str, str]]:
        """Return the list of jobs that the page offers."""
        return [{"job": name, "program": job.entry.program} for name, job in self.jobs.items()]


def ask(job: FollowedJob, request: ControlRequest) -> ControlAnswer:
    """Send a request to the job's launcher.

    Raises: ConfigurationError or LinkClosedError; see `send_request`.
    """
    if job.follower.is_gone:
        raise LinkClosedError("The job has ended.")
    return send_request(job.entry.socket_path, request)
