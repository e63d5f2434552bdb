"""`MirroredStrategy` without a program to rerun: in a notebook, an interactive session, a test, or from stdin.

The other replicas are processes that repeat this process's calls of a model's methods (`replica_server`): each call of
`fit`, `evaluate`, `predict` or `*_on_batch` is first sent to them, then all replicas train as usual. Anything that
interrupts a call ends these processes, so that no partial state remains; the next call starts new ones, with the
weights of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import keras
import msgspec

from phalanx.cluster.admission_control import admit_worker
from phalanx.cluster.membership import Rank
from phalanx.collectives.communicator import Communicator
from phalanx.config.environment import temporary_variables
from phalanx.engines import make_tensors
from phalanx.engines.tensors import Tensors
from phalanx.errors import (
    CollectiveMismatchError,
    ConfigurationError,
    FrameError,
    LinkClosedError,
    LinkTimeoutError,
    PeerLostError,
    PhalanxError,
    UnsupportedError,
)
from phalanx.keras_compat.copies.model_copies import record_construction
from phalanx.launcher.local_replicas import LocalReplicas, start_serving_replicas
from phalanx.monitoring.startup_noise import QUIET
from phalanx.runtime import function_call
from phalanx.runtime.worker_traceback import WorkerTraceback
from phalanx.strategies import replica_calls
from phalanx.strategies.current_job import CurrentJob, leave_job
from phalanx.strategies.replica_calls import (
    PURPOSE,
    SERVER,
    Call,
    Done,
    Failed,
    FailureConfirmed,
    Message,
    PackedCall,
    Ready,
    RecentModels,
)
from phalanx.training import model_dispatch
from phalanx.transport.decoding import Decoder
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

ERROR_WAIT_S = 5.0
"""Seconds to wait for the error of a failed replica, which sends it before its connection closes."""

_MESSAGES = Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode
_LINK_ERRORS = (LinkClosedError, LinkTimeoutError, FrameError)


class InteractiveReplicas:
    """The replicas of an interactive session, as seen by its process, which is rank 0.

    Args:
        devices: One device for each replica.
        join: Function that joins the job described by the environment.
    """

    def __init__(self, devices: Sequence[str], join: Callable[[], CurrentJob]) -> None:
        record_construction()  # of layers created from now on; see `model_copies`
        self.devices = list(devices)
        self._join = join
        self._tensors = make_tensors()
        self._processes: _ReplicaProcesses | None = None  # None between a failure and the next call
        self._is_replaced = False
        processes = self._start()
        self.job = processes.job
        self.replica = processes.job.replica
        self._disable_collectives(processes)
        self.replica.calls, self.replica.has_copies = self, True

    @contextmanager
    def calling(self, model: Any, method: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """See `training.replica.ReplicaCalls`."""
        if self._is_replaced:
            raise ConfigurationError(
                f"{method}() of {model.name!r}: its strategy, with {len(self.devices)} replicas, was replaced by a "
                f"later one. Make the model again in the scope of that one; set_weights(model.get_weights()) keeps the "
                f"weights."
            )
        # Packed first: if something cannot be sent, only this call fails, and the session continues.
        call = replica_calls.pack(model, method, arguments, self.replica.cross_device_ops, self._tensors)
        processes = self._processes or self._restart()
        try:
            if processes.send(model, call, self._tensors):
                model_dispatch.forget_trainer(model)  # its knowledge of the others does not apply to a new copy
        except BaseException:
            if not processes.is_rejected:
                self.stop()  # some replicas may have begun the call
            raise
        # All replicas have received the call, and take part in its collectives.
        self.replica.communicator = processes.communicator
        try:
            yield
            processes.finish()
        except BaseException as error:
            # After an interrupt, the others wait for this process in a collective, until the session closes.
            survives = isinstance(error, Exception) and processes.confirm_common_failure(error)
            cause = processes.cause_of(error)
            if not survives:
                self.stop()
            if cause is not None:
                raise cause from error
            raise
        finally:
            processes.record_built_state(model)
            self._disable_collectives(processes)

    def replace(self) -> None:
        """End these replicas because others replace them. Their models can no longer be called."""
        self.stop()
        self._is_replaced = True

    def stop(self) -> None:
        """End the other replicas. Safe to call twice."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def _start(self) -> _ReplicaProcesses:
        self._processes = processes = _ReplicaProcesses(self.devices, self._join)
        processes.job.before_leaving(self.stop)  # also if the program calls `leave_job`: the next call joins again
        return processes

    def _restart(self) -> _ReplicaProcesses:
        processes = self._start()
        processes.job.replica = self.replica  # the owner of the models
        return processes

    def _disable_collectives(self, processes: _ReplicaProcesses) -> None:
        """Disable collectives between calls, when the other replicas do not take part."""
        self.replica.communicator = cast(Communicator, _IdleCommunicator(processes.communicator))


class _ReplicaProcesses:
    """One set of replica processes, from start to end, and their job, in which this process is rank 0."""

    def __init__(self, devices: Sequence[str], join: Callable[[], CurrentJob]) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of the session's models
        self._next_number = itertools.count()
        self._unbuilt_models: weakref.WeakSet[Any] = weakref.WeakSet()  # models that were not built by their last call
        self._digests: RecentModels[bytes] = RecentModels()  # of the models held by the replicas
        self._errors: dict[Rank, function_call.CallRaised] = {}  # raised by replicas in the current call
        self._local_replicas: LocalReplicas | None = None
        # For the processes, which inherit the variables, and for `join`; the session's program must not see them.
        with temporary_variables():
            try:
                variables = {"KERAS_BACKEND": keras.backend.backend(), "KERAS_FLOATX": keras.config.floatx(), **QUIET}
                self._local_replicas = start_serving_replicas(devices, SERVER, variables)
                self.job = join()
            except BaseException:
                if self._local_replicas is not None:
                    self._local_replicas.kill()
                raise
        self.communicator = self.job.replica.communicator
        self._links = _ReplicaLinks(self.job, len(devices) - 1)
        self.job.register(PURPOSE, self._links)
        self._timeout_s = self.job.identity.config.timeout_s
        atexit.register(self.close)

    def send(self, model: Any, call: PackedCall, tensors: Tensors) -> bool:
        """Start this call on all replicas; returns whether they created the model for it.

        Raises: the error of a replica that could not unpack the call; PeerLostError.
        """
        self._errors = {}
        links = self._links.wait(self._timeout_s, self._check)
        number = self._numbers.setdefault(model, next(self._next_number))
        # Only calls build a copy; the program does not.
        is_new = self._digests.get(number) != call.digest or (model.built and model in self._unbuilt_models)
        header = _encode(Call(call.method, number, is_new, list(call.arguments)))
        packed_model = [replica_calls.pack_model(call.strategy_model, tensors)] if is_new else []
        buffers = [replica_calls.session_state(call), *packed_model, *call.arguments.values()]
        for rank in links:
            self._send(rank, header, buffers)
        # Wait until all have unpacked the call: a replica that fails to would be missing in the first collective.
        for rank in links:
            self._receive(rank, Ready)
        if (problem := self._first_error()) is not None:
            raise problem
        # The replicas have done the same, so both sides drop the same models.
        self._digests.record(number, call.digest)
        return is_new

    @property
    def is_rejected(self) -> bool:
        """Whether no replica could unpack the current call, so that none has begun it."""
        return bool(self._errors) and len(self._errors) == len(self._links.links)

    def record_built_state(self, model: Any) -> None:
        """Record, after a call of a model, whether its copies are built."""
        (self._unbuilt_models.discard if model.built else self._unbuilt_models.add)(model)

    def finish(self) -> None:
        """Wait until all replicas have returned from the call. Raises: the error of a replica; PeerLostError."""
        for rank in self._links.links:
            self._receive(rank, Done)
        if (problem := self._first_error()) is not None:
            raise problem

    def confirm_common_failure(self, error: Exception) -> bool:
        """Return whether all replicas raised an error of this type, so none waits for another; if so, notify them."""
        # After a mismatch, every later collective of this communicator raises the same error.
        if isinstance(error, PeerLostError | CollectiveMismatchError):
            return False
        self._collect_errors()
        kinds = {type(raised.error) for raised in self._errors.values()}
        if len(self._errors) < len(self._links.links) or kinds != {type(error)}:
            return False
        try:
            for rank in self._links.links:
                self._send(rank, _encode(FailureConfirmed()))
        except PeerLostError:  # it failed long before the others, and no longer waits: `error` stays the cause
            return False
        return True

    def cause_of(self, error: BaseException) -> BaseException | None:
        """The error of another replica that caused this one; None if there is none."""
        if not isinstance(error, PeerLostError):
            return None
        self._collect_errors()
        return self._first_error()

    def close(self) -> None:
        """Kill the processes, and leave the job. Safe to call twice."""
        atexit.unregister(self.close)
        for link in self._links.links.values():
            link.close()
        if self._local_replicas is not None:
            self._local_replicas.kill()
        leave_job()

    def _send(self, rank: Rank, header: bytes, buffers: Sequence[bytes] = ()) -> None:
        try:
            self._links.links[rank].send(header, buffers, deadline=self._deadline())
        except _LINK_ERRORS as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: Rank, expected: type[Message], wait_s: float | None = None) -> None:
        deadline = self._deadline() if wait_s is None else time.monotonic() + wait_s
        try:
            header, buffers = self._links.links[rank].receive(deadline=deadline)
        except _LINK_ERRORS as error:
            raise self._lost(rank, error) from error
        reply = _MESSAGES.decode(header)
        if isinstance(reply, Failed):
            raised = function_call.decode_result(bytes(buffers[0]))
            assert isinstance(raised, function_call.CallRaised)
            self._errors[rank] = raised
        else:
            assert isinstance(reply, expected), reply

    def _collect_errors(self) -> None:
        """Receive, after a failure, the errors that other replicas have raised too."""
        for rank in self._links.links.keys() - self._errors.keys():
            with contextlib.suppress(PhalanxError):  # the replica was lost, or has not failed
                self._receive(rank, Done, wait_s=ERROR_WAIT_S)

    def _lost(self, rank: Rank, error: Exception) -> PeerLostError:
        member = self.job.membership.members[rank]
        why = self._local_replicas.failure if self._local_replicas is not None else ""
        return PeerLostError(
            f"The replica {member.task} of this session was lost: {why or error}. Call the method again; it begins "
            f"with the present weights.",
            rank=rank,
            task=member.task,
            host=member.host,
        )

    def _first_error(self) -> BaseException | None:
        for rank, raised in sorted(self._errors.items()):
            error = raised.error
            error.__cause__ = WorkerTraceback(self.job.membership.members[rank].task, raised.traceback)
            return error
        return None

    def _check(self) -> None:
        if self._local_replicas is not None and self._local_replicas.failure:
            raise PeerLostError(
                f"A replica of this session has failed: {self._local_replicas.failure}.", rank=-1, task="", host=""
            )

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s


class _ReplicaLinks:
    """The links from the serving replicas, collected as they connect. A service of the listener."""

    def __init__(self, job: CurrentJob, count: int) -> None:
        self.links: dict[Rank, Link] = {}
        self._identity = job.identity
        self._count = count
        self._changed = threading.Condition()

    def admit(self, hello: Hello) -> Welcome:
        return admit_worker(self._identity, hello, range(1, self._count + 1), lambda rank: None)

    def adopt(self, hello: Hello, link: Link) -> None:
        rank = self._identity.rank_of(hello.task)
        assert rank is not None, "checked when it was admitted"
        with self._changed:
            self.links[rank] = link
            self._changed.notify_all()

    def wait(self, timeout_s: float, check: Callable[[], None]) -> dict[Rank, Link]:
        """Wait for all links, and return them. Raises: what `check` raises; PeerLostError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self.links) < self._count:
                check()
                if time.monotonic() > deadline:
                    raise PeerLostError("A replica of this session did not start.", rank=-1, task="", host="")
                self._changed.wait(0.2)
            return dict(sorted(self.links.items()))


class _IdleCommunicator:
    """Placeholder for the communicator between two calls: it has its membership, but raises an error on any merge."""

    def __init__(self, communicator: Communicator) -> None:
        self.membership = communicator.membership
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self._communicator = communicator

    @property
    def statistics(self) -> Any:
        return self._communicator.statistics

    def close(self) -> None:
        self._communicator.close()

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            f"{name} needs all replicas, and in a notebook or an interactive session the others take part only in "
            f"fit, evaluate, predict, train_on_batch, test_on_batch and predict_on_batch. Put a custom training loop "
            f"into a function, make the strategy inside it (MultiWorkerMirroredStrategy), and call "
            f"phalanx.launch(function, workers={self.world_size})."
        )
