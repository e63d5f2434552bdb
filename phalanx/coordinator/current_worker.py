"""The index of this worker, for scheduled functions and those that create per-worker values."""

from __future__ import annotations

_index: int | None = None


def experimental_get_current_worker_index() -> int:
    """Number of the worker that runs this function, from 0, not counting the chief
    (`tf.distribute.coordinator.experimental_get_current_worker_index`).

    Raises:
        RuntimeError: this is not called on a worker that runs the functions of a coordinator.
    """
    if _index is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() was called outside of the functions that workers run: call it in "
            "one that is given to ClusterCoordinator.schedule() or create_per_worker_dataset()."
        )
    return _index


def set_index(index: int) -> None:
    """Set the number of the worker as which this process runs functions."""
    global _index
    _index = index
