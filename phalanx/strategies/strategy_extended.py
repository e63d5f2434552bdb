"""`strategy.extended`: the interface of `tf.distribute` for custom optimizers, metrics and training loops."""

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
    """`tf.distribute.StrategyExtended` for one replica: instead of values for several devices, each process has its own
    value. Every replica must call the methods that merge values, in the same order.

    Args:
        strategy: The strategy that this belongs to.
    """

    steps_per_run = 1
    """Each call of `run` is one step."""
    experimental_require_static_shapes = False
    """Shapes may differ from step to step."""
    experimental_between_graph = True
    """Each replica runs its own program."""
    experimental_should_init = True
    """Each replica initializes its own variables."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    # Devices and duties.

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that this process computes on."""
        return self._strategy.local_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that this process keeps variables on."""
        return self._strategy.local_devices

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """The devices for variables shared by all of `var_list`."""
        return self._strategy.local_devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: True on the chief."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: True on the chief."""
        return self._strategy.is_chief

    # Values.

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None) -> Any:
        """Merge the replicas' values; every replica gets the result, regardless of `destinations`."""
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """`reduce_to` for several values in one collective."""
        merged: list[Any] = self._strategy.reduce(reduce_op, [value for value, _ in value_destination_pairs], axis=None)
        return merged

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The first replica's tensor, on every replica."""
        strategy = self._strategy
        return tensor if strategy.computes_alone else strategy._variables.merge(tensor, "only_first_replica")

    def value_container(self, value: Any) -> Any:
        """The container of `value`: the value itself, because each process holds whole variables."""
        return value

    # Variables.

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the variable was created in this strategy's scope."""
        return self._strategy._variables.has_created(v)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Context without effect: all variables of a replica are in its process.

        Raises: ConfigurationError if the variable was not created in the scope.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ConfigurationError(
                f"colocate_vars_with() got {colocate_with_variable!r}, which was not created in strategy.scope(). "
                f"Create it there."
            )
        yield

    def read_var(self, v: Any) -> Any:
        """The value of the variable."""
        return keras.ops.convert_to_tensor(v)

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """Call `fn(var, *args, **kwargs)` on every replica with that replica's variable and the same arguments.

        Assigned values are not merged: merge the replicas' values with `reduce_to` first.
        """
        with replica_context.local_reads():
            return fn(var, *args, **(kwargs or {}))

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(*args, **kwargs)` on every replica."""
        return fn(*args, **(kwargs or {}))

    def call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call `strategy.run(fn, args, kwargs)`."""
        return self._strategy.run(fn, tuple(args), kwargs)

    if not TYPE_CHECKING:  # type checkers see no other attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_member("StrategyExtended", self, name)
