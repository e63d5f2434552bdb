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
    """Batch normalization whose statistics, while it trains, are those of all ranks' batches together.

    Mean and variance come from sums over the ranks, one after the other, so no digits are lost; gradients go back
    through those sums. With a `DistributedOptimizer` the model trains as one process would on the whole batch. On
    TensorFlow and PyTorch; on TensorFlow not in functions compiled by XLA (`fit` with a `DistributedOptimizer` sees to
    that).

    Args:
        fused: only False.
        kwargs: as of `keras.layers.BatchNormalization`.

    Raises:
        ConfigurationError: fused=True.
        UnsupportedError: on JAX, whose compiled train step cannot wait for other ranks in its middle. There
            `phalanx.MultiWorkerMirroredStrategy` averages what plain layers have collected.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused or fused is None:
            raise ConfigurationError("SyncBatchNormalization does not support fused=True.")
        if keras.backend.backend() == "jax":
            raise UnsupportedError(
                "SyncBatchNormalization needs other ranks in the middle of a train step, and on JAX that is one "
                "compiled function, which cannot wait for them. Use TensorFlow or PyTorch, or "
                "keras.layers.BatchNormalization, whose statistics are each rank's own."
            )
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if basics.size() == 1 or getattr(inputs, "is_meta", False):  # PyTorch's, while Keras asks for shapes only
            return super()._moments(inputs, mask)
        return moments(self, inputs, mask, self._sum)

    @staticmethod
    def _sum(tensors: list[Any]) -> list[Any]:
        """Over the ranks, all as one; with a gradient."""
        interface = importlib.import_module(f"phalanx.horovod.{keras.backend.backend()}")
        merged: list[Any] = interface.grouped_allreduce(tensors, op=Sum)
        return merged
