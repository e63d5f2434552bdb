"""`tf.Variable`s that a program creates in a scope, as `tf.distribute` treats them: see `merged_variables`.

A variable that is synchronized on read belongs to the replica in `strategy.run`, and to the job outside. Every other
variable is the same on all replicas, so what `run` assigns is merged by its `aggregation`. Without one, all replicas
must assign the same value. Scattered updates cannot be merged, and are refused.

Uses `tf.variable_creator_scope`, and of variables `sparse_read`, `gather_nd`, `_restore_from_tensors` and the order of
their arguments. Tested with TensorFlow 2.21.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import tensorflow as tf

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.patching import insert_mixin, set_untracked
from phalanx.keras_compat.variables.merged_variables import (
    MergedOnRead,
    VariableMerger,
    is_created_by_keras,
    local_parts,
    merged_for_checkpoint,
)

_SCATTERED = (
    *("scatter_sub", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_div", "scatter_update"),
    *("scatter_nd_sub", "scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_update"),
    "batch_scatter_update",
)


def variable_merge_scope(current_merger: Callable[[], VariableMerger | None]) -> AbstractContextManager[None]:
    """Context in which new variables belong to the `current_merger()` at their creation, if there are any."""
    context: AbstractContextManager[None] = tf.variable_creator_scope(partial(_create, current_merger))
    return context


def _create(current_merger: Callable[[], VariableMerger | None], next_creator: Any, **arguments: Any) -> Any:
    variable = next_creator(**arguments)
    merger = current_merger()
    if merger is None or is_created_by_keras() or isinstance(variable, _Merged):
        return variable
    merger.add(variable)
    if not merger.is_alone:
        on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
        insert_mixin(variable, _MergedOnRead if on_read else _MergedOnWrite)
        set_untracked(variable, _phalanx_merger=merger, _phalanx_aggregation=variable.aggregation.name.lower())
    return variable


class _Merged:
    """A mixin that precedes the class of a variable."""

    _phalanx_merger: VariableMerger
    _phalanx_aggregation: str

    def _phalanx_check(self) -> None:
        """Raises: UnsupportedError in a step of `fit`, which only merges Keras's variables."""
        if self._phalanx_aggregation != "none" and self._phalanx_merger.is_in_fit():
            raise UnsupportedError(
                f"The tf.Variable {self.name!r} is to be merged over the replicas "  # type: ignore[attr-defined]
                f"({self._phalanx_aggregation}), and was assigned in a step of fit(), which merges metrics and weights "
                f"of layers. Use a Keras metric or layer.add_weight(), or train in a custom loop with strategy.run()."
            )


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._phalanx_merger.merges_writes() or isinstance(self, _MergedOnRead):
            raise UnsupportedError(
                f"variable.{name}() changes some rows of {self.name!r}, and those of several replicas cannot be "
                f"merged. Add up whole values with variable.assign_add(), or merge what each replica has with "
                f"strategy.reduce() and call {name}() outside of strategy.run()."
            )
        return getattr(super(_Merged, self), name)(*args, **kwargs)

    return method


for _name in _SCATTERED:
    setattr(_Merged, _name, _refusing(_name))


class _MergedOnRead(MergedOnRead, _Merged):
    def value(self) -> Any:
        return self._phalanx_read(super().value())  # type: ignore[misc]

    def read_value(self) -> Any:
        return self._phalanx_read(super().read_value())  # type: ignore[misc]

    def sparse_read(self, indices: Any, name: Any = None) -> Any:
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: Any, name: Any = None) -> Any:
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return self._phalanx_write(super().assign, value, use_locking, name, read_value)  # type: ignore[misc]

    def assign_add(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return self._phalanx_write(super().assign_add, delta, use_locking, name, read_value)  # type: ignore[misc]

    def assign_sub(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return self._phalanx_write(super().assign_sub, delta, use_locking, name, read_value)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<tf.Variable {self.name!r}, merged over the replicas where it is read>"  # type: ignore[attr-defined]

    def _serialize_to_tensors(self) -> Any:
        own = super()._serialize_to_tensors()  # type: ignore[misc]
        return merged_for_checkpoint(own, self._phalanx_merger, self._phalanx_aggregation, self.name)  # type: ignore[attr-defined]

    def _restore_from_tensors(self, restored: Any) -> Any:
        own = local_parts(restored, self._phalanx_merger, self._phalanx_aggregation)
        return super()._restore_from_tensors(own)  # type: ignore[misc]

    def _phalanx_read(self, own: Any) -> Any:
        merger = self._phalanx_merger
        return merger.merge(own, self._phalanx_aggregation) if merger.merges_reads() else own

    def _phalanx_write(self, write: Any, value: Any, use_locking: Any, name: Any, read_value: bool) -> Any:
        self._phalanx_check()
        if not self._phalanx_merger.merges_reads():
            return write(value, use_locking, name, read_value)
        value = tf.convert_to_tensor(value, self.dtype)  # type: ignore[attr-defined]
        own = self._phalanx_merger.local_part(value, self._phalanx_aggregation)
        operation = write(own, use_locking, name, False)
        return self if read_value else operation  # TensorFlow's return value would be read as this replica's


class _MergedOnWrite(_Merged):
    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return super().assign(self._phalanx_merged(value), use_locking, name, read_value)  # type: ignore[misc]

    def assign_add(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return super().assign_add(self._phalanx_merged(delta), use_locking, name, read_value)  # type: ignore[misc]

    def assign_sub(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return super().assign_sub(self._phalanx_merged(delta), use_locking, name, read_value)  # type: ignore[misc]

    def _phalanx_merged(self, value: Any) -> Any:
        self._phalanx_check()
        if not self._phalanx_merger.merges_writes():
            return value
        value = tf.convert_to_tensor(value, self.dtype)  # type: ignore[attr-defined]
        return self._phalanx_merger.merge(value, self._phalanx_aggregation)
