"""`fit` with the variables in one place: replicas around a parameter server in the first of them.

Training is that of `ParameterServerTrainer` in synchronous mode. As the replicas are all there is of the job and run in step,
they are more than workers: what they start from, log and decide is the same on all, through the communicator between
them, and what is no training is divided among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.parameter_server.server_messages import EpochOver, FitOver
from phalanx.training import state_sync
from phalanx.training.callback_list import watches_batches
from phalanx.training.parameter_server_trainer import ParameterServerTrainer
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.replica import Replica
from phalanx.training.replica_trainer import ReplicaTrainer


@dataclass(kw_only=True)
class CentralStorageWorker(ParameterServerWorker):
    """A worker around a server in the first replica.

    Attributes:
        replica: the same process among the replicas.
    """

    replica: Replica

    def describe(self) -> str:
        return f"Central storage: {self.workers} replicas, whose variables lie in the first."


class CentralStorageTrainer(ParameterServerTrainer):
    """Trains one compiled Keras model around a central storage."""

    def __init__(self, model: Any, worker: CentralStorageWorker, plain: Callable[[str], Callable[..., Any]]) -> None:
        super().__init__(model, worker, plain)
        self._replica = worker.replica
        self._replicas = ReplicaTrainer(model, worker.replica)
        self._watched = False

    def fit(self, **arguments: Any) -> Any:
        self._watched = self._replica.any(watches_batches(arguments.get("callbacks"), "train"))
        self._replicas.resynchronise()
        return super().fit(**arguments)

    # What trains nothing, or only once, is done by all replicas together. Not in the middle of `fit`, where a callback
    # of one replica may ask for it.

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs) if self._training else self._replicas.evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict(*args, **kwargs) if self._training else self._replicas.predict(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self._training:
            return super().test_on_batch(*args, **kwargs)
        return self._replicas.test_on_batch(*args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self._training:
            return super().predict_on_batch(*args, **kwargs)
        return self._replicas.predict_on_batch(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self._training:
            raise ConfigurationError("train_on_batch() was called in the middle of fit(), which trains the same model.")
        return self._replicas.train_on_batch(*args, **kwargs)

    # What all replicas do alike.

    def _attach(self, fit: int, first_epoch: int, callbacks: Any) -> int | None:
        state_sync.synchronise(self._model, self._replica)
        return super()._attach(fit, first_epoch, callbacks)

    def _end_training(self, fit: int, callbacks: Any, logs: dict[str, Any]) -> None:
        callbacks.on_train_end(logs=logs)  # with the same logs and weights everywhere

    def _logs_of_all(self, logs: dict[str, Any]) -> dict[str, Any]:
        chiefs: Any = self._replica.from_chief(logs)
        return dict(chiefs)

    def _stops_within_epoch(self) -> bool:
        return self._watched and self._stop()

    def _stops_after(self, answer: EpochOver | FitOver) -> bool:
        return self._stop()

    def _stop(self) -> bool:
        """Whether a callback of any replica has set `stop_training`; then it is set on all."""
        stop = self._replica.any(self._model.stop_training)
        self._model.stop_training = stop
        return stop
