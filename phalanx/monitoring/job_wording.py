"""Describes the activity of a job and its tasks for users. Epochs and steps count from 1 here, as in Keras's progress
bar; everywhere else (events, JSON, Prometheus) they count from 0.
"""

from __future__ import annotations

from phalanx.monitoring.job_view import UNREPORTED_S, JobView, MemberView
from phalanx.monitoring.preparation import FIRST_STEP, describe

_ACTIVITIES = {
    "start of the program": "starting the program",
    "initial values": "receiving initial values",
    "compilation": "compiling",
    "evaluate": "evaluating",
    "predict": "predicting",
}


def place(epoch: int | None, step: int | None, total_epochs: int | None = None) -> str:
    """Position in the training, such as `epoch 3 of 5, step 7`; empty if there is none.

    Args:
        epoch: Epoch, counted from 0; None outside the epochs of `fit`.
        step: Step within the epoch, counted from 0; without an epoch, shown unchanged.
        total_epochs: Number of epochs; None to omit it.
    """
    if epoch is None:
        return "" if step is None else f"step {step}"
    running = f"epoch {epoch + 1}" if total_epochs is None else f"epoch {epoch + 1} of {total_epochs}"
    return running if step is None else f"{running}, step {step + 1}"


def position(view: JobView) -> str:
    """Current or last position of a job in its epochs."""
    if view.epoch is None:
        return ""
    lead = _lead(view)
    is_in_step = lead is not None and lead.step is not None and lead.epoch == view.epoch
    return place(view.epoch, view.step if is_in_step else None, view.total_epochs)


def progress(view: JobView) -> str:
    """Steps per second of a job. While it takes no steps: the number taken so far, and its current activity."""
    lead = _lead(view)
    is_preparing = lead is not None and lead.is_preparing
    # Steps count when they begin, but the very first one takes a while and is not finished yet.
    taken = f"{view.steps:,} step{'s' * (view.steps != 1)}" if view.steps > is_preparing else "no step yet"
    if view.steps_per_s:
        return f"{view.steps_per_s:.3g} steps/s"
    if lead is None or not lead.is_running or not (is_preparing or lead.step is None):
        return taken
    return f"{taken}, {activity(lead)}"


def doing(member: MemberView, now: float) -> str:
    """Current activity of a task."""
    if not member.is_running:
        return member.how or "not started"
    if not member.phase:
        return "starts"
    if member.reported_at and now - member.reported_at > UNREPORTED_S:
        return f"silent for {now - member.reported_at:.0f} s: stopped, or its host is overloaded"
    if not member.is_member:
        return f"waits to join ({member.phase})"
    where = place(member.epoch, member.step)
    slow = ": slow, the others wait for it" if member.is_slow else ""
    return f"{activity(member)}{', ' * bool(where)}{where}{slow}"


def activity(member: MemberView) -> str:
    """Phase of a running task."""
    phase = member.phase
    known = describe(phase) if member.is_preparing or phase != FIRST_STEP else None
    return known or _ACTIVITIES.get(phase, phase)


def _lead(view: JobView) -> MemberView | None:
    """The first running task that trains, preferably one that is not preparing; if none runs, the last to report."""
    known = [member for member in view.members.values() if member.trains and member.phase]
    running = [member for member in known if member.is_running and member.is_member]
    if running:
        return min(running, key=lambda member: member.is_preparing)
    return max(known, key=lambda member: member.reported_at, default=None)
