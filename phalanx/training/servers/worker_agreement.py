"""What workers among parameter servers decide together, besides what the servers' schedule says.

Workers that take steps of their own leave decisions to the chief. With central storage the workers are replicas, which
take each step together and decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np

from phalanx.keras_compat.variables.host_values import host_copy, to_host
from phalanx.parameter_server.server_messages import RequestStop
from phalanx.training import callback_hooks, chief_state_sync, state_sync
from phalanx.training.replica import Replica
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.remote_model import RemoteModel


class WorkerAgreement(Protocol):
    """What workers decide together, besides what the servers' schedule says."""

    def synchronise(self) -> None:
        """Before the first step."""

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """An epoch's logs for callbacks and history."""

    def stops_within_epoch(self) -> bool:
        """Whether no further step of the running epoch is to be taken."""

    def stops_after_epoch(self, *, is_fit_over: bool) -> bool:
        """Whether there are no more epochs."""

    def final_callbacks(self, callbacks: Any) -> AbstractContextManager[None]:
        """Around `on_train_end`, where callbacks may set weights."""


class ChiefAgreement:
    """The agreement of workers that take steps of their own: the chief decides, and each has logs of its own."""

    def __init__(self, fit: int, worker: ParameterServerWorker, remote_model: RemoteModel) -> None:
        self._fit = fit
        self._worker = worker
        self._remote_model = remote_model

    def synchronise(self) -> None:
        """See `WorkerAgreement.synchronise`. The servers have what all start from."""

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """See `WorkerAgreement.merge_logs`."""
        return logs

    def stops_within_epoch(self) -> bool:
        """See `WorkerAgreement.stops_within_epoch`. Workers continue to the end of the epoch."""
        return False

    def stops_after_epoch(self, *, is_fit_over: bool) -> bool:
        """See `WorkerAgreement.stops_after_epoch`. What other workers than the chief see is only a part."""
        if not self._worker.is_chief:
            return is_fit_over
        others_stop = self._worker.client.ask_head(RequestStop(self._fit, stop=False))
        return is_fit_over or others_stop or bool(self._remote_model.model.stop_training)

    @contextmanager
    def final_callbacks(self, callbacks: Any) -> Iterator[None]:
        """See `WorkerAgreement.final_callbacks`. What the chief's callbacks make of the weights holds for all workers;
        what those of the others make of them, by logs of their own, is undone."""
        if self._worker.workers == 1 or not callback_hooks.may_set_weights_at_train_end(callbacks):
            yield
            return
        variables = self._remote_model.variables.variables
        # Copies: a callback may write into the same memory (PyTorch).
        before = [host_copy(variable) for variable in variables]
        yield
        changed = {
            number: variable
            for number, (variable, value) in enumerate(zip(variables, before, strict=True))
            if not np.array_equal(to_host(variable), value)
        }
        if self._worker.is_chief:
            chief_state_sync.send_final_weights(self._worker, self._fit, changed)
            return
        chiefs = chief_state_sync.receive_final_weights(self._worker, self._fit)
        # The chief's value where it has set one; else back to what the servers have, because this worker's callbacks
        # saw only its own logs.
        for number in {*changed, *chiefs}:
            variables[number].assign(chiefs.get(number, before[number]))


class ReplicaAgreement:
    """The agreement of workers that are replicas: all decide together, and have the same logs and weights.

    Args:
        watched: whether callbacks of any replica see single batches.
    """

    def __init__(self, model: Any, replica: Replica, *, watched: bool) -> None:
        self._model = model
        self._replica = replica
        self._watched = watched

    def synchronise(self) -> None:
        """See `WorkerAgreement.synchronise`."""
        state_sync.synchronise(self._model, self._replica)
        state_sync.draw_apart(self._replica)

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """See `WorkerAgreement.merge_logs`."""
        return dict(self._replica.broadcast_from_chief(logs))

    def stops_within_epoch(self) -> bool:
        """See `WorkerAgreement.stops_within_epoch`."""
        return self._watched and self.stops_after_epoch(is_fit_over=False)

    def stops_after_epoch(self, *, is_fit_over: bool) -> bool:
        """See `WorkerAgreement.stops_after_epoch`. If a callback of any replica has set `stop_training`, it is set on
        all."""
        stop = self._replica.any(self._model.stop_training)
        self._model.stop_training = stop
        return stop

    def final_callbacks(self, callbacks: Any) -> AbstractContextManager[None]:
        """See `WorkerAgreement.final_callbacks`. They have the same logs and weights everywhere."""
        return nullcontext()
