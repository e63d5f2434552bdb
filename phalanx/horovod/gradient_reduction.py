"""The reduction of gradients over ranks, shared by the optimizers and tapes of all frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.horovod.common.process_sets import ProcessSet
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Arguments, Average, check_op


@dataclass(frozen=True)
class GradientReduction:
    """The options of a `DistributedOptimizer` or `DistributedGradientTape` for the reduction of gradients.

    Attributes:
        compression: A compressor, see `Compression`.
        op: The reduction.
        gradient_predivide_factor: Divisor of an average before the sum; the sum is divided by the number of ranks over
            this.
        sparse_as_dense: Whether sparse gradients travel as dense ones, instead of gathering the entries of all ranks.
        process_set: The ranks that train together.

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

    def to_arguments(self, name: str | None = None, factor: float = 1.0) -> Arguments:
        """Return the arguments for the allreduce of the gradients.

        Args:
            name: Name of the operation.
            factor: Factor that multiplies the result.
        """
        divisor = self.gradient_predivide_factor if self.op is Average else 1.0
        return Arguments(name, self.process_set, self.op, 1.0 / divisor, divisor * factor)
