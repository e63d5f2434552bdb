"""Variables that each replica assigns separately. A read outside of `strategy.run`, or a write inside it, is merged as
the variable's `aggregation` says.

`tf.distribute` treats variables with `synchronization="on_read"` in this way: each replica assigns its own, and the
job's value is the merge of the replicas' values. Keras's metrics have such variables. If a value is assigned outside,
or restored, or existed before `run` first used the variable, the first replica keeps it, and the others keep the value
that adds nothing. Every other variable with an `aggregation` is the same on all replicas: what `strategy.run` assigns
or adds is merged first. What an optimizer assigns is already the same, because its gradients were merged.

Uses `KerasVariable._direct_assign`, `Variable._initialize` and the stateless scopes. Tested with Keras 3.15.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from keras.src.backend.common import KerasVariable
from keras.src.backend.common.stateless_scope import in_stateless_scope

from phalanx.keras_compat.patching import insert_mixin, set_untracked

ON_READ = "on_read"
_SYNCHRONIZED = (ON_READ, "on_write", "auto")

_creation = threading.local()


class VariableMerger(Protocol):
    """Merges the replicas' parts of a variable."""

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing to merge."""
        ...

    def add(self, variable: Any) -> None:
        """Register a variable that was created in the scope."""
        ...

    def is_in_run(self) -> bool:
        """Whether the current code runs inside `strategy.run`."""
        ...

    def is_in_fit(self) -> bool:
        """Whether the current code is a step of `fit` or a similar method."""
        ...

    def merges_reads(self) -> bool:
        """Whether the current code sees the job's values instead of this replica's."""
        ...

    def check_chief_read(self, name: str) -> None:
        """Check a read of this replica's part of a variable. Raises: UnsupportedError in a callback of the chief, which
        would mistake it for the whole."""
        ...

    def merges_writes(self) -> bool:
        """Whether values that the current code assigns may differ between replicas."""
        ...

    def local_reads(self) -> AbstractContextManager[None]:
        """Context in which code sees this replica's values."""
        ...

    def merge(self, value: Any, aggregation: str) -> Any:
        """Return the job's value. Call on all replicas. Raises: ConfigurationError if this aggregation has none."""
        ...

    def merge_for_checkpoint(self, value: Any, aggregation: str, name: str) -> Any:
        """Return the value to save under this name. Raises: as `merge`, and if not all replicas save it."""
        ...

    def local_part(self, value: Any, aggregation: str) -> Any:
        """Return this replica's part of a value that is assigned to the job's variable."""
        ...

    def assigns_merged_values(self) -> bool:
        """Whether the current code assigns the job's values, on every replica."""
        ...

    def outside_of_traces(self) -> AbstractContextManager[None]:
        """Context in which code computes at once, even while a function that contains it is traced."""
        ...


def registering(initialize: Callable[..., Any], register: Callable[[Any], None]) -> Callable[..., Any]:
    """Wrap `Variable._initialize` to call `register` with each Keras variable."""

    @functools.wraps(initialize)
    def method(self: Any, value: Any) -> None:
        _creation.is_keras = True
        try:
            initialize(self, value)
        finally:
            _creation.is_keras = False
        register(self)

    return method


def is_created_by_keras() -> bool:
    """Whether the backend variable being created holds the value of a Keras variable."""
    return getattr(_creation, "is_keras", False)


def merge_variable(variable: Any, merger: VariableMerger) -> None:
    """Make a Keras variable that has an aggregation belong to the job. Safe to call again."""
    if variable.synchronization in _SYNCHRONIZED and not isinstance(variable, _MergedOnRead | _MergedOnWrite):
        on_read = variable.synchronization == ON_READ
        insert_mixin(variable, _MergedOnRead if on_read else _MergedOnWrite)
        set_untracked(variable, _phalanx_merger=merger, _phalanx_is_local=merger.is_in_run())


def merged_for_checkpoint(
    tensors: dict[str, Any], merger: VariableMerger, aggregation: str, name: str
) -> dict[str, Any]:
    """Return the value that a `tf.train.Checkpoint` saves for a variable that is merged on read.

    Args:
        tensors: Save specs of this replica's value, which read the variable only when the checkpoint saves.
        merger: Access to the other replicas.
        aggregation: The variable's `aggregation`.
        name: Name of the variable.
    """

    def merging(own: Any) -> Any:
        def read() -> Any:
            value = own.tensor
            return merger.merge_for_checkpoint(value, aggregation, name) if merger.merges_reads() else value

        return type(own)(read, dtype=own.dtype, device=own.device)

    return {key: merging(own) for key, own in tensors.items()}


def local_parts(restored: dict[str, Any], merger: VariableMerger, aggregation: str) -> dict[str, Any]:
    """Return this replica's part of a variable that is merged on read, when a `tf.train.Checkpoint` restores it."""
    if not merger.merges_reads():
        return restored
    return {key: merger.local_part(value, aggregation) for key, value in restored.items()}


class MergedOnRead:
    """A variable that is merged on read, of Keras or of TensorFlow."""


class _MergedOnRead(MergedOnRead):
    """A mixin that precedes the class of a Keras variable."""

    _phalanx_merger: VariableMerger
    _phalanx_is_local: bool
    """Whether it holds this replica's part: `strategy.run` has used it, or is being traced. What `fit` leaves is whole,
    and what only the chief counts stays with the chief."""

    @property
    def value(self) -> Any:
        self._phalanx_make_local()
        own, merger = super().value, self._phalanx_merger  # type: ignore[misc]
        if not self._phalanx_is_local or in_stateless_scope():
            return own
        if merger.merges_reads():
            return merger.merge(own, self.aggregation)  # type: ignore[attr-defined]
        merger.check_chief_read(self.path)  # type: ignore[attr-defined]
        return own

    def _direct_assign(self, value: Any) -> None:
        self._phalanx_make_local()
        if isinstance(value, KerasVariable):  # on TensorFlow, which would read it later, and not on all replicas
            value = value.value
        if self._phalanx_is_local:
            if self._phalanx_merger.merges_reads():
                value = self._phalanx_merger.local_part(value, self.aggregation)  # type: ignore[attr-defined]
            elif self._phalanx_merger.assigns_merged_values():
                set_untracked(self, _phalanx_is_local=False)
        self._phalanx_keep(value)

    def _phalanx_make_local(self) -> None:
        """Keep this replica's part when `run` first uses the variable: its value, perhaps restored, is the job's."""
        merger = self._phalanx_merger
        if self._phalanx_is_local or in_stateless_scope() or not merger.is_in_run():
            return
        set_untracked(self, _phalanx_is_local=True)
        with merger.outside_of_traces():
            self._phalanx_keep_local()

    def _phalanx_keep_local(self) -> None:
        whole = super().value  # type: ignore[misc]
        own = self._phalanx_merger.local_part(whole, self.aggregation)  # type: ignore[attr-defined]
        if own is not whole:
            self._phalanx_keep(own)

    def _phalanx_keep(self, value: Any) -> None:
        with self._phalanx_merger.local_reads():  # on PyTorch, assignment copies into the value that it reads
            super()._direct_assign(value)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}, merged over the replicas where it is read>"  # type: ignore[attr-defined]

    # Called by `tf.train.Checkpoint`, on TensorFlow.

    @property
    def handle(self) -> Any:
        return self._value.handle  # type: ignore[attr-defined]

    @property
    def _shared_name(self) -> Any:
        return self._value._shared_name  # type: ignore[attr-defined]

    def _serialize_to_tensors(self) -> Any:
        variable: Any = self
        own: dict[str, Any] = variable._value._serialize_to_tensors()
        if not self._phalanx_is_local:
            return own
        return merged_for_checkpoint(own, self._phalanx_merger, variable.aggregation, variable.path)

    def _restore_from_tensors(self, restored: Any) -> Any:
        variable: Any = self
        if self._phalanx_is_local:
            restored = local_parts(restored, self._phalanx_merger, variable.aggregation)
        return variable._value._restore_from_tensors(restored)

    def _write_object_proto(self, proto: Any, options: Any) -> Any:
        return self._value._write_object_proto(proto, options)  # type: ignore[attr-defined]


class _MergedOnWrite:
    """A mixin that precedes the class of a Keras variable."""

    _phalanx_merger: VariableMerger

    def assign(self, value: Any) -> Any:
        return super().assign(self._phalanx_merged(value))  # type: ignore[misc]

    # Not `super().assign_add`, which calls `assign` of this class: the sum would be merged, too.
    def assign_add(self, value: Any) -> Any:
        return super().assign(self + self._phalanx_merged(value))  # type: ignore[misc]

    def assign_sub(self, value: Any) -> Any:
        return super().assign(self - self._phalanx_merged(value))  # type: ignore[misc]

    def _phalanx_merged(self, value: Any) -> Any:
        merger = self._phalanx_merger
        if in_stateless_scope() or not merger.merges_writes():
            return value
        value = self._convert_to_tensor(value, dtype=self._dtype)  # type: ignore[attr-defined]
        return merger.merge(value, self.aggregation)  # type: ignore[attr-defined]
