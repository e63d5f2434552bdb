"""`fit` with the variables in one place: replicas around a parameter server in the first of them.

Training is that of `ParameterServerTrainer` in synchronous mode. The replicas are all there is of the job and take each
step together, so they are more than workers: what they start from, log and decide is the same on all, through the
communicator between them, and what is not training is divided among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.training.callback_hooks import has_batch_hooks
from phalanx.training.replica import Replica
from phalanx.training.replica_trainer import ReplicaTrainer
from phalanx.training.servers.parameter_server_trainer import ParameterServerTrainer
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.worker_agreement import ReplicaAgreement


@dataclass(kw_only=True)
class CentralStorageWorker(ParameterServerWorker):
    """A worker around a server in the first replica.

    Attributes:
        replica: this process as one of the replicas, which decide together.
    """

    replica: Replica

    def describe(self) -> str:
        return f"Central storage: {self.workers} replicas, whose variables lie in the first."


class CentralStorageTrainer:
    """Trains one compiled Keras model around a central storage."""

    def __init__(self, model: Any, worker: CentralStorageWorker, original: Callable[[str], Callable[..., Any]]) -> None:
        self._model = model
        self._replica = worker.replica
        # Whether callbacks of any replica see single batches; set by each `fit` before `_make_agreement` reads it.
        self._watched = False
        self._workers = ParameterServerTrainer(model, worker, original, self._make_agreement)
        self._replicas = ReplicaTrainer(model, worker.replica)

    def _make_agreement(self, fit: int) -> ReplicaAgreement:
        return ReplicaAgreement(self._model, self._replica, watched=self._watched)

    def fit(self, **arguments: Any) -> Any:
        """Takes `FitArguments`."""
        self._watched = self._replica.any(has_batch_hooks(arguments.get("callbacks"), "train"))
        # The servers train from here on; what the replicas' own trainer knew of the weights is old afterwards.
        self._replicas.resynchronise()
        return self._workers.fit(**arguments)

    # All replicas do the rest together; but each alone in the middle of `fit`, where a callback of one may call it.

    def _trainer(self) -> ParameterServerTrainer | ReplicaTrainer:
        return self._workers if self._workers.is_training else self._replicas

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._trainer().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._trainer().predict(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._trainer().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._trainer().predict_on_batch(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """One step of all replicas, not in the middle of `fit`."""
        if self._workers.is_training:
            raise ConfigurationError("train_on_batch() was called in the middle of fit(), which trains the same model.")
        return self._replicas.train_on_batch(*args, **kwargs)

    def pull_consistent(self) -> None:
        """See `RemoteModel.pull_consistent`."""
        self._workers.pull_consistent()

    def request_stop(self) -> None:
        """See `ParameterServerTrainer.request_stop`."""
        self._workers.request_stop()
