"""The job of this process, as Horovod's functions see it: joined by `init`, left by `shutdown`.

It is met on the same way as a strategy's job (TF_CONFIG, as `phalanx run` sets it; Slurm, MPI, Kubernetes; else this
process is alone), but knows nothing of Keras: a plain PyTorch program must not import it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from phalanx.arrays import allocation
from phalanx.cluster import Node, join, timeline_relay
from phalanx.cluster.compatibility import JobFacts
from phalanx.cluster.membership import Membership, Rank
from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.cluster.spec import RANKED_TYPES
from phalanx.collectives import CommunicationOptions, connect
from phalanx.collectives.autotune.autotune_log import AutotuneLog
from phalanx.collectives.autotune.trial_search import TrialSearch
from phalanx.config.job_config import CollectiveConfig, JobConfig
from phalanx.elastic.elastic_node import ElasticNode, NotFormedError
from phalanx.elastic.membership_messages import LossReport
from phalanx.errors import (
    CollectiveTimeoutError,
    ConfigurationError,
    LinkClosedError,
    LinkTimeoutError,
    PeerLostError,
    PhalanxError,
)
from phalanx.horovod.controller import Controller
from phalanx.horovod.exceptions import HorovodInternalError
from phalanx.horovod.execution import FusedPart
from phalanx.horovod.fusion_autotune import FusionSettings
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.operation_request import OperationKind, Request
from phalanx.horovod.process_set_links import LinkOffer
from phalanx.monitoring import timeline
from phalanx.runtime import exit_codes
from phalanx.runtime.heartbeat import Heartbeat

_log = logging.getLogger(__name__)


_LOSSES = (PeerLostError, CollectiveTimeoutError, LinkClosedError)
"""What ends a generation of an elastic job, rather than the job."""
ENTRY = 0
"""All members of an elastic job take part in one and the same thing, from `init` on (`cluster.elastic.keeper`)."""


class HorovodJob:
    """The members of the job, and one controller for all of them and for each process set with this process in it.

    In an elastic job the members are those of one generation; `regroup` leads to the next one.

    Attributes:
        membership: all members of the job.
        controllers: by process set; 0 is the whole job.
        fresh: whether the members have a state that this process has not been given yet.
    """

    def __init__(self, node: Node | ElasticNode, knobs: HorovodEnvironment):
        self._node = node
        self._knobs = knobs
        self._timeout_s = knobs.end_s or node.config.timeout_s
        self.controllers: dict[int, Controller] = {}
        self._memberships: dict[int, Membership] = {}
        self._lost: PhalanxError | None = None  # outside of a collective
        self._pid = os.getpid()
        self.fresh = False
        if isinstance(node, ElasticNode):
            self._enter(node)
        else:
            self._begin()

    # Members that come and go.

    @property
    def elastic(self) -> ElasticNode | None:
        """This process's place in a job whose members come and go; None in all others."""
        return self._node if isinstance(self._node, ElasticNode) else None

    @property
    def lost(self) -> PhalanxError | None:
        """The loss that has ended this generation of the members; None while they can work together."""
        failures = [controller.failure for controller in self.controllers.values()]
        return self._lost or next((failure for failure in failures if isinstance(failure, _LOSSES)), None)

    @property
    def everybody_is_fresh(self) -> bool:
        """Whether nobody is left who has the state of the job."""
        node = self.elastic
        return self.fresh and node is not None and all(place.fresh for place in node.places)

    def regroup(self) -> None:
        """Leave this generation of an elastic job; returns when the next one, to which this process belongs, has met.

        No process set but the global one is registered there, nothing is under way, and nothing is remembered.

        Raises: EvictedError, RendezvousError if this process, or the job, cannot go on. SystemExit if fewer processes
            are wanted.
        """
        node = self.elastic
        assert node is not None, "only elastic jobs regroup"
        lost, started = self.lost, timeline.now()
        why = lost or PhalanxError("the members of the job change")
        self._end(because=why)
        self._follow(node, late=str(lost) if isinstance(lost, CollectiveTimeoutError) else "")
        now = self.membership
        args = {"generation": now.generation, "rank": now.rank, "world_size": now.world_size, "why": str(why)}
        timeline.current.complete(timeline.MEMBERSHIP, "membership change", started, args)

    def _enter(self, node: ElasticNode) -> None:
        """Become a member, at the beginning of the job or later."""
        try:
            node.take_part(ENTRY)
            self._begin()
        except (NotFormedError, *_LOSSES):
            self._follow(node)

    def _follow(self, node: ElasticNode, *, late: str = "") -> None:
        """Report until a generation stands. The members need not stand at the same collective: all go back to where the
        first of them has committed."""
        node.missing()  # whom one waited for in a round says nothing of the network: programs may be far apart
        missing: list[str] = []
        linked = True
        while True:
            try:
                node.regroup(LossReport(node.generation, 0, True, self._is_fresh(node), late, missing, linked))
                self._begin()
                return
            except (NotFormedError, *_LOSSES) as error:
                _log.debug("generation %d came to nothing: %s", node.generation, error)
                linked = not isinstance(error, NotFormedError)
                late, missing = "", ([] if linked else node.missing())

    def _is_fresh(self, node: ElasticNode) -> bool:
        """Who was a member of no generation that stood has the state only if it is the first one's."""
        return self.fresh if hasattr(self, "membership") else node.generation > 1

    def _begin(self) -> None:
        node, config = self._node, self._node.config
        membership = node.membership
        if config.timeline is not None and not hasattr(self, "membership") and not timeline.current.on:
            timeline_relay.start_recording(node, config.timeline, marks_cycles=config.timeline_marks_cycles)
        self.controllers = {0: self._controller(membership)}
        self.membership = membership
        if isinstance(node, ElasticNode):
            self.fresh = node.places[membership.rank].fresh

    def _end(self, *, because: Exception | None = None, flush: bool = False) -> None:
        for controller in self.controllers.values():
            controller.close(because=because)
        for membership in self._memberships.values():
            membership.close(flush=flush)
        self.controllers, self._memberships, self._lost = {}, {}, None

    @property
    def has_secret(self) -> bool:
        """Whether only who knows the job's secret can be a member; alone, nobody else is."""
        return self._node.config.secret is not None or self.membership.world_size == 1

    def add(self, number: int, ranks: Sequence[Rank]) -> None:
        """Make a process set; all ranks of the job must call, with the same arguments.

        Raises: HorovodInternalError if the ranks' arguments differ, or one is lost meanwhile.
        """
        included = self.membership.rank in ranks
        purpose = f"horovod process set {number} of generation {self.membership.generation}"
        offer = LinkOffer(self._node, purpose, ranks) if included else None
        try:
            self._agree(f"add_process_set.{number}", str(list(ranks)))
            if offer is not None:
                offer.dial(self._node.config.rendezvous_timeout_s)
            self._agree(f"link_process_set.{number}", "")
            if offer is not None:
                self._memberships[number] = membership = offer.complete()
                self.controllers[number] = self._controller(membership, f"collectives of process set {number}")
        except (LinkTimeoutError, *_LOSSES) as error:
            self._lost = error
            raise HorovodInternalError.of(error) from error
        finally:
            if offer is not None:
                offer.close()

    def remove(self, number: int) -> None:
        """End a process set; all ranks of the job must call."""
        self._agree(f"remove_process_set.{number}", "")
        if (controller := self.controllers.pop(number, None)) is not None:
            controller.close()
            self._memberships.pop(number).close()

    def start_timeline(self, path: Path, *, marks_cycles: bool) -> None:
        """Record this process from now on; on rank 0 that makes the file anew.

        Raises: as `cluster.tracing.begin`.
        """
        timeline_relay.start_recording(self._node, path.absolute(), anew=True, marks_cycles=marks_cycles)

    def close(self) -> None:
        """Leave the job; safe to call twice. A fork of this process was never in it."""
        if os.getpid() != self._pid:
            return
        flush = not exit_codes.has_failed()
        timeline_relay.stop_recording()
        self._end(flush=flush)
        self._node.close(flush=flush)

    def _agree(self, name: str, detail: str) -> None:
        request = Request(name, OperationKind.BARRIER.value, detail=detail)
        controller = self.controllers[0]
        controller.wait(controller.submit(request, FusedPart(()), wake=False))

    def _controller(self, membership: Membership, track: str = timeline.COLLECTIVES) -> Controller:
        config, whole = self._node.config.collectives, track == timeline.COLLECTIVES
        communicator = connect(
            membership,
            CommunicationOptions(timeout_seconds=self._timeout_s),
            config=CollectiveConfig(
                stall_warning_s=math.inf,  # the controller watches for stalls itself
                autotune=config.autotune,
                autotune_log=config.autotune_log if whole else None,
            ),
        )
        communicator.on_track(track)
        names = [member.task for member in membership.members]
        tune = self._tell_of_fusion if config.autotune and whole else None
        return Controller(communicator, self._knobs, self._timeout_s, names, tune=tune)

    def _tell_of_fusion(self, search: TrialSearch[FusionSettings]) -> None:
        if self.membership.rank == 0:
            AutotuneLog(self._node.config.collectives.autotune_log, append=True).report("fusion, per MiB", search)


_world: HorovodJob | None = None
_lock = threading.Lock()  # protects `_world` while it is made or left


def current() -> HorovodJob:
    """The job.

    Raises: ValueError before `init` (as Horovod's functions do).
    """
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def is_joined() -> bool:
    """Whether this process is in a job."""
    return _world is not None


def join_world() -> HorovodJob:
    """Meet the other processes of the job; the same job if it is met already.

    Raises: as `phalanx.cluster.join`; ConfigurationError if a strategy of this process has met the job before.
    """
    global _world
    with _lock:
        if _world is None:
            _refuse_strategies()
            exit_codes.install()
            allocation.keep_freed_memory()
            knobs, config = HorovodEnvironment.from_environment(), JobConfig.from_environment()
            node = _node(config)
            try:
                _world = HorovodJob(node, knobs)
            except BaseException as error:
                timeline_relay.stop_recording()
                if isinstance(node, ElasticNode):
                    node.close(flush=isinstance(error, SystemExit))
                else:
                    node.close()
                raise
            exit_codes.at_exit(leave_world)
        return _world


def leave_world() -> None:
    """Leave the job; called at the end of the program, too."""
    global _world
    with _lock:
        if _world is not None:
            world, _world = _world, None
            world.close()


def _node(config: JobConfig) -> Node | ElasticNode:
    cluster, facts = resolve(), JobFacts(others={"interface": "horovod"})
    task = cluster.task()
    if config.elastic_coordinator is not None and task is not None and task.type in RANKED_TYPES:
        node = ElasticNode(cluster.cluster_spec(), task, facts, config)
        node.pulse = Heartbeat()
        return node
    return join(cluster, facts=facts, config=config)


def _refuse_strategies() -> None:
    """A process has one port, so it can meet its job once."""
    strategies = sys.modules.get("phalanx.strategies.current_job")
    if strategies is not None and strategies._job is not None:
        raise ConfigurationError(
            "A strategy of this process has joined the job already. A program uses either a strategy or hvd: leave the "
            "strategy's job first with `phalanx.strategies.leave_job()`, or do without hvd.init()."
        )
