"""Makes TensorFlow trace a function again if more differs than its arguments.

A `tf.function` keeps a trace for each kind of arguments, with everything that was decided in Python during tracing.
Whether an optimizer merges its gradients is such a decision: a function that was first called outside of `strategy.run`
would never merge inside it. TensorFlow makes the context of its own strategies part of a trace's key
(`EagerContext.in_cross_replica_context`), and offers no way to do so for others. So `make_function_context`, which
builds that key, is patched. Tested with TensorFlow 2.21.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

logger = logging.getLogger(__name__)

Key = Callable[[], Hashable | None]
_keys: list[Key] = []


def add_trace_key(key: Key) -> None:
    """Keep separate traces for each value of `key()` from now on; None changes nothing. Safe to call twice."""
    if key in _keys:
        return
    if not _keys:
        _wrap()
    _keys.append(key)


def _wrap() -> None:
    try:
        from tensorflow.python.eager.polymorphic_function import function_context

        make = function_context.make_function_context
    except (ImportError, AttributeError):
        logger.warning(
            "This version of TensorFlow does not let traces be kept apart: call each tf.function either inside "
            "strategy.run or outside of it, not both."
        )
        return

    def make_with_keys(*args: Any, **kwargs: Any) -> Any:
        context = make(*args, **kwargs)
        # Without any, the context is unchanged: traces from outside of Phalanx's scopes are found as before.
        own = [value for key in _keys if (value := key()) is not None]
        return context._replace(context=(context.context, *own)) if own else context

    function_context.make_function_context = make_with_keys
