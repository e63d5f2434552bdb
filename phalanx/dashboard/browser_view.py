"""The data that the page receives about a job. Pure: views in, values for JSON out."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from phalanx.monitoring.job_endings import RUNNING, STOPPED, describe_ending
from phalanx.monitoring.job_events import HostStatus
from phalanx.monitoring.job_view import ACTIONS, NO_RATES, UNREPORTED_S, JobView, MemberView, why_not
from phalanx.monitoring.job_wording import doing, position

READ_ONLY = (
    "This dashboard is read-only; start it with `phalanx dashboard --control` or `phalanx run --dashboard-control`."
)
"""Explains why the buttons of a dashboard without control are disabled."""
FEED_ITEMS = 200
_UNTIL_IT_STARTS = {"job": "", "program": "", "kind": "", "version": "", "log_dir": "", "minimum": 0, "maximum": 0}
_COUNTS = ("epoch", "step", "steps", "samples", "bytes_sent", "generation", "restarts")


def message(
    view: JobView, before: JobView | None = None, *, live: bool = True, control: bool = False, problem: str = ""
) -> dict[str, Any]:
    """The data that the page needs to draw a job, limited to what has changed.

    Args:
        view: Current view of the job.
        before: View that the page has; None if it has none.
        live: Whether the page is a dashboard; False for a report.
        control: Whether this dashboard may control jobs.
        problem: Why the view is out of date; empty if it is current.
    """
    found: dict[str, Any] = {"head": head(view, live=live and not problem, control=control) | {"problem": problem}}
    # Thinning or a restart changes points that the page already has: send the whole history.
    if before is not None and before.thinned == view.thinned and before.began_at == view.began_at:
        if len(view.history) > len(before.history):
            found |= {"points": _points(view, len(before.history)), "more": True}
    else:
        found["points"] = _points(view, 0)
    for name, part in (
        ("epochs", [[each.at, each.step, each.epoch, each.logs] for each in view.epochs]),
        ("spans", [[each.task, each.start, each.end, each.level, each.how] for each in view.spans]),
        ("generations", [[each.at, each.number, len(each.tasks)] for each in view.generations]),
        ("checkpoints", [[each.at, each.step, each.path] for each in view.checkpoints]),
        ("feed", [[each.at, each.level, each.text] for each in view.feed[-FEED_ITEMS:]]),
    ):
        if before is None or getattr(before, name) != getattr(view, name):
            found[name] = part
    return found


def head(view: JobView, *, live: bool = True, control: bool = False) -> dict[str, Any]:
    """Everything except the data that grows over time."""
    started, end = view.started, view.end
    now = view.ended_at or view.now
    return {
        **{name: getattr(started, name, unknown) for name, unknown in _UNTIL_IT_STARTS.items()},
        "wanted": view.wanted,
        "status": view.status,
        "ending": "" if end is None else describe_ending(end),
        "cause": "" if end is None else end.task,
        # Files of earlier versions have a page for stopped jobs, too.
        "page": "" if end is None or view.status == STOPPED else end.page,
        "folded": "" if end is None or view.status == STOPPED else end.folded,
        "place": position(view),
        "began": view.began_at,
        "ended": view.ended_at,
        "now": now,
        **{name: getattr(view, name) for name in (*_COUNTS, *NO_RATES)},
        "logs": view.logs,
        "workers": len([member for member in view.workers if member.is_member]),
        "members": [_member(view, member, now) for member in view.members.values()],
        "hosts": _hosts(view, now),
        "live": live and view.status == RUNNING,
        "control": control,
        "actions": {action: why_not(view, action) or ("" if control else READ_ONLY) for action in ACTIONS},
    }


def _points(view: JobView, first: int) -> list[list[Any]]:
    return [
        [round(each.at, 3), each.step, each.samples_per_s, each.steps_per_s, each.bytes_per_s, each.logs]
        for each in view.history[first:]
    ]


def _member(view: JobView, member: MemberView, now: float) -> dict[str, Any]:
    lived_s = sum(
        (now if span.end is None else span.end) - span.start for span in view.spans if span.task == member.task
    )
    names = (
        "task",
        "rank",
        "host",
        "pid",
        "starts",
        "memory",
        "wait_fraction",
        "is_running",
        "is_slow",
        "is_preparing",
    )
    rates = ("steps_per_s", "samples_per_s", "bytes_per_s", "updates_per_s", "compute_s", "wait_s")
    computed_s = max(0.0, member.computed_s - member.prepared_s)
    return {
        **{name: getattr(member, name) for name in (*names, *rates)},
        "state": state_of(member, now),
        "does": doing(member, now),
        "reported": member.reported_at > 0,
        "computed_s": computed_s,
        "waited_s": member.waited_s,
        "lived_s": max(lived_s, computed_s + member.waited_s),
        "rest_s": max(0.0, lived_s - computed_s - member.waited_s),
        "version": None if member.server is None else member.server.version,
        "gpu": None if member.gpu is None else to_builtins(member.gpu),
    }


def state_of(member: MemberView, now: float) -> str:
    """State of a member in one word, which selects its color."""
    if not member.is_running:
        return "failed" if member.has_failed else "exited"
    if not member.phase:
        return "starting"
    if member.reported_at and now - member.reported_at > UNREPORTED_S:
        return "silent"
    if member.is_preparing and member.is_member:
        return "starting"
    return "waiting" if not member.is_member else "slow" if member.is_slow else "running"


def _hosts(view: JobView, now: float) -> list[dict[str, Any]]:
    """Hosts of an elastic job, or the hosts of the tasks of a fixed one, with the number of tasks that each has had."""
    on_host: dict[str, list[bool]] = {}
    for member in view.members.values():
        if member.host:
            on_host.setdefault(member.host, []).append(member.is_running)
    hosts = view.hosts or [HostStatus(name, len(runs), sum(runs)) for name, runs in on_host.items()]
    return [
        {
            **to_builtins(host),
            "blacklisted_s": None if host.blacklisted_until is None else max(0.0, host.blacklisted_until - now),
            "tasks": len(on_host.get(host.name, ())),
        }
        for host in hosts
    ]
