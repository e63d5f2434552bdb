"""The chief's part of a rendezvous: coordinates the tasks until the job starts, and refuses late ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx.cluster import membership_messages as messages
from phalanx.cluster.admission_control import DISAGREEMENT, LEAVING, RUNNING, decode_newcomer, refuse_duplicate
from phalanx.cluster.member_links import GenerationNotFormedError, MemberLinks
from phalanx.cluster.membership import Membership, Rank
from phalanx.cluster.missing_tasks import timeout_error
from phalanx.cluster.rendezvous_state import RendezvousState
from phalanx.cluster.task_comparison import TaskDescription, describe_disagreement
from phalanx.config.task_names import CHIEF_RANK
from phalanx.errors import DisagreementError, LinkClosedError, LinkTimeoutError, PeerLostError
from phalanx.transport.decoding import Decoder, decode_message
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link, wait_until_delivered

SEND_S = 2.0
"""Time limit for sending a few hundred bytes into an empty buffer."""
RETRY_S = 0.5
"""Delay between a generation whose members could not reach each other and the next one."""
DISMISSAL_S = 2.0
"""How long a disagreement is reported to tasks that are just starting."""
NOT_RESPONDING = "is linked, but sends nothing; it may be stopped"

_decoder: Decoder[messages.ToCoordinator] = Decoder(messages.ToCoordinator)


@dataclass(eq=False, slots=True)
class _Task:
    """A task that is present: its description, its link, and its report on its links to the others."""

    description: TaskDescription
    link: Link
    report: messages.LinkReport | None = None


class ChiefRendezvous:
    """See the top of the file. Implements the listener's `Service`."""

    def __init__(self, state: RendezvousState):
        self._identity, self._state = state.identity, state
        self._links = MemberLinks(self._identity)
        self._membership: Membership | None = None
        # Protected by `state.changed`.
        self._tasks: dict[Rank, _Task] = {}
        self._generation = 0
        self._notified_of_failure: set[Rank] = set()  # ranks that were sent the disagreement
        state.listener.register(messages.MESH, self._links)
        state.listener.register(messages.RENDEZVOUS, self)

    def run(self) -> Membership:
        try:
            while True:
                self._wait_until(lambda: not self._state.missing)
                if (membership := self._form_generation()) is not None:
                    break
                self._state.wait_until_over(RETRY_S)
        except BaseException as error:
            self._state.finish()
            self._dismiss(error)
            self._links.close()
            raise
        # After this, `_receive` does not treat the end of a link as a loss: the first collective detects a lost member.
        self._state.finish()
        self._state.listener.unregister(messages.MESH)
        self._send(messages.StartOrder())
        for task in self._tasks.values():
            task.link.finish()  # its receiving thread closes it
        return membership

    def _form_generation(self) -> Membership | None:
        """Make the tasks link to each other; return None if some failed."""
        # The code below uses this copy for the order and the comparison: a task that restarts has another `_Task`.
        with self._state.changed:
            self._generation = generation = self._generation + 1
            tasks = dict(sorted(self._tasks.items()))
        if len(tasks) < len(self._identity.other_ranks):
            return None  # a task was just lost
        descriptions = [self._identity.description, *(task.description for task in tasks.values())]
        members = [messages.MemberAddress.of(description) for description in descriptions]
        order = messages.FormGeneration(generation, members)
        self._send(order)
        failure = ""
        try:
            self._links.connect(order)
        except GenerationNotFormedError as error:
            failure = str(error)
        names = {rank: task.description.location for rank, task in tasks.items()}
        self._state.blocking_reasons = {
            self._identity.description.location: failure,
            **dict.fromkeys(names.values(), NOT_RESPONDING),
        }

        def have_reported() -> bool:
            for rank, task in tasks.items():
                if task.report is not None and task.report.generation == generation:
                    self._state.blocking_reasons[names[rank]] = task.report.failure
            return self._tasks != tasks or NOT_RESPONDING not in self._state.blocking_reasons.values()

        self._wait_until(have_reported)
        with self._state.changed:
            if self._tasks == tasks and not any(self._state.blocking_reasons.values()):
                # After this, `admit` refuses late tasks, and `adopt` refuses those that have just been admitted.
                self._membership = self._links.membership
        return self._membership

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        state = self._state
        with state.changed:
            is_done = state.changed.wait_for(
                lambda: state.failure is not None or condition(), timeout=state.deadline - time.monotonic()
            )
        state.check()
        if not is_done:
            raise timeout_error(state)

    def _send(self, message: messages.FromCoordinator) -> None:
        for task in list(self._tasks.values()):
            # The receiving thread detects a lost task; after the start, the first collective does.
            with contextlib.suppress(LinkClosedError, LinkTimeoutError):
                messages.send(task.link, message, SEND_S)

    def _dismiss(self, error: BaseException) -> None:
        """End the rendezvous for the tasks that are present and, after a disagreement, for those that are starting."""
        if isinstance(error, PeerLostError):
            self._send(messages.Dismissed(str(error), "lost", error.task))
        elif isinstance(error, DisagreementError):
            self._send(messages.Dismissed(str(error), DISAGREEMENT))
            with self._state.changed:
                self._state.changed.wait_for(
                    lambda: len(self._notified_of_failure | self._tasks.keys()) == len(self._identity.other_ranks),
                    timeout=DISMISSAL_S,
                )
        _close(task.link for task in self._tasks.values())

    # See `transport.listener.Service`.

    def admit(self, hello: Hello) -> Welcome:
        newcomer = decode_newcomer(hello, str(self._identity.task))
        if isinstance(newcomer, Welcome):
            return newcomer
        rank = self._identity.rank_of(newcomer.task)
        with self._state.changed:
            disagreement = describe_disagreement(self._identity.description, newcomer)
            if disagreement and self._membership is None:
                self._state.fail(DisagreementError(disagreement))
            if isinstance(self._state.failure, DisagreementError):
                disagreement = str(self._state.failure)
            if disagreement or rank is None or rank == CHIEF_RANK:
                self._notified_of_failure.update(() if rank is None else (rank,))
                self._state.changed.notify_all()
                other = f"{newcomer.task} is not a worker of this cluster."
                return Welcome(refusal=DISAGREEMENT, reason=disagreement or other)
            present = self._tasks.get(rank)
            if self._membership is not None and present is not None:
                return _refuse_latecomer(self._membership, rank, present.description, newcomer)
            is_other = present is not None and present.description.incarnation != newcomer.incarnation
            if present is not None and is_other and not present.link.peer_closed():
                return refuse_duplicate(newcomer, f": {present.description.location}")
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        description = decode_message(hello.details, TaskDescription)
        rank = self._identity.rank_of(description.task)
        assert rank is not None, "checked by `admit`"
        with self._state.changed:
            former = self._tasks.get(rank)
            is_late = self._membership is not None or self._state.is_over
            if not is_late:
                self._tasks[rank] = task = _Task(description, link)
                self._state.mark_present(rank)
        if is_late:
            link.close()  # it would receive no order; the task dials again, and is refused
            return
        if former is not None:
            former.link.close()
        name = f"phalanx-rendezvous-{description.task}"
        threading.Thread(target=self._receive, args=(rank, task), name=name, daemon=True).start()

    def _receive(self, rank: Rank, task: _Task) -> None:
        for message in messages.receive(task.link, _decoder):
            if isinstance(message, messages.LinkReport):
                with self._state.changed:
                    task.report = message
                    self._state.changed.notify_all()
        task.link.close()
        with self._state.changed:
            is_lost, generation = self._tasks.get(rank) is task and not self._state.is_over, self._generation
            if is_lost:
                del self._tasks[rank]
                # Under the same lock: later, its successor may have arrived, which is not missing.
                self._state.mark_missing(rank, "was present before, but its process exited or its connection broke")
        if is_lost:  # the chief may be waiting for a link of this task
            self._links.generation_ended(generation)


def _close(links: Iterable[Link]) -> None:
    links = list(links)
    wait_until_delivered(links, SEND_S)
    for link in links:
        link.close()


def _refuse_latecomer(
    membership: Membership, rank: Rank, present: TaskDescription, newcomer: TaskDescription
) -> Welcome:
    process = f"This process, pid {newcomer.pid} on {newcomer.host},"
    if not membership.links[rank].peer_closed():
        reason = (
            f"the job has begun, with {present.location} as rank {rank}. {process} has the same task: give it "
            f"another task.index in TF_CONFIG, or stop it."
        )
    elif (present.pid, present.host) == (newcomer.pid, newcomer.host):
        task = membership.local_member.task
        return Welcome(refusal=LEAVING, reason=f"{task} has not left the previous job yet")
    else:
        reason = (
            f"the job has begun, and lost {newcomer.task} (rank {rank}). {process} arrived too late to replace it. "
            f"Restart the whole job."
        )
    return Welcome(refusal=RUNNING, reason=reason)
