"""`LocalSGDStrategy` and `DiLoCoStrategy`: replicas synchronize every given number of steps."""

from __future__ import annotations

from typing import Any

import keras

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.collectives.options import CommunicationOptions
from phalanx.compression import Compression
from phalanx.errors import ConfigurationError
from phalanx.strategies.multi_worker_strategy import MultiWorkerMirroredStrategy
from phalanx.training.steps.outer_optimizer import AVERAGE, OuterOptimizer, OuterSGD
from phalanx.training.training_policy import SyncPeriod, TrainingPolicy

INNER_STEPS = 500
"""Steps between two exchanges, as in the paper of DiLoCo."""


class LocalSGDStrategy(MultiWorkerMirroredStrategy):
    """Every replica trains on its part of each global batch; every `sync_every` steps they average their weights (Stich
    2019, Local SGD converges fast and communicates little).

    `fit` works as with `MultiWorkerMirroredStrategy`: `batch_size` is the size of the global batch, History and metrics
    cover the job, and at the end of each epoch all replicas have the same weights, even if its number of steps is not a
    multiple of `sync_every`. With `sync_every=1` and plain SGD, the numbers equal those of synchronous training.
    `train_on_batch` takes synchronous steps.

    Args:
        sync_every: Steps between two exchanges.
        cluster_resolver: See `MultiWorkerMirroredStrategy`.
        communication_options: See `MultiWorkerMirroredStrategy`.
        compression: Compression of the exchanged values; accepts the same values as for gradients.
        overlap: Whether to continue with the next steps during an exchange, which then takes effect at the next one.

    Raises: ConfigurationError, RendezvousError, DisagreementError, as `MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        sync_every: int,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        compression: Compression | str | None = None,
        overlap: bool = False,
    ):
        _check_steps(sync_every, type(self).__name__)
        _check_options(communication_options, type(self).__name__)
        super().__init__(cluster_resolver, communication_options, compression=compression)
        # Nothing reads the policy before a model is created in the scope.
        self._policy = TrainingPolicy(self._policy.compression, SyncPeriod(sync_every, AVERAGE, overlap))


class DiLoCoStrategy(MultiWorkerMirroredStrategy):
    """Like `LocalSGDStrategy`, but the progress of `sync_every` steps is the gradient of an outer optimizer
    (Douillard et al. 2023, DiLoCo: Distributed low-communication training of language models).

    Args:
        sync_every: Inner steps between two exchanges; 500 as in the paper.
        outer_optimizer: `phalanx.OuterSGD`, a `keras.optimizers.SGD` (its learning rate and momentum are used), or an
            object with `step` (see `phalanx.training.steps.outer_optimizer.OuterOptimizer`). None: the paper's SGD with
            learning rate 0.7 and Nesterov momentum 0.9.
        cluster_resolver: See `LocalSGDStrategy`.
        communication_options: See `LocalSGDStrategy`.
        compression: See `LocalSGDStrategy`.
        overlap: See `LocalSGDStrategy`.
    """

    def __init__(
        self,
        sync_every: int = INNER_STEPS,
        outer_optimizer: OuterOptimizer | keras.optimizers.SGD | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        compression: Compression | str | None = None,
        overlap: bool = False,
    ):
        _check_steps(sync_every, type(self).__name__)
        _check_options(communication_options, type(self).__name__)
        outer = _outer(outer_optimizer)
        super().__init__(cluster_resolver, communication_options, compression=compression)
        self._policy = TrainingPolicy(self._policy.compression, SyncPeriod(sync_every, outer, overlap))


def _check_steps(sync_every: Any, strategy: str) -> None:
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ConfigurationError(f"{strategy} got sync_every={sync_every!r}; it must be a number of steps, at least 1.")


def _check_options(options: CommunicationOptions | None, strategy: str) -> None:
    if CommunicationOptions.of(options).deterministic:
        raise ConfigurationError(
            f"CommunicationOptions(deterministic=True) needs replicas that take every step together, and those of "
            f"{strategy} take steps of their own. Use MultiWorkerMirroredStrategy."
        )


def _outer(optimizer: Any) -> OuterOptimizer:
    if optimizer is None:
        return OuterSGD()
    # On PyTorch, Keras creates its own subclass. A subclass of the program may update differently.
    if isinstance(optimizer, keras.optimizers.SGD) and type(optimizer).__module__.partition(".")[0] == "keras":
        rate = optimizer._learning_rate
        if not isinstance(rate, keras.Variable):
            raise ConfigurationError(
                "DiLoCoStrategy got an outer SGD with a schedule; its learning rate must be a number."
            )
        return OuterSGD(float(keras.ops.convert_to_numpy(rate.value)), optimizer.momentum, optimizer.nesterov)
    if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        raise ConfigurationError(
            f"DiLoCoStrategy got outer_optimizer={optimizer!r}; it takes phalanx.OuterSGD(learning_rate, momentum), a "
            f"keras.optimizers.SGD, or an object with step(anchor, progress, velocity)."
        )
    found: OuterOptimizer = optimizer
    return found
