"""Reports the progress of training at each reduction of an optimizer's gradients.

The reports go to the launcher (`phalanx status`, the failure report) and to the timeline. A step is one update, counted
from 0 in each process. The end of a step is known in Keras's `fit` and in an optimizer's `step`; elsewhere, the
timeline shows only its reduction.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.monitoring import timeline
from phalanx.runtime import progress

T = TypeVar("T")
_numbers = itertools.count()
_reduction_wait_s = 0.0
_in_function = False  # for all threads: TensorFlow calls the host in a separate one


def reduction_wait_seconds() -> float:
    """Return the seconds that this process has spent in the reductions of its updates."""
    return _reduction_wait_s


def report_reduction(merge: Callable[[], T], *, applies_next: bool = False) -> T:
    """Call a function that reduces the gradients of one update, and return its result.

    Args:
        merge: The function.
        applies_next:Whether the caller applies the gradients next, and ends the step in the timeline.
    """
    global _reduction_wait_s
    progress.report("all_reduce", step=next(_numbers))
    began = time.perf_counter()
    timeline.current.enter("merge")
    result = merge()
    _reduction_wait_s += time.perf_counter() - began
    progress.enter("update")
    if applies_next or _in_function:
        timeline.current.enter("apply")
    else:
        timeline.current.leave()
    return result


def record_train_function(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap Keras's train function of one or several steps, to record its parts in the timeline."""

    def train_function(iterator: Any) -> Any:
        global _in_function
        timeline.current.enter("forward/backward")
        _in_function = True
        try:
            return function(iterator)
        finally:
            _in_function = False
            timeline.current.leave()

    return train_function
