"""Finds and describes the jobs of this user, for `phalanx status`, `scale` and `top`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import msgspec

from phalanx.config.task_names import count_workers
from phalanx.errors import ConfigurationError, LinkClosedError
from phalanx.launcher.watching.job_connection import ControlRequest, send_request
from phalanx.launcher.watching.job_registry import RegisteredJob, running
from phalanx.monitoring.console import without_escapes, write_whole
from phalanx.monitoring.job_view import JobView, MemberView
from phalanx.monitoring.job_wording import doing, place, progress

WATCH_S = 1.0


@dataclass(frozen=True)
class JobListing:
    """A registered job and its view, or the problem that prevents its launcher from answering here."""

    entry: RegisteredJob
    view: JobView | None
    problem: str = ""


def list_jobs(job: str | None = None) -> list[JobListing]:
    """List the running jobs of this user.

    Args:
        job: Id of a job; None for all.
    """
    return [_listing(entry) for entry in running() if job is None or entry.job == job]


def _listing(entry: RegisteredJob) -> JobListing:
    if not entry.is_local:
        return JobListing(entry, None, f"runs on {entry.host}; run `phalanx status` there for more")
    try:
        return JobListing(entry, send_request(entry.socket_path, ControlRequest()).view)
    except LinkClosedError as error:
        return JobListing(entry, None, f"its launcher (pid {entry.pid}) does not answer: {error}")


def choose_job(job: str | None) -> RegisteredJob:
    """Return the job with this id or, without an id, the only job.

    Raises: ConfigurationError if there is no such job, or several.
    """
    known_jobs = running()
    jobs = [entry for entry in known_jobs if (entry.is_local if job is None else entry.job == job)]
    if len(jobs) == 1 and jobs[0].is_local:
        return jobs[0]
    if len(jobs) == 1:
        raise ConfigurationError(f"Job {job} runs on {jobs[0].host}. Run this command there.")
    known = ", ".join(entry.job for entry in known_jobs if entry.is_local)
    if job is not None:
        raise ConfigurationError(f"No job {job} is running here; running: {known or 'none'}.")
    raise ConfigurationError(f"Choose a job with --job; running here: {known}." if known else NO_JOB)


NO_JOB = "No job is running here."


def status(job: str | None, *, as_json: bool = False, watch: bool = False) -> int:
    """Print the running jobs.

    Args:
        job: Id of a job; None for all.
        as_json: Whether to print JSON, for programs: one line per update.
        watch: Whether to print an update every second as long as there is a job.

    Returns: the exit code: 0, or 1 if no job is running.
    """
    while True:
        jobs = list_jobs(job)
        if as_json:
            _print(msgspec.json.encode([_as_json(each) for each in jobs]).decode())
        elif not jobs:
            _print(NO_JOB if job is None else f"No job {job} is running here.")
        else:
            for each in jobs:
                _print(describe(each, time.time()))
        if not jobs or not watch:
            return 0 if jobs else 1
        time.sleep(WATCH_S)


def scale(job: str | None, workers: int) -> int:
    """Request a new number of workers and return the exit code.

    Raises: ConfigurationError as `choose_job`, or if the number is out of the job's bounds.
    """
    entry = choose_job(job)
    answer = send_request(entry.socket_path, ControlRequest("scale", workers=workers))
    _print(f"{entry.job}: {answer.text}.")
    return 0


def _print(text: str) -> None:
    write_whole(sys.stdout, f"{without_escapes(text)}\n")  # names of programs and hosts may contain escapes


def _as_json(listing: JobListing) -> dict[str, object]:
    entry, view = listing.entry, listing.view
    found: dict[str, object] = {"job": entry.job, "host": entry.host, "pid": entry.pid, "program": entry.program}
    return {**found, "problem": listing.problem} if view is None else {**found, "view": view}


def describe(listing: JobListing, now: float) -> str:
    """The lines that `phalanx status` prints about a job.

    Args:
        listing: The job.
        now: Current time, in seconds since 1970.
    """
    entry, view = listing.entry, listing.view
    head = f"{entry.job}  {entry.program}  (launcher {entry.pid})"
    if view is None:
        return f"{head}: {listing.problem}"
    lines = [f"{head}: {summary(view)}"]
    lines += [_describe_member(member, now) for member in view.members.values() if member.starts]
    # A single healthy host is not listed.
    if len(view.hosts) > 1 or any(host.blacklisted_until is not None for host in view.hosts):
        for host in view.hosts:
            line = f"  {host.name:10} {host.taken} of {host.slots} slots taken"
            if host.blacklisted_until is not None:
                line += f"; blacklisted, {host.reason}: next attempt in {max(0.0, host.blacklisted_until - now):.0f} s"
            lines.append(f"{line}; drained" if host.is_drained else line)
    return "\n".join(lines)


def summary(view: JobView) -> str:
    """One-line summary of a job."""
    started, workers = view.started, [member for member in view.workers if member.is_member]
    count = count_workers(len(workers))
    if started is not None and started.minimum != started.maximum:
        count = f"{len(workers)} of {started.minimum} to {started.maximum} workers, generation {view.generation}"
    parts = [count, place(view.epoch, None, view.total_epochs), progress(view)]
    parts += [f"{view.samples_per_s:.4g} samples/s"] if view.samples_per_s else []
    parts += [f"{name} {show_number(value)}" for name, value in list(view.logs.items())[:4]]
    return ", ".join(filter(None, parts))


def show_number(value: float | None) -> str:
    """Format a metric; None stands for a value that is not finite."""
    return "NaN" if value is None else f"{value:.4g}"


def _describe_member(member: MemberView, now: float) -> str:
    line = f"  {member.task:10} pid {member.pid} on {member.host}: {doing(member, now)}"
    if member.is_running and member.compute_s is not None and member.wait_s is not None:
        line += f"; computes for {member.compute_s * 1000:.3g} ms and waits for {member.wait_s * 1000:.3g} ms per step"
    if member.server is not None:
        line += f"; version {member.server.version}, {member.updates_per_s:.3g} updates/s"
    return line
