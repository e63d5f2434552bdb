"""`tf.distribute.experimental_set_strategy`: a scope that lasts until the next call, not until the end of a block."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from phalanx.errors import ConfigurationError
from phalanx.strategies.replica_context import has_strategy
from phalanx.strategies.strategy import Strategy


class _CurrentScope(threading.local):
    """The scope that this thread is inside."""

    def __init__(self) -> None:
        self.scope = ExitStack()


_current_scope = _CurrentScope()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter a strategy's scope until the next call. Prefer `with strategy.scope():`, which ends with its block.

    Args:
        strategy: Strategy whose scope replaces that of the last call in this thread. None: leave the scope.

    Raises: ConfigurationError inside `with strategy.scope():`.
    """
    _current_scope.scope.close()
    if has_strategy():
        raise ConfigurationError(
            "experimental_set_strategy() was called inside a strategy's scope, which it would leave. Call it outside "
            "of `with strategy.scope():`."
        )
    if strategy is not None:
        _current_scope.scope.enter_context(strategy.scope())
