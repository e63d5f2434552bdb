"""Batch normalization over the batches of all ranks. The name is Horovod's."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.horovod import basics
from phalanx.horovod.operations import Sum
from phalanx.keras_compat.global_batch_norm import moments


@keras.saving.register_keras_serializable(package="phalanx.horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization whose statistics, during training, are those of all ranks' batches together.

    Mean and variance are computed from two sums over the ranks, in turn, so that no digits are lost; gradients pass
    through those sums. With a `DistributedOptimizer`, the model trains as one process would on the whole batch. Works
    on TensorFlow and PyTorch; on TensorFlow not in functions compiled by XLA, which `fit` with a `DistributedOptimizer`
    avoids.

    Args:
        fused: must be False.
        kwargs: as for `keras.layers.BatchNormalization`.

    Raises:
        ConfigurationError: fused=True.
        UnsupportedError: on JAX, whose compiled train step cannot wait for other ranks. There,
            `phalanx.MultiWorkerMirroredStrategy` averages the statistics of plain layers.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused or fused is None:
            raise ConfigurationError("SyncBatchNormalization does not support fused=True.")
        if keras.backend.backend() == "jax":
            raise UnsupportedError(
                "SyncBatchNormalization needs other ranks in the middle of a train step, and on JAX that is one "
                "compiled function, which cannot wait for them. Use TensorFlow or PyTorch, or "
                "keras.layers.BatchNormalization, whose statistics are local to each rank."
            )
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if basics.size() == 1 or getattr(inputs, "is_meta", False):  # PyTorch's, while Keras only infers shapes
            return super()._moments(inputs, mask)
        return moments(self, inputs, mask, self._sum)

    @staticmethod
    def _sum(tensors: list[Any]) -> list[Any]:
        """The sums over the ranks, with a gradient; they travel together."""
        interface = importlib.import_module(f"phalanx.horovod.{keras.backend.backend()}")
        merged: list[Any] = interface.grouped_allreduce(tensors, op=Sum)
        return merged
