"""Batch normalization over the batches of all ranks. The name is Horovod's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from phalanx.engines import make_tensors
from phalanx.errors import ConfigurationError
from phalanx.horovod import basics, operations
from phalanx.horovod.operation_request import Array, OperationKind
from phalanx.keras_compat.global_batch.global_batch_norm import moments


@keras.saving.register_keras_serializable(package="phalanx.horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization that, during training, uses the statistics of all ranks' batches combined.

    Mean and variance are computed from two sequential sums over the ranks, to avoid a loss of precision; gradients flow
    through these sums. With a `DistributedOptimizer`, the model trains as one process would on the whole batch. The
    layer does not work in functions compiled by XLA on TensorFlow, or in compiled functions of a custom loop on JAX;
    `fit` with a `DistributedOptimizer` handles both.

    Args:
        fused: Must be False.
        kwargs: Arguments of `keras.layers.BatchNormalization`.

    Raises: ConfigurationError: fused=True.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused or fused is None:
            raise ConfigurationError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if basics.size() == 1 or getattr(inputs, "is_meta", False):  # a PyTorch tensor, while Keras only infers shapes
            return super()._moments(inputs, mask)
        return moments(self, inputs, mask, self._sum)

    @staticmethod
    def _sum(tensors: list[Any]) -> list[Any]:
        """Return the sums over the ranks, with a gradient; they travel together."""
        if keras.backend.backend() == "tensorflow":  # its collectives also run in sessions
            from phalanx.horovod.tensorflow.mpi_ops import grouped_allreduce

            summed: list[Any] = grouped_allreduce(tensors, op=operations.Sum)
            return summed
        # The sum over ranks is its own adjoint.
        return make_tensors().call(_sums, tensors, gradient=lambda flowing, shapes: _sums(flowing))


def _sums(arrays: Sequence[Array]) -> list[Array]:
    return operations.run(OperationKind.ALLREDUCE, list(arrays), op=operations.Sum)
