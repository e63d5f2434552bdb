"""The commands `phalanx status` and `phalanx scale`."""

from __future__ import annotations

import sys
import time

from phalanx.elastic.control_messages import ElasticJobStatus, HostStatus, MemberStatus, ScaleRequest, send_request
from phalanx.errors import ConfigurationError, LinkClosedError, LinkTimeoutError
from phalanx.launcher.job_registry import RegisteredJob, running
from phalanx.monitoring.console import write_whole
from phalanx.monitoring.stragglers import COLLECTIVE

STUCK_S = 5.0
"""A member that stays at the same position for this long while others wait for it is worth a look."""


def status(job: str | None) -> int:
    """Print the running jobs.

    Args:
        job: the id of a job; None for all.

    Returns: the exit code: 0, or 1 if no job is running.
    """
    jobs = [entry for entry in running() if job is None or entry.job == job]
    if not jobs:
        _print("No elastic job is running here." if job is None else f"No elastic job {job} is running here.")
        return 1
    for entry in jobs:
        if not entry.is_here:
            _print(
                f"{entry.job}  {entry.program}  (launcher {entry.pid}): runs on {entry.host}, as far as is known here; "
                "run `phalanx status` there for more"
            )
            continue
        try:
            _print(describe(entry, _send(entry, ScaleRequest()), time.monotonic()))
        except (LinkClosedError, LinkTimeoutError) as error:
            _print(f"{entry.job}  {entry.program}: its launcher (pid {entry.pid}) does not answer: {error}")
    return 0


def scale(job: str | None, workers: int) -> int:
    """Request another number of workers.

    Args:
        job: the id of a job; None for the only one.
        workers: the number of workers.

    Returns: the exit code.

    Raises: ConfigurationError if it is not clear which job is meant, or the number is out of its bounds.
    """
    known_jobs = running()
    jobs = [entry for entry in known_jobs if (entry.is_here if job is None else entry.job == job)]
    if len(jobs) != 1:
        known = ", ".join(entry.job for entry in known_jobs if entry.is_here)
        raise ConfigurationError(
            f"Choose a job with --job; running here: {known}." if known else "No elastic job is running here."
        )
    _send(jobs[0], ScaleRequest(workers))
    _print(f"{jobs[0].job}: {workers} workers are requested; they join or leave before a next step.")
    return 0


def _print(text: str) -> None:
    write_whole(sys.stdout, f"{text}\n")


def _send(entry: RegisteredJob, request: ScaleRequest) -> ElasticJobStatus:
    return send_request(entry.coordinator, entry.secret, entry.job, request, tls=entry.tls_files)


def describe(entry: RegisteredJob, state: ElasticJobStatus, now: float) -> str:
    """The lines that `phalanx status` prints about a job.

    Args:
        entry: the job.
        state: its state.
        now: seconds of the monotonic clock.
    """
    members = [member for member in state.members if member.rank >= 0]
    lines = [
        f"{entry.job}  {entry.program}  (launcher {entry.pid}): {len(members)} of {state.minimum} to {state.maximum} "
        f"workers, generation {state.generation}, {state.activity or f'{state.steps_per_s:.3g} steps/s'}"
    ]
    lines += [_describe_member(member, members) for member in state.members]
    # A single healthy host is not worth a line.
    if len(state.hosts) > 1 or any(host.blacklisted_until is not None for host in state.hosts):
        lines += [_describe_host(host, now) for host in state.hosts]
    return "\n".join(lines)


def _describe_host(host: HostStatus, now: float) -> str:
    line = f"  {host.name:10} {host.taken} of {host.slots} slots taken"
    if host.blacklisted_until is None:
        return line
    return f"{line}; blacklisted, {host.reason}: next attempt in {max(0.0, host.blacklisted_until - now):.0f} s"


def _describe_member(member: MemberStatus, members: list[MemberStatus]) -> str:
    timing, seconds = member.timing, member.step_seconds
    place = f"rank {member.rank}" if member.rank >= 0 else "waits to join"
    where = "" if timing.epoch is None or timing.step is None else f", epoch {timing.epoch}"
    where += "" if timing.step is None else f", step {timing.step}"
    line = f"  {member.task:10} {place:18} pid {member.pid} on {member.host}: {timing.phase}{where}"
    if seconds is not None:
        line += (
            f"; computes for {seconds.compute_s * 1000:.3g} ms and waits for {seconds.wait_s * 1000:.3g} ms per step"
        )
    if member.silent_s > STUCK_S:
        return f"{line}; silent for {member.silent_s:.0f} s: stopped, or its host is overloaded"
    if member.is_slow:
        return f"{line}: slow, the others wait for it"
    waiting = [other for other in members if other is not member and other.timing.phase == COLLECTIVE]
    if timing.age_s > STUCK_S and timing.phase != COLLECTIVE and len(waiting) == len(members) - 1 > 0:
        return f"{line} for {timing.age_s:.0f} s: the others wait for it"
    return line
