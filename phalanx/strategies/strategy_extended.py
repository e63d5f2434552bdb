"""`strategy.extended`: what `tf.distribute` offers to those who write optimizers, metrics and loops of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras

from phalanx.collectives.communicator import ReduceOp
from phalanx.compat.unsupported_names import missing_member
from phalanx.errors import ConfigurationError
from phalanx.strategies import replica_context

if TYPE_CHECKING:
    from phalanx.strategies.strategy import Strategy


class StrategyExtended:
    """As `tf.distribute.StrategyExtended`, for one replica: where that has the values of several devices, here each
    process has its own. What merges values must be called by every replica, in the same order.

    Args:
        strategy: Whose part it is.
    """

    steps_per_run = 1
    """Each call of `run` is one step."""
    experimental_require_static_shapes = False
    """Shapes may differ from step to step."""
    experimental_between_graph = True
    """Each replica has a program of its own."""
    experimental_should_init = True
    """Each replica initializes its own variables."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    # Who does what.

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that this process computes on."""
        return self._strategy.local_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that this process keeps variables on."""
        return self._strategy.local_devices

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """The devices for variables that belong to all of `var_list`."""
        return self._strategy.local_devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is to write checkpoints: the chief is."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is to write summaries: the chief is."""
        return self._strategy.is_chief

    # Values.

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None) -> Any:
        """The replicas' values merged into one, on every replica, whatever `destinations` names."""
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """`reduce_to` of several values, which travel together."""
        merged: list[Any] = self._strategy.reduce(reduce_op, [value for value, _ in value_destination_pairs], axis=None)
        return merged

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The first replica's tensor, on every replica."""
        strategy = self._strategy
        return tensor if strategy.computes_alone else strategy._parts.merge(tensor, "only_first_replica")

    def value_container(self, value: Any) -> Any:
        """What `value` is a part of: a variable is whole in each process."""
        return value

    # Variables.

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the variable was created in this strategy's scope."""
        return self._strategy._parts.has_created(v)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """A context in which variables are created where this one is: all of a replica's are in its process.

        Raises: ConfigurationError if it was not created in the scope.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ConfigurationError(
                f"colocate_vars_with() got {colocate_with_variable!r}, which was not created in strategy.scope(). "
                f"Create it there."
            )
        yield

    def read_var(self, v: Any) -> Any:
        """The variable's value."""
        return keras.ops.convert_to_tensor(v)

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """`fn(var, *args, **kwargs)`, on every replica with its own variable and the same arguments.

        What it assigns is not merged: merge what the replicas have with `reduce_to` before.
        """
        with replica_context.reading_own():
            return fn(var, *args, **(kwargs or {}))

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """`fn(*args, **kwargs)`, on every replica."""
        return fn(*args, **(kwargs or {}))

    def call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """`strategy.run(fn, args, kwargs)`."""
        return self._strategy.run(fn, tuple(args), kwargs)

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_member("StrategyExtended", self, name)
