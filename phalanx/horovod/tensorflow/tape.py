"""A `tf.GradientTape` whose gradients are merged over the ranks. Names and meaning are Horovod's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from phalanx.errors import ConfigurationError
from phalanx.horovod import step_reports
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Average, check_op
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.horovod.tensorflow.compression import Compression
from phalanx.horovod.tensorflow.functions import of_tensorflow
from phalanx.horovod.tensorflow.mpi_ops import divided_by_size, reduce_together


def merge_gradients(
    gradients: Sequence[Any],
    *,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: HorovodOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[Any]:
    """Gradients merged over the ranks, all dense ones as one; None stays None."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    tensors = [gradients[index] for index in present]
    if sparse_as_dense:
        tensors = [tf.convert_to_tensor(t) if isinstance(t, tf.IndexedSlices) else t for t in tensors]
    merged = list(gradients)
    if not tensors:
        return merged
    average = op is Average
    results = reduce_together(
        tensors,
        compression,
        op,
        1.0 / gradient_predivide_factor if average else 1.0,
        gradient_predivide_factor if average else 1.0,
        process_set,
        name,
        around=step_reports.merged,
    )
    for index, result in zip(present, results, strict=True):
        merged[index] = result
    return merged


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: HorovodOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """The tape, whose `gradient` merges over the ranks what it returns.

    `register_local_source(variable)` leaves a variable's gradients this rank's own.

    Args:
        gradtape: must not be used any more.
        device_dense: means nothing here, as `device_sparse`, `num_groups` and `groups`: gradients travel as one.
        compression: see `Compression`.
        sparse_as_dense: make `tf.IndexedSlices` dense, instead of gathering all ranks' slices.
        op: how to merge.
        gradient_predivide_factor: an average divides by this before the sum, and by the rest after it.
        scale_local_gradients: whether gradients that are not merged are divided by the number of ranks, as those that
            are averaged have been.

    Raises: ConfigurationError if arguments do not fit together.
    """
    op = check_op(op)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ConfigurationError(f"gradient_predivide_factor is for op Average, not {op.value}.")
    tape: Any = object.__new__(type(type(gradtape).__name__, (_MergingTape, type(gradtape)), {}))
    vars(tape).update(vars(gradtape))
    tape._hvd_merge = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "process_set": process_set,
    }
    tape._hvd_local = set()
    tape._hvd_scales_local = scale_local_gradients
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: HorovodOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedGradientTape`, but gradients of some layers stay each rank's own.

    Args:
        local_layers: a layer, or several; None: none.
    """
    tape = DistributedGradientTape(
        gradtape,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in tf.nest.flatten(local_layers) if local_layers is not None else []:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class _MergingTape:
    """Before `tf.GradientTape`."""

    _hvd_merge: dict[str, Any]
    _hvd_local: set[int]  # identities of variables
    _hvd_scales_local: bool

    def register_local_source(self, source: Any) -> None:
        """Gradients of this variable are not merged."""
        self._hvd_local.add(id(of_tensorflow(source)))

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any) -> Any:
        """See `tf.GradientTape.gradient`."""
        gradients = super().gradient(target, sources, output_gradients, **kwargs)  # type: ignore[misc]
        if not self._hvd_merge["process_set"].included():
            return gradients
        flat = tf.nest.flatten(gradients)
        identities = [id(of_tensorflow(source)) for source in tf.nest.flatten(sources)]
        local = {index for index, identity in enumerate(identities) if identity in self._hvd_local}
        merged = merge_gradients([None if i in local else each for i, each in enumerate(flat)], **self._hvd_merge)
        for index in local:
            own = flat[index]
            scales = self._hvd_scales_local and own is not None
            merged[index] = divided_by_size(own, self._hvd_merge["process_set"]) if scales else own
        return tf.nest.pack_sequence_as(gradients, merged)
