"""Determines which tasks are missing in a rendezvous, and why."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from phalanx.cluster.membership import Rank
from phalanx.cluster.peer_identification import PROBE_TIMEOUT_S, identify_task
from phalanx.cluster.rendezvous_state import RendezvousState
from phalanx.cluster.task_comparison import TaskDescription, describe_disagreement
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.environment_variables import RENDEZVOUS_TIMEOUT
from phalanx.config.task_names import CHIEF_RANK
from phalanx.errors import ConfigurationError, DisagreementError, PeerLostError, RendezvousError
from phalanx.transport.listener import Listener

logger = logging.getLogger(__name__)

NOTICE_AFTER_S = 2.0
"""When a task logs the missing tasks. Tasks that start together import packages for a few seconds."""
EXITED_POLL_S = 1.0
EXITED_AFTER_S = 4.0
"""How long a task's port must have no listener before the task counts as exited: a program may restart itself."""


def watch_missing_tasks(state: RendezvousState) -> None:
    """Log the missing tasks once; on the chief, then check whether they have exited. The body of a thread."""
    if state.wait_until_over(NOTICE_AFTER_S):
        return
    lines = describe_missing(state)
    if state.wait_until_over(0):
        return
    if lines:
        text = "\n".join(f"  {line}" for line in lines) + _refused(state.listener)
        logger.warning("%s waits up to %.0f s for:\n%s", state.identity.task, state.timeout_s, text)
    if state.identity.rank == CHIEF_RANK and state.identity.config.listen_fd is not None:
        _watch_for_exited_tasks(state)


def _watch_for_exited_tasks(state: RendezvousState) -> None:
    """End the rendezvous if a missing task has exited.

    Works only under a launcher, which opens all ports before it starts any task: a port without a listener then means
    that its task has exited. (The launcher ends the job if a task fails; this detects tasks that exit successfully.)
    """
    refused_since: dict[Rank, float] = {}
    while not state.wait_until_over(EXITED_POLL_S):
        now = time.monotonic()
        with state.changed:
            missing = list(state.missing)
        for rank in state.identity.other_ranks:
            if rank not in missing or not _is_refused(state.identity, rank):
                refused_since.pop(rank, None)
            elif now - refused_since.setdefault(rank, now) >= EXITED_AFTER_S:
                state.fail(task_exited_error(state.identity, rank))


def _is_refused(identity: TaskIdentity, rank: Rank) -> bool:
    return isinstance(getattr(identify_task(identity, identity.tasks[rank]), "__cause__", None), ConnectionRefusedError)


def task_exited_error(identity: TaskIdentity, rank: Rank) -> PeerLostError:
    """Return the error of a task that has waited for one that has exited."""
    task, address = identity.tasks[rank], identity.spec.address(identity.tasks[rank])
    return PeerLostError(
        f"{task} (rank {rank}) has ended before the job began, and {identity.task} waited for it: nothing listens at "
        f"its port {address} any longer. Every task must create the strategy.",
        rank=rank,
        task=str(task),
        host=address.host,
    )


def timeout_error(state: RendezvousState) -> RendezvousError:
    """Return the error of a task that has timed out, with everything known about the missing tasks."""
    identity = state.identity
    lines = "\n".join(f"  {line}" for line in describe_missing(state))
    return RendezvousError(
        f"{identity.task} (rank {identity.rank}, at {identity.address}) has waited {state.timeout_s:g} s for the "
        f"{len(identity.other_ranks)} other tasks of the job and cannot train without them. "
        f"Missing:\n{lines}{_refused(state.listener)}\nCheck that each was started, with the same cluster and "
        f"secret, that the addresses are right, and that no firewall blocks them: `phalanx doctor`, run as "
        f"each of the tasks, tests this. {RENDEZVOUS_TIMEOUT} sets the time to wait in seconds."
    )


def describe_duplicate_task(identity: TaskIdentity, owner: TaskDescription) -> str:
    """Return the error text for a process whose address belongs to another process of the job."""
    return (
        f"{identity.task} runs already: {owner.location} answers at its address, {identity.address}. Two processes "
        f"have the same task: give this one (pid {identity.description.pid} on {identity.description.host}) another "
        f"task.index in TF_CONFIG, or stop the other one."
    )


def describe_missing(state: RendezvousState) -> list[str]:
    """Return a line with address and reason for each missing task, or lines on what the present tasks wait for."""
    identity = state.identity
    if missing := _find_missing(state):
        return [
            f"{identity.tasks[rank]} at {identity.spec.address(identity.tasks[rank])}: "
            f"{cause or 'has not connected yet'}"
            for rank, cause in sorted(missing.items())
        ]
    if identity.rank != CHIEF_RANK:
        return [f"{identity.tasks[CHIEF_RANK]}, which is present, but waits for others to reach each other"]
    with state.changed:
        return [f"{who}: {why}" for who, why in state.blocking_reasons.items() if why]


def _find_missing(state: RendezvousState) -> dict[Rank, str]:
    """Return the missing tasks, with the reasons. Only the chief knows who is present; other tasks probe all tasks.

    Ends the rendezvous if another process has this task's address, or if a task that cannot reach this one disagrees.
    """
    identity, is_chief = state.identity, state.identity.rank == CHIEF_RANK
    with state.changed:
        found = dict(state.missing)

    def probe(rank: Rank) -> None:
        answer = identify_task(identity, identity.tasks[rank])
        if not isinstance(answer, TaskDescription):
            if rank != identity.rank:
                found[rank] = str(answer)
        elif rank == identity.rank:
            if answer.incarnation != identity.description.incarnation:
                state.fail(ConfigurationError(describe_duplicate_task(identity, answer)))
        elif difference := describe_disagreement(identity.description, answer):
            state.fail(DisagreementError(difference))
        elif is_chief:
            found[rank] = (
                f"pid {answer.pid} on {answer.host} runs, but has not reached {identity.task} at {identity.address}"
            )

    asked = [rank for rank in identity.other_ranks if (rank in found if is_chief else rank != CHIEF_RANK)]
    _run_in_threads(probe, [*asked, identity.rank], until=time.monotonic() + PROBE_TIMEOUT_S + 0.5)
    return dict(found)  # a copy, because a late thread may still add to it


def _run_in_threads(function: Callable[[Rank], None], ranks: Iterable[Rank], *, until: float) -> None:
    """Call the function for all ranks concurrently; return when all are done, or at `until` (monotonic)."""
    threads = [
        threading.Thread(target=function, args=(rank,), name=f"phalanx-probe-{rank}", daemon=True) for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _refused(listener: Listener) -> str:
    refused = listener.refusal_summary()
    return f"\nRefused connections: {refused}" if refused else ""
