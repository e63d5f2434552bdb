"""One server's part in a group of shards: it leads the group, or keeps its replica.

A group is what one server of the cluster is responsible for: its shards of the variables, the optimizer's state for
them, and for the first group the schedule. Its leader has a link to each worker and a thread for each. A worker that
dies is evicted, and may return as another process of the same task; what the old process still sends is refused.
Another process may replace the leader: either the restarted server continues from its snapshot, or the replica on
another server leads. In both cases the workers report their positions to it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.cluster.admission_control import admit_worker, link_name
from phalanx.cluster.spec import Task
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import LinkClosedError, PeerLostError, RendezvousError
from phalanx.monitoring.worker_figures import ServerFigures
from phalanx.parameter_server.server.chief_broadcasts import ChiefBroadcasts
from phalanx.parameter_server.server.group_leadership import GroupLeadership, GroupRole
from phalanx.parameter_server.server.group_recovery import GroupRecovery
from phalanx.parameter_server.server.group_requests import GroupRequests
from phalanx.parameter_server.server.leader_lease import LeaderLease
from phalanx.parameter_server.server.request_handler import RequestHandler
from phalanx.parameter_server.server.schedule_rebuild import ScheduleRebuild
from phalanx.parameter_server.server.service_threads import ServiceThreads
from phalanx.parameter_server.server.snapshots import Snapshots
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server.worker_membership import POLL_S, WorkerMembership
from phalanx.parameter_server.server.worker_table import WorkerTable
from phalanx.parameter_server.server_messages import LeaveJob
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, NOT_LEADING, NOTICE_AFTER_S, Worker
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

RETURN_TIMEOUT_S = 60.0
"""Seconds that the chief may be absent before the job counts as lost, unless PHALANX_RETURN_TIMEOUT is set."""
SNAPSHOT_INTERVAL_S = 10.0
"""Seconds between two snapshots: what a server may lose, weighed against pauses of training for copying values."""
RECONNECT_TIMEOUT_S = 6.0
"""Seconds that a synchronous step waits for workers, without which it would lack their samples. With a replica, workers
disconnect to look for the leader, and return within PREFER_REPLICA_S (`client`) and a few attempts."""


class ShardGroup:
    """Listener service for the workers of one group.

    Args:
        me: This task, with everything that the workers must agree on.
        number: Number of the group, and of the server that is responsible for it.
        other: The other server of the group; None if there is no replica.
        snapshots: Storage of the state for a process that replaces this one if it is killed; None: no snapshots.
        snapshot_interval_s: Seconds between two snapshots.
        clock: Returns the current time in seconds; decides whether workers are late.
    """

    def __init__(
        self,
        me: TaskIdentity,
        number: int,
        *,
        other: Task | None,
        snapshots: Snapshots | None,
        snapshot_interval_s: float,
        clock: Callable[[], float],
    ):
        self._me = me
        self.number = number
        self._other = other
        self._snapshot_interval_s = snapshot_interval_s if snapshots is not None else None
        self._changed = threading.Condition()  # protects the role and the end of the job
        self._link_count = itertools.count()
        self._threads = ServiceThreads()
        self._started = time.monotonic()
        is_own = [task for task in me.spec.tasks if task.type == me.task.type][number] == me.task
        self._has_noticed = not (is_own and number == 0)  # only the head logs which workers are missing
        names = tuple(str(task) for task in me.tasks)
        # Without the chief, no leader can tell whether it still leads.
        reconnect_s, chief_reconnect_s = (0.0, 0.0) if other is None else (RECONNECT_TIMEOUT_S, self._return_timeout_s)
        table = WorkerTable(names, reconnect_s=reconnect_s, chief_reconnect_s=chief_reconnect_s, clock=clock)
        self._members = members = WorkerMembership(names, me.config.rendezvous_timeout_s, table, clock)
        schedule, is_head = StepSchedule(members), number == 0
        rebuild = ScheduleRebuild(schedule)
        self._store = VariableStore(number, schedule, is_head=is_head, is_leading=lambda: self.leadership.is_leading)
        self._recovery = GroupRecovery(
            me, self._store, schedule, rebuild, snapshots, is_head=is_head, replicated_by=other
        )
        parts = (self._store, schedule, self._recovery)
        self.leadership = GroupLeadership(
            me, number, parts, self._changed, self._threads, is_own=is_own, other=other, on_follow=self._forget_workers
        )
        self.lease = LeaderLease(
            names[CHIEF_WORKER], self._store.replica, self._changed, self._threads, lambda: self.leadership.is_leading
        )
        requests = GroupRequests(
            me.config,
            *parts,
            ChiefBroadcasts(members),
            is_head=is_head,
            confirm_update=None if other is None else lambda: self._wait_for_lease(lambda: self.lease.covers_updates),
        )
        self._handler = RequestHandler(me, members, rebuild, requests.handlers(), self._wait_for_lease)

    @property
    def _return_timeout_s(self) -> float:
        return self._me.config.return_timeout_s or RETURN_TIMEOUT_S

    @property
    def figures(self) -> ServerFigures:
        """The figures of this group's leader. May be read from any thread."""
        return ServerFigures(self._store.version, len(self._members.table.links))

    def start(self) -> None:
        """Start the threads for work other than the workers' requests."""
        if self._snapshot_interval_s is not None:
            self._threads.start(
                "snapshots", self._recovery.write_snapshots, self._snapshot_interval_s, self._threads.closing
            )
        self.leadership.start()

    def close(self) -> None:
        """Close all links. Safe to call twice."""
        with self._changed:
            self._threads.closing.set()
            links = self._open_links()
            if self.leadership.leader_link is not None:
                links.append(self.leadership.leader_link)
            self._changed.notify_all()
        for link in links:
            link.close()
        self._threads.join()
        if self.leadership.is_job_over:
            self._recovery.clear()

    def wait(self, seconds: float) -> None:
        """Wait until something changes here, or for this many seconds."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """End a `wait`."""
        with self._changed:
            self._changed.notify_all()

    # How the job ends.

    def is_over(self) -> bool:
        """Whether the workers of this group have finished.

        Raises:
            RendezvousError: the chief did not connect in time.
            PeerLostError: the chief was lost and did not return, or ended with an error.
            SupersededError: another process has replaced this one.
        """
        self._recovery.check()
        with self._changed, self._members.changed:
            now, start_timeout_s = time.monotonic(), self._me.config.rendezvous_timeout_s
            if self.leadership.is_job_over:
                return True
            if self.leadership.role is GroupRole.FOLLOWING:
                self.leadership.check_leader(now, self._started + start_timeout_s, self._return_timeout_s)
                return False
            # The chief first promotes this server, then connects.
            first_contact_until = self.leadership.followed_until + start_timeout_s
            connected = self._members.table.contacts()
            self._notice_absent(now, connected)
            self._check_chief(now, first_contact_until, connected)
            are_more_expected = (
                len(connected) < len(self._members.names) and now < first_contact_until and not self._recovery.took_over
            )
            # An evicted process keeps its link so that it can be refused (`adopt`); the job ends without it.
            only_evicted = all(self._members.table.is_evicted(name) for name, _ in self._members.table.links.values())
            is_over = self._members.has_chief_left and not are_more_expected and only_evicted
            self.leadership.is_job_over = is_over
        # Outside the locks: it takes the store's lock, and may wait for the other server.
        if is_over and self._other is not None:
            self._store.replica.end()  # immediately: each of two servers may wait for the other
        if is_over and self._members.table.chief_failure:
            chief = self._members.names[CHIEF_WORKER]
            raise PeerLostError(
                f"{chief} failed with an error: {self._members.table.chief_failure}",
                rank=CHIEF_WORKER,
                task=chief,
                host="",
            )
        return is_over

    def _notice_absent(self, now: float, connected: set[Worker]) -> None:
        """Log once which workers the head is still waiting for."""
        if self._has_noticed or now <= self._started + NOTICE_AFTER_S:
            return
        self._has_noticed = True
        if absent := [name for number, name in enumerate(self._members.names) if number not in connected]:
            timeout_s = self._me.config.rendezvous_timeout_s
            logger.warning("%s waits, for up to %g s, for %s.", self._me.task, timeout_s, ", ".join(absent))

    def _check_chief(self, now: float, first_contact_until: float, connected: set[Worker]) -> None:
        if CHIEF_WORKER not in connected and now > first_contact_until:
            raise RendezvousError(
                f"{self._members.names[CHIEF_WORKER]} did not connect to {self._me.task} within "
                f"{self._me.config.rendezvous_timeout_s:g} s. Is it started, with the same cluster?"
            )
        if self._members.table.lost_s(CHIEF_WORKER) > self._return_timeout_s and not self._members.table.links:
            raise self._chief_lost()

    def _chief_lost(self) -> PeerLostError:
        return self._members.table.lost_error(
            CHIEF_WORKER, f"training; it did not return within {self._return_timeout_s:g} s"
        )

    # The listener's service.

    def admit(self, hello: Hello) -> Welcome:
        """Decide whether a worker may connect: this server must lead the group."""
        # A refused worker looks for the server that leads now; an admitted one would wait here.
        may_answer = not self.lease.has_lapsed or hello.task == self._members.names[CHIEF_WORKER]
        if not (self.leadership.is_leading and may_answer):
            return Welcome(
                refusal=NOT_LEADING, reason=f"{self._me.task} does not lead group {self.number}, or not yet."
            )
        return admit_worker(self._me, hello, range(len(self._members.names)), self._link_of)

    def _link_of(self, worker: Worker) -> tuple[str, Link] | None:
        name, link = self._members.table.links.get(worker, ("", None))
        # An evicted worker may be replaced.
        return None if link is None or self._members.table.is_evicted(name) else (name, link)

    def adopt(self, hello: Hello, link: Link) -> None:
        """Serve a worker that has connected."""
        worker = self._me.rank_of(hello.task)
        assert worker is not None, "checked when it was admitted"
        name = link_name(hello.incarnation, next(self._link_count))
        # Attached before the previous link is closed, whose end then does not count as a loss of the worker.
        former_name, former = self._members.attach(worker, name, link) or ("", None)
        self.wake()
        # An evicted process is refused when it sends something, so its link stays open.
        if former is not None and not self._members.table.is_evicted(former_name):
            former.close()
        self._threads.start(hello.task, self._serve, worker, name, link)

    # One worker.

    def _serve(self, worker: Worker, name: str, link: Link) -> None:
        self._store.wake()  # not in the listener's thread: the store may be busy

        def on_leave(message: LeaveJob) -> tuple[str, ...]:
            if self._members.table.is_evicted(name):
                return ()  # another process may have replaced it
            self._members.record_leave(worker, message.failure)
            self.wake()
            if worker == CHIEF_WORKER:
                for lost in set(message.excluded).intersection(self._members.names):
                    self._members.evict(self._members.names.index(lost))
            with self._members.changed:
                return self._members.table.evicted_tasks()

        why = ""
        try:
            why = self._handler.serve(worker, name, link, on_leave=on_leave, is_closing=self._threads.closing.is_set)
        finally:
            is_gone = self._members.detach(worker, name, why)
            self.wake()
            if is_gone:
                self._store.wake()

    def _forget_workers(self) -> Sequence[Link]:
        """Forget the workers, because this server no longer leads. Returns the links to close."""
        with self._members.changed:
            self._members.table.forget_departures()
        return self._open_links()

    def _open_links(self) -> list[Link]:
        with self._members.changed:
            return [link for _, link in self._members.table.links.values() if link is not None]

    def _wait_for_lease(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Wait until this server may answer, if there is a replica, which may already lead.

        Args:
            condition: Returns whether a further condition holds.

        Raises:
            LinkClosedError: this server no longer leads, so the worker must look for the one that does.
            PeerLostError: the chief is lost or hangs, and did not return.
        """
        leadership, lease = self.leadership, self.lease
        if self._other is None or (leadership.is_leading and lease.is_valid and condition()):
            return
        config, started_at = self._me.config, time.monotonic()
        limit_s = max(self._return_timeout_s, config.timeout_s)
        with self._changed:
            # A chief that has left no longer promotes another server, so this one may answer without a lease.
            while leadership.is_leading and not (lease.is_valid and condition()) and not self._members.has_chief_left:
                is_away = CHIEF_WORKER not in self._members.table.links
                if time.monotonic() - started_at > (self._return_timeout_s if is_away else limit_s):
                    raise self._chief_lost()
                if self._threads.closing.is_set():
                    raise LinkClosedError(f"{self._me.task} is closing.")
                self._changed.wait(POLL_S)
            is_leading = leadership.is_leading
        if not is_leading:
            raise LinkClosedError(f"{self._me.task} no longer leads the shards of group {self.number}.")
