"""The job of this process: joined once, shared by all strategies of the program."""

from __future__ import annotations

import atexit
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import msgspec
import numpy as np

from phalanx.backends import prepare
from phalanx.cluster import Node, join
from phalanx.cluster.agreement import Facts
from phalanx.cluster.membership import Membership
from phalanx.cluster.resolvers.resolver import ClusterResolver
from phalanx.collectives import connect
from phalanx.collectives.communicator import Communicator
from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.collectives.options import CommunicationOptions
from phalanx.errors import ConfigurationError
from phalanx.launcher import exit_codes
from phalanx.settings import Settings
from phalanx.training.replica import Replica


class Job:
    """The members of the job and the communicator between them.

    Attributes:
        resolver: what the cluster was read from.
        options: of the communicator.
        replica: this process's place, as training sees it.
    """

    def __init__(
        self, node: Node, communicator: Communicator, resolver: ClusterResolver, options: CommunicationOptions
    ):
        self._node = node
        self.resolver = resolver
        self.options = options
        self.replica = Replica(communicator)
        self._before_leaving: list[Callable[[], None]] = []

    @property
    def membership(self) -> Membership:
        return self._node.membership

    @property
    def is_evaluator(self) -> bool:
        return self._node.task.type == "evaluator"

    def before_leaving(self, function: Callable[[], None]) -> None:
        """Call `function` first when the job is left."""
        self._before_leaving.append(function)

    def close(self) -> None:
        """Leave the job; safe to call twice."""
        while self._before_leaving:
            self._before_leaving.pop()()
        self.replica.communicator.close()
        self._node.close()


_job: Job | None = None


def join_job(
    resolver: ClusterResolver,
    options: CommunicationOptions | None,
    cross_device_ops: CrossDeviceOps | None = None,
) -> Job:
    """This process's job: met now, or, if a strategy has met it before, the same one.

    Every task of the job must come here; it returns when all have.
    """
    global _job
    options = options or CommunicationOptions()
    if _job is None:
        _job = _join(resolver, options)
        atexit.register(leave_job)
    elif resolver.cluster_spec() != _job.resolver.cluster_spec():
        raise ConfigurationError(
            f"This process is {_job.membership.me.task} of the cluster {_job.resolver.cluster_spec()} already, and "
            f"a new strategy asks for {resolver.cluster_spec()}. A process belongs to one cluster; leave the first "
            f"with `phalanx.leave_job()`."
        )
    elif options != _job.options:
        raise ConfigurationError(
            f"The job communicates with {_job.options}, and a new strategy asks for {options}. Use the same options "
            f"for all strategies of a program."
        )
    if cross_device_ops is not None:
        _job.replica.cross_device_ops = cross_device_ops
    return _job


def leave_job() -> None:
    """Leave the job, so that a strategy made afterwards joins anew. Called by itself at the end of the program."""
    global _job
    if _job is not None:
        job, _job = _job, None
        job.close()


def _join(resolver: ClusterResolver, options: CommunicationOptions) -> Job:
    exit_codes.install()
    prepare()
    settings = Settings.from_environment()
    with_timeout = options if options.timeout_seconds else replace(options, timeout_seconds=settings.timeout_s)
    facts = Facts(
        keras=keras.__version__,
        backend=keras.backend.backend(),
        seed=settings.seed,
        others={"floatx": keras.config.floatx()},
    )
    node = join(resolver, facts=facts, settings=settings)
    try:
        communicator = connect(node.membership, with_timeout)
        _share_random_state(communicator)
    except BaseException:
        node.close()
        raise
    return Job(node, communicator, resolver, options)


def _share_random_state(communicator: Communicator) -> None:
    """Give every rank the chief's state of Python's `random`, from which Keras draws the seeds of initializers, and of
    NumPy's, from which programs make and split data: so these are the same from here on, also where a program sets
    no seed."""
    numpys: Any = np.random.get_state(legacy=True)
    state = (random.getstate(), [part.tolist() if isinstance(part, np.ndarray) else part for part in numpys])
    payload = communicator.broadcast_bytes(msgspec.msgpack.encode(state))
    (version, numbers, gauss), numpys = msgspec.msgpack.decode(payload)
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpys))
