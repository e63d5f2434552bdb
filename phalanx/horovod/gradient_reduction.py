"""What the optimizers and tapes of all frameworks share: how gradients are combined across ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.horovod.common.process_sets import ProcessSet
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Arguments, Average, check_op


@dataclass(frozen=True)
class GradientReduction:
    """The options of a `DistributedOptimizer` or `DistributedGradientTape` that say how gradients are reduced.

    Attributes:
        compression: a compressor, see `Compression`.
        op: the reduction.
        gradient_predivide_factor: an average divides by this before the sum, and by the rest of the number of ranks
            after it.
        sparse_as_dense: whether sparse gradients travel as dense ones, instead of gathering the entries of all ranks.
        process_set: the ranks that train together.

    Raises: ConfigurationError if the options contradict each other.
    """

    compression: Any
    op: HorovodOp
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", check_op(self.op))
        if self.op is not Average and self.gradient_predivide_factor != 1.0:
            raise ConfigurationError(f"gradient_predivide_factor is for op Average, not {self.op.value}.")

    def arguments(self, name: str | None = None, factor: float = 1.0) -> Arguments:
        """The arguments of the allreduce of the gradients.

        Args:
            name: name of the operation.
            factor: multiplies the result.
        """
        divisor = self.gradient_predivide_factor if self.op is Average else 1.0
        return Arguments(name, self.process_set, self.op, 1.0 / divisor, divisor * factor)
