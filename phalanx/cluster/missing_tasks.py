"""Reports which tasks are missing in a rendezvous, and why."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from phalanx.cluster.admission import PROBE
from phalanx.cluster.membership import Rank
from phalanx.cluster.peer_dialing import CHIEF_RANK, PROBE_TIMEOUT_S, identify_task
from phalanx.cluster.peer_registry import PeerRegistry
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.environment_variables import RENDEZVOUS_TIMEOUT
from phalanx.errors import ConfigurationError, PeerLostError, PhalanxError, RendezvousError
from phalanx.transport.listener import Listener

logger = logging.getLogger(__name__)

NOTICE_AFTER_S = 2.0
"""When a task logs which tasks are missing. Tasks that start together import packages for a few seconds."""
ENDED_POLL_S = 1.0
ENDED_AFTER_S = 4.0
"""How long nothing must listen at a task's port before the task counts as exited: a program may restart itself."""


def log_missing_tasks(me: TaskIdentity, registry: PeerRegistry, listener: Listener, timeout_s: float) -> None:
    """Log once which tasks are missing, after `NOTICE_AFTER_S`. The body of a thread."""
    if registry.wait_until_over(NOTICE_AFTER_S):
        return
    find_causes(me, registry)
    lines = describe_missing(me, registry)
    if not lines or registry.wait_until_over(0):
        return
    logger.warning(
        "%s waits up to %.0f s for:\n%s%s",
        me.task,
        timeout_s,
        "\n".join(f"  {line}" for line in lines),
        _refused(listener),
    )


def watch_for_exited_tasks(me: TaskIdentity, registry: PeerRegistry) -> None:
    """End the rendezvous if a missing task has exited. The body of a thread.

    Works only under a launcher, which opens all ports before it starts any task: a port without a listener then means
    that its task has exited. (The launcher ends the job if a task fails; this detects tasks that exit with success.)
    """
    if me.config.listen_fd is None:
        return
    refused_since: dict[Rank, float] = {}
    while not registry.wait_until_over(ENDED_POLL_S):
        now = time.monotonic()
        for rank in me.other_ranks:
            if rank in registry.peers or not _is_refused(me, rank):
                refused_since.pop(rank, None)
            elif now - refused_since.setdefault(rank, now) >= ENDED_AFTER_S:
                task = me.tasks[rank]
                registry.fail(
                    PeerLostError(
                        f"{task} (rank {rank}) has ended before the job began, and {me.task} waited for it: "
                        f"nothing listens at its port {me.spec.address(task)} any longer. Every task must create the "
                        f"strategy.",
                        rank=rank,
                        task=str(task),
                        host=me.spec.address(task).host,
                    )
                )


def _is_refused(me: TaskIdentity, rank: Rank) -> bool:
    try:
        link, _ = me.dial(me.tasks[rank], PROBE, deadline=time.monotonic() + PROBE_TIMEOUT_S)
        link.close()
    except PhalanxError as error:
        return isinstance(error.__cause__, ConnectionRefusedError)
    return False


def timeout_error(me: TaskIdentity, registry: PeerRegistry, listener: Listener, timeout_s: float) -> RendezvousError:
    """The error of a task whose time is up, with everything known about the missing tasks."""
    find_causes(me, registry)
    lines = "\n".join(f"  {line}" for line in describe_missing(me, registry))
    return RendezvousError(
        f"{me.task} (rank {me.rank}, at {me.address}) has waited {timeout_s:g} s for the "
        f"{len(me.other_ranks)} other tasks of the job and cannot train without them. "
        f"Missing:\n{lines}{_refused(listener)}\nCheck that each was started, with the same cluster and "
        f"secret, that the addresses are right, and that no firewall blocks them: `phalanx doctor`, run as "
        f"each of the tasks, tests this. {RENDEZVOUS_TIMEOUT} sets the time to wait in seconds."
    )


def find_causes(me: TaskIdentity, registry: PeerRegistry) -> None:
    """Find out why tasks of higher rank have not connected, and whether another process has this task's address."""
    absent = [rank for rank in me.other_ranks if rank not in registry.peers]

    def look(rank: Rank) -> None:
        found = identify_task(me, me.tasks[rank])
        if rank == me.rank:
            if isinstance(found, TaskDescription) and found.incarnation != me.description.incarnation:
                registry.fail(ConfigurationError(describe_owner(me, found)))
        elif isinstance(found, str):
            registry.set_cause(rank, found)
        elif found.task == str(me.tasks[rank]):
            registry.set_cause(
                rank, f"pid {found.pid} on {found.host} runs, but has not reached {me.task} at {me.address}"
            )
        else:
            registry.set_cause(rank, f"{found.whereabouts} listens there instead")

    # The threads that dial lower ranks record the causes for those.
    ranks = [rank for rank in absent if rank > me.rank]
    run_in_threads(look, [*ranks, me.rank], until=time.monotonic() + PROBE_TIMEOUT_S + 0.5)


def describe_owner(me: TaskIdentity, owner: TaskDescription) -> str:
    """The error for a process whose own address belongs to another process of the job."""
    if owner.task == me.description.task:
        return (
            f"{me.task} runs already: {owner.whereabouts} answers at its address, {me.address}. Two "
            f"processes have the same task: give this one (pid {me.description.pid} on {me.description.host}) "
            f"another task.index in TF_CONFIG, or stop the other one."
        )
    return (
        f"{me.task} cannot have its address, {me.address}: {owner.whereabouts} of this job answers there. "
        f"Either the two processes have different clusters, or two addresses of the cluster are the same place "
        f"(`localhost` and `127.0.0.1`). Give all tasks the same cluster, and each task a distinct address."
    )


def describe_missing(me: TaskIdentity, registry: PeerRegistry) -> list[str]:
    """One line for each missing task with its address and the reason, or what the present tasks wait for."""
    missing = registry.missing()
    if missing:
        return [
            f"{task} at {me.spec.address(task)}: {missing[str(task)] or 'has not connected yet'}"
            for task in me.tasks
            if str(task) in missing
        ]
    if me.rank != CHIEF_RANK:
        return [f"{me.tasks[CHIEF_RANK]}, which is present, but waits for others to reach each other"]
    lines = []
    for peer in registry.peers.values():
        name = peer.description.whereabouts
        if peer.missing is None:
            lines.append(f"{name}: is linked, but sends nothing; it may be stopped")
        lines += [f"{name} to reach {task}: {why or 'not connected'}" for task, why in (peer.missing or {}).items()]
    return lines


def run_in_threads(function: Callable[[Rank], None], ranks: Iterable[Rank], *, until: float) -> None:
    """Call the function for all ranks concurrently; returns when all are done, or at `until` (monotonic)."""
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
