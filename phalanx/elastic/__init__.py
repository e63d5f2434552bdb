"""Elastic training: members join and leave a running job.

`phalanx.elastic.run` and `phalanx.elastic.State` are the public interface for custom training loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.strategies.elastic_state import State, run

__all__ = ["State", "run"]


def __getattr__(name: str) -> Any:
    # The public names belong to `strategies`, a higher layer. They are imported on first use, because the launcher
    # also imports this package and must import neither `strategies` nor Keras.
    if name in __all__:
        from phalanx.strategies import elastic_state

        return getattr(elastic_state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
