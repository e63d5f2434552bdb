"""Variables of metrics that several replicas update, each its own: a read outside of `strategy.run` is of all of them.

`tf.distribute` treats variables with `synchronization="on_read"` so, and Keras's metrics have such. The job's value is
what the replicas' values come to, as the variable's `aggregation` says. When a value is assigned outside, the first
replica keeps it, and the others keep what adds nothing.

Uses `KerasVariable._direct_assign` and the stateless scopes. Tested with Keras 3.15.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from keras.src.backend.common.stateless_scope import in_stateless_scope

from phalanx.keras_compat.patching import insert_mixin, set_untracked

ON_READ = "on_read"


class ReplicaParts(Protocol):
    """What knows the other replicas."""

    def is_in_run(self) -> bool:
        """Whether the code that runs now is inside `strategy.run`."""
        ...

    def merges_now(self) -> bool:
        """Whether the code that runs now sees the job's values and not this replica's."""
        ...

    def reading_own(self) -> AbstractContextManager[None]:
        """Where the code sees this replica's values."""
        ...

    def merge(self, value: Any, aggregation: str) -> Any:
        """The job's value; called on all replicas."""
        ...

    def own_part(self, value: Any, aggregation: str) -> Any:
        """What this replica keeps of a value that is assigned to the job's."""
        ...


def merge_on_read(metric: Any, parts: ReplicaParts, *, updated: bool = False) -> None:
    """Let the metric's variables be the job's outside of `strategy.run`, once they were assigned inside.

    Safe to call again.

    Args:
        updated: whether variables that it finds for the first time were created, and so assigned, inside.
    """
    for variable in metric._variables:
        is_kept_apart = variable.synchronization == ON_READ and variable.aggregation != "none"
        if is_kept_apart and not isinstance(variable, _MergedOnRead):
            insert_mixin(variable, _MergedOnRead)
            set_untracked(variable, _phalanx_parts=parts, _phalanx_updated=updated)


class _MergedOnRead:
    """Comes before the class of a Keras variable."""

    _phalanx_parts: ReplicaParts
    _phalanx_updated: bool
    """Whether `strategy.run` has assigned it, or is being traced. What the chief alone counts stays the chief's."""

    @property
    def value(self) -> Any:
        own = super().value  # type: ignore[misc]
        if not self._phalanx_updated or in_stateless_scope() or not self._phalanx_parts.merges_now():
            return own
        return self._phalanx_parts.merge(own, self.aggregation)  # type: ignore[attr-defined]

    def _direct_assign(self, value: Any) -> None:
        parts = self._phalanx_parts
        if parts.is_in_run() and not self._phalanx_updated:
            set_untracked(self, _phalanx_updated=True)
        if self._phalanx_updated and parts.merges_now():
            value = parts.own_part(value, self.aggregation)  # type: ignore[attr-defined]
        with parts.reading_own():  # PyTorch's copies into the value that it reads
            super()._direct_assign(value)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}, merged over the replicas where it is read>"  # type: ignore[attr-defined]

    # Of `tf.train.Checkpoint`, which the chief alone may call: this replica's.

    @property
    def handle(self) -> Any:
        return self._value.handle  # type: ignore[attr-defined]

    @property
    def _shared_name(self) -> Any:
        return self._value._shared_name  # type: ignore[attr-defined]

    def _serialize_to_tensors(self) -> Any:
        return self._value._serialize_to_tensors()  # type: ignore[attr-defined]

    def _restore_from_tensors(self, restored: Any) -> Any:
        return self._value._restore_from_tensors(restored)  # type: ignore[attr-defined]

    def _write_object_proto(self, proto: Any, options: Any) -> Any:
        return self._value._write_object_proto(proto, options)  # type: ignore[attr-defined]
