"""A `tf.GradientTape` whose gradients are reduced over the ranks. Names and meaning are Horovod's."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import tensorflow as tf

from phalanx.arrays.tree import map_present
from phalanx.horovod import step_reports
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.operation_request import HorovodOp, OperationKind
from phalanx.horovod.operations import Average
from phalanx.horovod.tensorflow.compression import Compression
from phalanx.horovod.tensorflow.functions import tensorflow_variable
from phalanx.horovod.tensorflow.mpi_ops import divided_by_size, run_collective


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def reduce_gradients(gradients: Sequence[Any], reduction: GradientReduction, name: str | None = None) -> list[Any]:
    """Gradients reduced over the ranks, all dense ones together; None stays None.

    Args:
        gradients: tensors or `tf.IndexedSlices`.
        reduction: how they are reduced.
        name: name of the collective.
    """

    def reduce(tensors: list[Any]) -> list[Any]:
        if reduction.sparse_as_dense:
            tensors = [tf.convert_to_tensor(each) for each in tensors]
        return run_collective(
            OperationKind.ALLREDUCE,
            tensors,
            reduction.arguments(name),
            reduction.compression,
            around=step_reports.report_reduction,
        )

    return map_present(reduce, gradients)


def reduce_shared(
    gradients: Sequence[Any], local: Set[int], reduction: GradientReduction, *, scales_local: bool
) -> list[Any]:
    """As `reduce_gradients`, but some gradients stay this rank's own; on a rank that trains alone, all do.

    Args:
        gradients: tensors or `tf.IndexedSlices`.
        local: indices of those that are not reduced.
        reduction: how the others are.
        scales_local: whether those that are not reduced are divided by the number of ranks.
    """
    process_set = reduction.process_set
    if not process_set.included():
        return list(gradients)
    shared = [None if index in local else each for index, each in enumerate(gradients)]
    reduced: list[Any] = reduce_gradients(shared, reduction)
    for index in local:
        own = gradients[index]
        reduced[index] = divided_by_size(own, process_set) if scales_local and own is not None else own
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
    """The tape, whose `gradient` reduces over the ranks what it returns.

    `register_local_source(variable)` excludes a variable: its gradients stay this rank's own.

    Args:
        gradtape: must not be used afterwards.
        device_dense: ignored, as `device_sparse`, `num_groups` and `groups`: gradients travel together.
        compression: a compressor, see `Compression`.
        sparse_as_dense: whether `tf.IndexedSlices` are made dense, instead of gathering the slices of all ranks.
        op: the reduction.
        gradient_predivide_factor: see `GradientReduction`.
        process_set: the ranks that train together.
        scale_local_gradients: whether gradients that are not reduced are divided by the number of ranks, as averaged
            ones are.

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
    """As `DistributedGradientTape`, but gradients of some layers stay each rank's own.

    Args:
        local_layers: a layer, or several; None for none.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    tape = _distribute_tape(gradtape, reduction, scale_local_gradients)
    for layer in tf.nest.flatten(local_layers) if local_layers is not None else []:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def _distribute_tape(gradtape: tf.GradientTape, reduction: GradientReduction, scales_local: bool) -> Any:
    # Shares what the tape has recorded so far: a program may wrap it after the forward pass.
    tape: Any = object.__new__(type(type(gradtape).__name__, (_ReducingTape, type(gradtape)), {}))
    vars(tape).update(vars(gradtape))
    tape._hvd_reduction = reduction
    tape._hvd_local = set()
    tape._hvd_scales_local = scales_local
    return tape


class _ReducingTape:
    """Precedes `tf.GradientTape` among the bases."""

    _hvd_reduction: GradientReduction
    _hvd_local: set[int]  # identities of variables
    _hvd_scales_local: bool

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
        reduced = reduce_shared(flat, local, self._hvd_reduction, scales_local=self._hvd_scales_local)
        return tf.nest.pack_sequence_as(gradients, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Pairs of a source and its gradient: first those that are not reduced, then the others. See `gradient`."""
        local: list[Any] = []
        reduced: list[Any] = []
        for pair in zip(sources, self.gradient(target, sources, output_gradients), strict=True):
            (local if self._hvd_is_local(pair[0]) else reduced).append(pair)
        return local, reduced

    def _hvd_is_local(self, source: Any) -> bool:
        return id(tensorflow_variable(source)) in self._hvd_local
