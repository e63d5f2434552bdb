"""What `phalanx status` and `phalanx scale` do."""

from __future__ import annotations

import sys
import time

from phalanx.elastic.job_control import HostState, JobState, MemberState, ScaleRequest, ask
from phalanx.errors import ConfigurationError, LinkClosedError, LinkTimeoutError
from phalanx.launcher.job_registry import RegisteredJob, running
from phalanx.monitoring.console import write_whole

STUCK_S = 5.0
"""A member that has been where it is for so long, while others wait for it, is worth a look."""


def status(job: str | None) -> int:
    """Print the jobs that run; exit code 0, and 1 if there is none."""
    jobs = [entry for entry in running() if job is None or entry.job == job]
    if not jobs:
        _say("No elastic job runs here." if job is None else f"No elastic job {job} runs here.")
        return 1
    for entry in jobs:
        if not entry.is_here:
            _say(
                f"{entry.job}  {entry.program}  (launcher {entry.pid}): runs on {entry.host}, as far as is known here; "
                "`phalanx status` there shows more"
            )
            continue
        try:
            _say(describe(entry, _ask(entry, ScaleRequest()), time.monotonic()))
        except (LinkClosedError, LinkTimeoutError) as error:
            _say(f"{entry.job}  {entry.program}: its launcher (pid {entry.pid}) does not answer: {error}")
    return 0


def scale(job: str | None, workers: int) -> int:
    """Ask a job for another number of workers.

    Raises: ConfigurationError if it is not clear which, or the number is out of its bounds.
    """
    known_jobs = running()
    jobs = [entry for entry in known_jobs if (entry.is_here if job is None else entry.job == job)]
    if len(jobs) != 1:
        known = ", ".join(entry.job for entry in known_jobs if entry.is_here)
        raise ConfigurationError(
            f"Say which job with --job; those that run here: {known}." if known else "No elastic job runs here."
        )
    _ask(jobs[0], ScaleRequest(workers))
    _say(f"{jobs[0].job}: {workers} workers are wanted now; they come and go before a next step.")
    return 0


def _say(text: str) -> None:
    write_whole(sys.stdout, f"{text}\n")


def _ask(entry: RegisteredJob, wish: ScaleRequest) -> JobState:
    return ask(entry.keeper, entry.secret, entry.job, wish, tls=entry.tls_files)


def describe(entry: RegisteredJob, state: JobState, now: float) -> str:
    """Some lines about a job; `now` is by the monotonic clock."""
    members = [member for member in state.members if member.rank >= 0]
    doing = f"{state.steps_per_s:.3g} steps/s"
    if not state.generation:
        doing = "gathering"
    elif state.regrouping:
        doing = "regrouping"
    head = (
        f"{entry.job}  {entry.program}  (launcher {entry.pid}): {len(members)} of {state.minimum} to {state.maximum} "
        f"workers, generation {state.generation}, {doing}"
    )
    lines = [_line(member, members) for member in state.members]
    # Where there is one host, and all is well with it, nobody wants to know.
    if len(state.hosts) > 1 or any(host.aside_until is not None for host in state.hosts):
        lines += [_host_line(host, now) for host in state.hosts]
    return "\n".join([head, *lines])


def _host_line(host: HostState, now: float) -> str:
    line = f"  {host.name:10} {host.taken} of {host.slots} slots taken"
    if host.aside_until is None:
        return line
    return f"{line}; set aside, {host.reason}: tried again in {max(0.0, host.aside_until - now):.0f} s"


def _line(member: MemberState, members: list[MemberState]) -> str:
    place = f"rank {member.rank}" if member.rank >= 0 else "waits to be let in"
    where = "" if member.epoch is None or member.step is None else f", epoch {member.epoch}"
    where += "" if member.step is None else f", step {member.step}"
    line = f"  {member.task:10} {place:18} pid {member.pid} on {member.host}: {member.phase}{where}"
    if member.compute_s is not None and member.wait_s is not None:
        line += f"; computes {member.compute_s * 1000:.3g} ms and waits {member.wait_s * 1000:.3g} ms a step"
    if member.slow and member.silent_s <= STUCK_S:
        return f"{line}: slow, the others wait for it"
    if member.silent_s > STUCK_S:
        return f"{line}; silent for {member.silent_s:.0f} s: stopped, or its host is overloaded"
    waiting = [other for other in members if other is not member and other.phase == "all_reduce"]
    if member.age_s > STUCK_S and member.phase != "all_reduce" and len(waiting) == len(members) - 1 > 0:
        return f"{line} for {member.age_s:.0f} s: the others wait for it"
    return line
