"""A `tf.GradientTape` whose gradients are reduced over the ranks. Names and semantics are Horovod's."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import tensorflow as tf

from phalanx.arrays.tree import map_non_none
from phalanx.horovod import step_reports
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.operation_request import HorovodOp, OperationKind
from phalanx.horovod.operations import Average
from phalanx.horovod.tensorflow.compression import Compression
from phalanx.horovod.tensorflow.functions import tensorflow_variable
from phalanx.horovod.tensorflow.mpi_ops import divide_by_rank_count, run_collective


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def reduce_gradients(gradients: Sequence[Any], reduction: GradientReduction, name: str | None = None) -> list[Any]:
    """Reduce gradients over the ranks, all dense ones together; None stays None.

    Args:
        gradients: Tensors or `tf.IndexedSlices`.
        reduction: The reduction of the gradients.
        name: Name of the collective.
    """

    def reduce(tensors: list[Any]) -> list[Any]:
        if reduction.sparse_as_dense:
            tensors = [tf.convert_to_tensor(each) for each in tensors]
        return run_collective(
            OperationKind.ALLREDUCE,
            tensors,
            reduction.to_arguments(name),
            reduction.compression,
            wrap_wait=step_reports.report_reduction,
        )

    return map_non_none(reduce, gradients)


def reduce_nonlocal(
    gradients: Sequence[Any], local: Set[int], reduction: GradientReduction, *, scale_local_gradients: bool
) -> list[Any]:
    """Do the same as `reduce_gradients`, but keep some gradients local; on a rank that trains alone, keep all.

    Args:
        gradients: Tensors or `tf.IndexedSlices`.
        local: Indices of the gradients that are not reduced.
        reduction: The reduction of the others.
        scale_local_gradients: Whether local gradients are divided by the number of ranks.
    """
    process_set = reduction.process_set
    if not process_set.included():
        return list(gradients)
    shared = [None if index in local else each for index, each in enumerate(gradients)]
    reduced: list[Any] = reduce_gradients(shared, reduction)
    for index in local:
        own = gradients[index]
        reduced[index] = divide_by_rank_count(own, process_set) if scale_local_gradients and own is not None else own
    return reduced


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
    """Return a tape whose `gradient` reduces the gradients over the ranks.

    `register_local_source(variable)` excludes a variable: its gradients stay local to each rank.

    Args:
        gradtape: The original tape. Do not use it afterwards.
        device_dense: Ignored, as are `device_sparse`, `num_groups` and `groups`: all gradients are fused.
        compression: A compressor, see `Compression`.
        sparse_as_dense: Whether `tf.IndexedSlices` become dense tensors, instead of gathering the slices of all ranks.
        op: The reduction.
        gradient_predivide_factor: See `GradientReduction`.
        process_set: The ranks that train together.
        scale_local_gradients: Whether gradients that are not reduced are divided by the number of ranks, as averaged
            gradients are.

    Raises: ConfigurationError if options contradict each other.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    return _distribute_tape(gradtape, reduction, scale_local_gradients)


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
    """Do the same as `DistributedGradientTape`, but keep the gradients of some layers local to each rank.

    Args:
        local_layers: One or more layers; None for none.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    tape = _distribute_tape(gradtape, reduction, scale_local_gradients)
    for layer in tf.nest.flatten(local_layers) if local_layers is not None else []:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def _distribute_tape(gradtape: tf.GradientTape, reduction: GradientReduction, scale_local_gradients: bool) -> Any:
    # Shares the existing recording: a program may wrap the tape after the forward pass.
    tape: Any = object.__new__(type(type(gradtape).__name__, (_ReducingTapeMixin, type(gradtape)), {}))
    vars(tape).update(vars(gradtape))
    tape._hvd_reduction = reduction
    tape._hvd_local = set()
    tape._hvd_scale_local_gradients = scale_local_gradients
    return tape


class _ReducingTapeMixin:
    """Mixin before `tf.GradientTape` among the bases."""

    _hvd_reduction: GradientReduction
    _hvd_local: set[int]  # identities of variables
    _hvd_scale_local_gradients: bool

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradients of this variable."""
        self._hvd_local.add(id(tensorflow_variable(source)))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """See `tf.GradientTape.gradient`; `use_generic_names` is ignored."""
        gradients = super().gradient(target, sources, output_gradients, **kwargs)  # type: ignore[misc]
        flat = tf.nest.flatten(gradients)
        local = {index for index, source in enumerate(tf.nest.flatten(sources)) if self._hvd_is_local(source)}
        reduced = reduce_nonlocal(
            flat, local, self._hvd_reduction, scale_local_gradients=self._hvd_scale_local_gradients
        )
        return tf.nest.pack_sequence_as(gradients, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return pairs of a source and its gradient: first the local ones, then the reduced ones. See `gradient`."""
        local: list[Any] = []
        reduced: list[Any] = []
        for pair in zip(sources, self.gradient(target, sources, output_gradients), strict=True):
            (local if self._hvd_is_local(pair[0]) else reduced).append(pair)
        return local, reduced

    def _hvd_is_local(self, source: Any) -> bool:
        return id(tensorflow_variable(source)) in self._hvd_local
