"""The variables of custom training loops: values that the replicas assign, each in its process, are merged."""

from __future__ import annotations

import hashlib
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from phalanx.collectives.communicator import Array
from phalanx.engines.tensors import same_shape
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.keras_compat.global_batch import step_collectives
from phalanx.keras_compat.trainer_hook import is_applying
from phalanx.keras_compat.variables.merged_variables import merge_variable
from phalanx.runtime import progress
from phalanx.strategies import replica_context
from phalanx.training.chief_callbacks import hook_ranks

if TYPE_CHECKING:
    from phalanx.strategies.strategy import Strategy


class StrategyVariables:
    """The variables that were created in a strategy's scope; see `VariableMerger`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._created: dict[int, weakref.ref[Any]] = {}  # by id: variables cannot be hashed
        self._pending: dict[int, weakref.ref[Any]] = {}  # variables that the next `run` may assign

    def __deepcopy__(self, memo: Any) -> StrategyVariables:
        return self  # when a variable is copied

    def register(self, variable: Any) -> None:
        """Record a new Keras variable."""
        self.add(variable)
        if self.is_alone or variable.aggregation == "none":
            return
        if self.is_in_run():
            merge_variable(variable, self)
        else:
            # Not yet: in a program that only calls `fit`, variables keep Keras's classes.
            self._pending[id(variable)] = self._created[id(variable)]

    def prepare(self) -> None:
        """Prepare variables for `run`, which merges what it assigns. Programs that only call `fit` never get here."""
        pending, self._pending = self._pending, {}
        for reference in pending.values():
            variable = reference()  # no `:=`, which AutoGraph cannot convert
            if variable is not None:
                merge_variable(variable, self)

    def add(self, variable: Any) -> None:
        key = id(variable)

        # The id of a collected variable may be reused, and dead references would accumulate with every model.
        def forget(_: Any) -> None:
            self._created.pop(key, None)
            self._pending.pop(key, None)

        self._created[key] = weakref.ref(variable, forget)

    def has_created(self, variable: Any) -> bool:
        """Whether the variable was created in the scope."""
        reference = self._created.get(id(variable))
        return reference is not None and reference() is variable

    @property
    def is_alone(self) -> bool:
        return self._strategy.computes_alone

    def is_in_run(self) -> bool:
        return replica_context.current_run_context() is not None

    def is_in_fit(self) -> bool:
        return step_collectives.current() is not None and not self.is_in_run()

    def merges_reads(self) -> bool:
        # `fit` and similar methods merge metrics themselves, but not for callbacks that all replicas run.
        is_outside = self._strategy._replica.calling_thread is None or hook_ranks() == "all"
        return replica_context.reads_are_merged() and is_outside

    def check_chief_read(self, name: str) -> None:
        if replica_context.reads_are_merged() and hook_ranks() == "chief":
            raise UnsupportedError(
                f"{name} holds this replica's part of what strategy.run has counted, and a callback that the chief "
                f"alone runs reads it, where the other replicas do not add theirs. Read it in a callback that all "
                f"replicas run, which is any keras.callbacks.Callback that is not wrapped in OnChief, and let the "
                f"chief's callback use the result."
            )

    def merges_writes(self) -> bool:
        return self.is_in_run() and not is_applying()

    def local_reads(self) -> AbstractContextManager[None]:
        return replica_context.local_reads()

    def merge(self, value: Any, aggregation: str) -> Any:
        strategy = self._strategy
        if aggregation == "none":
            return strategy._merged(value, self._check_equal, same_shape, None)
        if aggregation == "only_first_replica":
            return strategy._merged(value, self._broadcast_chief, same_shape, None)
        dtype = keras.backend.standardize_dtype(value.dtype)
        if aggregation == "mean" and not keras.backend.is_float_dtype(dtype):
            raise ConfigurationError(
                f"A variable of dtype {dtype} with aggregation MEAN was assigned by several replicas, and their mean "
                f"need not be a whole number. Give it a floating dtype, or the aggregation SUM."
            )
        return strategy.reduce(aggregation.upper(), value)

    def merge_for_checkpoint(self, value: Any, aggregation: str, name: str) -> Any:
        """See `VariableMerger`. A barrier comes first: if the chief saves alone, its value must not be added to what
        the others merge at that time."""

        def meet(arrays: list[Array]) -> list[Array]:
            progress.enter("barrier")
            self._strategy._replica.communicator.barrier(f"saving {name!r}, which every replica must do")
            return arrays

        return self.merge(self._strategy._merged(value, meet, same_shape, None), aggregation)

    def local_part(self, value: Any, aggregation: str) -> Any:
        # The sum over replicas must equal a value that is assigned from outside.
        if aggregation != "sum" or self._strategy.rank == 0:
            return value
        return keras.ops.zeros_like(value)

    def assigns_merged_values(self) -> bool:
        return self._strategy._replica.calling_thread is not None and not self.is_in_run()

    def outside_of_traces(self) -> AbstractContextManager[None]:
        return self._strategy._tensors.outside_of_traces()

    def _broadcast_chief(self, arrays: list[Array]) -> list[Array]:
        progress.enter("broadcast")
        return self._strategy._replica.communicator.broadcast(arrays)

    def _check_equal(self, arrays: list[Array]) -> list[Array]:
        """Return the arrays, which must be equal on all replicas.

        Raises: ConfigurationError on all replicas if they are not.
        """
        progress.enter("all_gather")
        # 8 bytes, sent as one int64: this detects mistakes, not attacks.
        digest = hashlib.blake2b(b"".join(array.tobytes() for array in arrays), digest_size=8).digest()
        digests = self._strategy._replica.communicator.all_gather(np.frombuffer(digest, np.int64))
        if len({int(each[0]) for each in digests}) > 1:
            raise ConfigurationError(
                "The replicas have different values of a variable without an aggregation. Say how they become one: "
                "create it in strategy.scope() with aggregation=tf.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA. A variable that each replica keeps for itself is created outside of the scope."
            )
        return arrays
