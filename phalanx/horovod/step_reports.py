"""Where a program stands in its training, told at each merge of an optimizer's gradients: to the launcher (`phalanx
status`, the page about a failure) and to the timeline.

A step is one update, counted from 0 in each process since its beginning: which loop it belongs to is the program's own
business. Where a step ends is known in Keras's `fit` and in an optimizer's `step`; elsewhere the timeline has its merge
alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.monitoring import timeline
from phalanx.runtime import progress

T = TypeVar("T")
_numbers = itertools.count()
_in_function = False  # for all threads: TensorFlow calls the host in one of its own


def merged(merge: Callable[[], T], *, applied: bool = False) -> T:
    """What `merge` returns; the gradients of one update are merged in it.

    Args:
        applied: the caller applies them then, and ends the step in the timeline.
    """
    progress.report("all_reduce", step=next(_numbers))
    timeline.current.enter("merge")
    result = merge()
    progress.enter("update")
    if applied or _in_function:
        timeline.current.enter("apply")
    else:
        timeline.current.leave()
    return result


def recorded(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keras's function of a step, or of several, with its parts in the timeline."""

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
