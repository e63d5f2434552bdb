"""The job of this process, joined once and shared by all strategies of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import keras

from phalanx.cluster import Node, timeline_relay
from phalanx.cluster.membership import Membership
from phalanx.cluster.node import FixedNode
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.spec import EVALUATOR
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.collectives import connect
from phalanx.collectives.communicator import Communicator
from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.collectives.options import CommunicationOptions
from phalanx.config.job_config import JobConfig
from phalanx.config.plan_request import PlanRequest
from phalanx.devices import gpu_figures
from phalanx.elastic.elastic_communicator import ElasticCommunicator
from phalanx.elastic.elastic_group import ElasticGroup
from phalanx.elastic.elastic_node import ElasticNode, join_node
from phalanx.engines import prepare
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.planning.simulated_node import SimulatedNode, simulate_node
from phalanx.runtime import process_exit, telemetry
from phalanx.strategies import task_replicas
from phalanx.training.program_effects.program_random_state import encode_random_state, restore_random_state
from phalanx.training.replica import Replica
from phalanx.transport.listener import Service


class CurrentJob:
    """The job that this process has joined.

    Attributes:
        resolver: The source of the cluster specification.
        options: The options of the communicator.
        replica: This process as a replica of the job.
    """

    def __init__(
        self,
        node: Node,
        communicator: Communicator,
        resolver: ClusterResolver,
        options: CommunicationOptions,
        config: JobConfig,
    ):
        self._node = node
        self.resolver = resolver
        self.options = options
        self.replica = Replica(communicator, micro_batches=options.micro_batches if options.deterministic else None)
        self._timeout_s = config.rendezvous_timeout_s  # for `connect_devices`
        if isinstance(node, SimulatedNode):
            self.replica.recording = node.recording
        self._before_leaving: list[Callable[[], None]] = []  # called once, last one first
        self._spans_devices = False  # whether the processes run one JAX program

    @property
    def membership(self) -> Membership:
        return self._node.membership

    def connect_devices(self) -> None:
        """Combine the devices of all processes in one JAX program: afterwards, `jax.devices()` lists all of them. All
        ranks must call this when they start; calling it again has no effect.

        Raises: UnsupportedError in an elastic job; else see `connect_processes`.
        """
        if self.replica.elastic is not None:
            raise UnsupportedError(
                "One program over the devices of all processes cannot change its processes while it runs, and the "
                "launcher must know that it starts all of them again after a loss. Write --devices-per-worker N next "
                "to --workers MIN:MAX; N is 1 if each process has one device."
            )
        from phalanx.engines.spmd.jax_processes import connect_processes  # imports JAX, which this job computes with

        processes = connect_processes(self.replica.communicator, self._timeout_s)
        if processes is not None:
            self._spans_devices = True
            self.before_leaving(processes.close)

    @property
    def identity(self) -> TaskIdentity:
        """This process's task and its connections."""
        return self._node.identity

    def register(self, purpose: str, service: Service) -> None:
        """Serve links for a purpose on this task's port. Only for a job of fixed size."""
        assert isinstance(self._node, FixedNode)
        assert self._node.listener is not None, "a world of one has no port"
        self._node.listener.register(purpose, service)

    def before_leaving(self, function: Callable[[], None]) -> None:
        """Register a function to call first when this process leaves the job."""
        self._before_leaving.append(function)

    def close(self) -> None:
        """Leave the job. Safe to call twice."""
        while self._before_leaving:
            self._before_leaving.pop()()
        timeline_relay.stop_recording()
        if self._spans_devices and process_exit.has_failed():
            # The others exit as soon as they lose this process, which must have exited by then: JAX aborts a process
            # when rank 0 exits first, and the exit code of its failure is lost.
            return
        self.replica.communicator.close()
        self._node.close(flush=not process_exit.has_failed())


_job: CurrentJob | None = None


def join_job(
    resolver: ClusterResolver,
    options: CommunicationOptions | None,
    cross_device_ops: CrossDeviceOps | None = None,
    *,
    devices: Sequence[str] | None = None,
) -> CurrentJob:
    """Join the job of this process, or return it if a strategy has already joined it.

    Every task of the job must call this; it returns when all have.

    Args:
        resolver: The source of the cluster specification.
        options: The options of the communicator.
        cross_device_ops: Algorithm that merges gradients; None keeps the current one.
        devices: Devices of this task, each of which gets a replica. None: this process is the task's only replica.

    Raises: ConfigurationError if this process has joined another job, or with other options.
    """
    global _job
    options = CommunicationOptions.of(options)
    if _job is None:
        _job = _join(resolver, options, devices)
        process_exit.at_exit(leave_job)
    elif resolver.cluster_spec() != _job.resolver.cluster_spec():
        raise ConfigurationError(
            f"This process is already {_job.membership.local_member.task} of the cluster "
            f"{_job.resolver.cluster_spec()}, but a new strategy needs {resolver.cluster_spec()}. A process belongs to "
            f"one cluster; leave the first one with `phalanx.leave_job()`."
        )
    elif options != _job.options:
        raise ConfigurationError(
            f"The job uses {_job.options}, but a new strategy needs {options}. Use the same options for all strategies "
            f"of a program."
        )
    if cross_device_ops is not None:
        _job.replica.cross_device_ops = cross_device_ops
    return _job


def _leave_tasks(node: Node, communicator: Communicator) -> None:
    """Leave the job of the tasks, which only served to form the job of their replicas."""
    communicator.close()
    node.close(flush=False)


def current_replica() -> Replica | None:
    """The replica of this process; None if it has not joined a job."""
    return None if _job is None else _job.replica


def leave_job() -> None:
    """Leave the job; a strategy created later joins again. Called automatically at program exit."""
    global _job
    if _job is not None:
        job, _job = _job, None
        job.close()


def _join(resolver: ClusterResolver, options: CommunicationOptions, devices: Sequence[str] | None) -> CurrentJob:
    process_exit.install()
    # Before the backend queries devices.
    task_replicas.hide_other_devices(devices or ())
    prepare(deterministic=options.deterministic)
    config = JobConfig.from_environment()
    timeout_s = options.timeout_seconds or config.collectives.stall_shutdown_s or config.timeout_s
    with_timeout = replace(options, timeout_seconds=timeout_s)
    facts = JobFacts(
        keras=keras.__version__,
        backend=keras.backend.backend(),
        seed=config.seed,
        extra={
            "floatx": keras.config.floatx(),
            "micro-batches": str(options.micro_batches) if options.deterministic else "",
        },
    )
    plan = PlanRequest.from_environment()
    cluster = task_replicas.replica_resolver(resolver)
    node = join_node(cluster, facts, config) if plan is None else simulate_node(resolver, facts, config, plan.replicas)
    try:
        if isinstance(node, SimulatedNode):
            communicator: Communicator = node.connect()
        elif isinstance(node, ElasticNode):
            communicator = ElasticCommunicator(ElasticGroup(node, with_timeout))
        else:
            if config.timeline is not None and node.task.type != EVALUATOR:
                timeline_relay.start_recording(node, config.timeline.path)
            communicator = connect(node.membership, with_timeout, config=config.collectives)
            # The tasks are connected. If any has several devices, all replicas now form a job with other ranks. The job
            # of the tasks stays open until the end, for evaluators that query its ports.
            if devices is not None and task_replicas.start_task_replicas(node, communicator, devices):
                timeline_relay.stop_recording()
                job = _join(resolver, options, None)
                job.before_leaving(partial(_leave_tasks, node, communicator))
                return job
        job = CurrentJob(node, communicator, resolver, options, config)
        # Unseeded programs split and shuffle identically on all ranks.
        restore_random_state(job.replica.run_recorded(lambda: communicator.broadcast_bytes(encode_random_state())))
    except BaseException:
        timeline_relay.stop_recording()
        node.close(flush=isinstance(node, FixedNode))
        raise
    telemetry.current.read_gpu = gpu_figures.read
    telemetry.start_publishing(lambda: communicator.statistics)
    job.before_leaving(telemetry.stop_publishing)
    return job
