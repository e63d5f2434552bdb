"""The job of this process, as Horovod's functions see it: joined by `init`, left by `shutdown`.

The cluster is resolved as for a strategy (TF_CONFIG, which `phalanx run` sets; Slurm, MPI, Kubernetes; otherwise this
process is alone), but without Keras: a plain PyTorch program must not import it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from phalanx.arrays import allocation
from phalanx.cluster import Node, timeline_relay
from phalanx.cluster.member_links import GenerationNotFormedError, MemberLinks
from phalanx.cluster.membership import Membership, Rank
from phalanx.cluster.membership_messages import FormGeneration, MemberAddress
from phalanx.cluster.node import FixedNode
from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.cluster.task_comparison import JobFacts
from phalanx.collectives import CommunicationOptions, connect
from phalanx.collectives.autotune.autotune_log import AutotuneLog
from phalanx.collectives.autotune.trial_search import TrialSearch
from phalanx.config.job_config import CollectiveConfig, Encryption, JobConfig
from phalanx.devices import gpu_figures
from phalanx.elastic.elastic_node import ElasticNode, join_node
from phalanx.elastic.generation_loop import LOSSES, Position, form_next_generation, join_generation
from phalanx.errors import ConfigurationError, LinkTimeoutError, PhalanxError
from phalanx.horovod import step_reports
from phalanx.horovod.common.exceptions import HorovodInternalError
from phalanx.horovod.controller import Controller
from phalanx.horovod.execution import OperationBuffers
from phalanx.horovod.fusion_autotune import FusionSettings
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.operation_request import OperationKind, Request
from phalanx.monitoring import timeline
from phalanx.runtime import process_exit, telemetry
from phalanx.runtime.traffic_account import Traffic

ENTRY = 0
"""The single entry in which all members of an elastic job take part after `init` (see `elastic.entry_log`)."""


class HorovodJob:
    """The members of the job, a controller for all of them, and one for each process set that includes this process.

    In an elastic job these are the members of one generation; `regroup` moves to the next one. Implements
    `generation_loop.Participant`.

    Attributes:
        membership: All members of the job.
        controllers: Controllers by number of the process set; 0 is the whole job.
        needs_state: Whether the members have a state that this process has not received yet.
    """

    def __init__(self, node: Node, environment: HorovodEnvironment):
        self._node = node
        self._environment = environment
        self._timeout_s = environment.stall_shutdown_s or node.config.timeout_s
        self.controllers: dict[int, Controller] = {}
        self._memberships: dict[int, Membership] = {}  # of the process sets; the node holds the job's
        self._loss: PhalanxError | None = None  # detected outside of an operation
        self._pid = os.getpid()  # a fork inherits the links, and must not announce on them that it is leaving
        self.needs_state = False
        self.membership = node.membership
        self._has_started = False
        telemetry.current.read_gpu = gpu_figures.read
        telemetry.start_publishing(lambda: self.traffic)
        if isinstance(node, ElasticNode):
            join_generation(node, self, ENTRY)
        else:
            self.start()

    # Elastic jobs.

    @property
    def elastic(self) -> ElasticNode | None:
        """This process's place in an elastic job; None in other jobs."""
        return self._node if isinstance(self._node, ElasticNode) else None

    @property
    def loss(self) -> PhalanxError | None:
        """The error that ended this generation: a member was lost. None while its members can work together."""
        failures = [controller.failure for controller in self.controllers.values()]
        return self._loss or next((failure for failure in failures if isinstance(failure, LOSSES)), None)

    def regroup(self) -> None:
        """Leave this generation of an elastic job, and return when this process belongs to the next one.

        The next generation has only the global process set, and no pending or cached operations.

        Raises: EvictedError, RendezvousError if this process, or the job, cannot continue. SystemExit if fewer
            processes are requested.
        """
        node = self.elastic
        assert node is not None, "only elastic jobs regroup"
        error = self.loss or PhalanxError("the members of the job change")
        self.abandon(error)
        # Between two operations, programs may be far apart: a member that did not answer may still be reachable.
        node.links.pop_unreachable()
        form_next_generation(node, self, error)

    def position(self) -> Position:
        """See `Participant.position`. Members may be at different operations: all return to rank 0's last commit."""
        node = self.elastic
        assert node is not None
        # A process that has never been in a complete generation has the state only in the first one, where all start
        # with the same program.
        return Position(0, True, self.needs_state if self._has_started else node.generation > 1)

    def start(self) -> None:
        """See `Participant.start`."""
        node, config = self._node, self._node.config
        membership = node.membership
        if config.timeline is not None and not self._has_started and not timeline.current.on:
            timeline_relay.start_recording(node, config.timeline.path, marks_cycles=config.timeline.marks_cycles)
        self.controllers = {0: self._make_controller(membership)}
        self.membership, self._has_started = membership, True
        if isinstance(node, ElasticNode):
            self.needs_state = node.addresses[membership.rank].needs_state

    def abandon(self, error: Exception) -> None:
        """See `Participant.abandon`."""
        self._close_all(error=error)

    def _close_all(self, *, error: Exception | None = None, flush: bool = False) -> None:
        # Controllers first: they announce on the links of the memberships that this process is leaving.
        for controller in self.controllers.values():
            controller.close(error=error)
        for membership in self._memberships.values():
            membership.close(flush=flush)
        self.controllers, self._memberships, self._loss = {}, {}, None

    @property
    def traffic(self) -> Traffic:
        """The bytes sent and the time waited by this process, for monitoring. May be read from any thread."""
        # An atomic copy: the program's thread adds and removes process sets.
        statistics = [controller.communicator.statistics for controller in [*self.controllers.values()]]
        sent, on_links = sum(each.bytes_sent for each in statistics), sum(each.bytes_on_links for each in statistics)
        return Traffic(sent, on_links, step_reports.reduction_wait_seconds())

    @property
    def has_secret(self) -> bool:
        """Whether all members have the job's secret. True if this process is alone."""
        return self._node.config.secret is not None or self.membership.world_size == 1

    @property
    def is_protected(self) -> bool:
        """Whether messages between members are protected from changes in transit."""
        encryption, members = self._node.config.encryption, self.membership.members
        return (
            self._node.config.tls is not None
            or encryption is Encryption.ALWAYS
            or (encryption is Encryption.REMOTE and len({member.host for member in members}) == len(members))
            or len(members) == 1
        )

    def add_process_set(self, number: int, ranks: Sequence[Rank]) -> None:
        """Create a process set; all ranks of the job must call this with the same arguments.

        Args:
            number: Number of the process set.
            ranks: Its members, as ranks of the whole job.

        Raises: HorovodInternalError if the ranks' arguments differ, or a member is lost meanwhile.
        """
        purpose = f"horovod process set {number} of generation {self.membership.generation}"
        members = [MemberAddress.of(self.membership.members[rank]) for rank in ranks]
        order = FormGeneration(self.membership.generation, members)
        links = MemberLinks(self._node.identity, purpose) if self.membership.rank in ranks else None
        listener = self._node.listener
        try:
            if links is not None and listener is not None:
                listener.register(purpose, links)
            # After this barrier, all members accept links for the purpose, so none dials too early.
            self._barrier_with_detail(f"add_process_set.{number}", str(list(ranks)))
            if links is not None:
                links.connect_to_lower_ranks(order)
            # All have dialed before any completes: this detects a lost member.
            self._barrier_with_detail(f"link_process_set.{number}", "")
            if links is not None:
                links.accept_from_higher_ranks(order)
                self._memberships[number] = links.membership
                self.controllers[number] = self._make_controller(
                    links.membership, f"collectives of process set {number}"
                )
        except (GenerationNotFormedError, LinkTimeoutError, *LOSSES) as error:
            self._loss = error
            raise HorovodInternalError.of(error) from error
        finally:
            if links is not None and listener is not None:
                listener.unregister(purpose)
                if number not in self._memberships:  # failed after some links were established
                    links.close()

    def remove_process_set(self, number: int) -> None:
        """Remove a process set; all ranks of the job must call this."""
        # Only after all ranks arrive: closing earlier would fail operations of the set that others wait for.
        self._barrier_with_detail(f"remove_process_set.{number}", "")
        if (controller := self.controllers.pop(number, None)) is not None:
            controller.close()
            self._memberships.pop(number).close()

    def start_timeline(self, path: Path, *, marks_cycles: bool) -> None:
        """Start recording this process; rank 0 replaces the file.

        Args:
            path: Path of the file.
            marks_cycles: Whether to mark the cycles of the controller.

        Raises: as `timeline_relay.start_recording`.
        """
        timeline_relay.start_recording(self._node, path.absolute(), overwrite=True, marks_cycles=marks_cycles)

    def close(self) -> None:
        """Leave the job; safe to call twice. A fork of this process is not a member, so there this does nothing."""
        if os.getpid() != self._pid:
            return
        flush = not process_exit.has_failed()
        timeline_relay.stop_recording()
        telemetry.stop_publishing()
        self._close_all(flush=flush)
        self._node.close(flush=flush)

    def _barrier_with_detail(self, name: str, detail: str) -> None:
        request = Request(name, OperationKind.BARRIER.value, detail=detail)
        controller = self.controllers[0]
        controller.wait(controller.submit(request, OperationBuffers(()), wake=False))

    def _make_controller(self, membership: Membership, track: str = timeline.COLLECTIVES) -> Controller:
        config, whole = self._node.config.collectives, track == timeline.COLLECTIVES
        communicator = connect(
            membership,
            CommunicationOptions(timeout_seconds=self._timeout_s),
            config=CollectiveConfig(
                stall_warning_s=math.inf,  # the controller itself watches for stalls
                autotune=config.autotune,
                autotune_log=config.autotune_log if whole else None,
            ),
            timeline_track=track,
        )
        names = [member.task for member in membership.members]
        on_tuned = self._log_fusion if config.autotune and whole else None
        return Controller(communicator, self._environment, self._timeout_s, names, on_tuned=on_tuned)

    def _log_fusion(self, search: TrialSearch[FusionSettings]) -> None:
        if self.membership.rank == 0:
            AutotuneLog(self._node.config.collectives.autotune_log, append=True).report("fusion, per MiB", search)


_job: HorovodJob | None = None
_lock = threading.Lock()  # protects `_job` while the job is joined or left


def current_job() -> HorovodJob:
    """Return the job of this process.

    Raises: ValueError before `init` (as Horovod's functions do).
    """
    if _job is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _job


def is_joined() -> bool:
    """Whether this process has joined a job."""
    return _job is not None


def join_job() -> HorovodJob:
    """Join the job; return the same job if this process has already joined.

    Raises: as `phalanx.cluster.join`; ConfigurationError if a strategy of this process has joined the job before.
    """
    global _job
    with _lock:
        if _job is None:
            _check_no_strategy_has_joined()
            process_exit.install()
            allocation.keep_freed_memory()
            environment, config = HorovodEnvironment.from_environment(), JobConfig.from_environment()
            node = join_node(resolve(), JobFacts(extra={"interface": "horovod"}), config)
            try:
                _job = HorovodJob(node, environment)
            except BaseException as error:
                timeline_relay.stop_recording()
                # A candidate that is not needed has finished; one that fails is lost to the others.
                node.close(flush=isinstance(node, FixedNode) or isinstance(error, SystemExit))
                raise
            process_exit.at_exit(leave_job)
        return _job


def leave_job() -> None:
    """Leave the job. Also called when the program exits."""
    global _job
    with _lock:
        if _job is not None:
            job, _job = _job, None
            job.close()


def _check_no_strategy_has_joined() -> None:
    """Check that no strategy has joined the job: a process has one port, so it can join only once."""
    strategies = sys.modules.get("phalanx.strategies.current_job")
    if strategies is not None and strategies._job is not None:
        raise ConfigurationError(
            "A strategy of this process has already joined the job. A program uses either a strategy or hvd: leave the "
            "strategy's job first with `phalanx.strategies.leave_job()`, or don't call hvd.init()."
        )
