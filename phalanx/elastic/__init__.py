"""Elastic training: members join and leave a running job.

`phalanx.elastic.run` and `phalanx.elastic.State` are the public interface for custom training loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.elastic.custom_loop import State, run

__all__ = ["State", "run"]


def __getattr__(name: str) -> Any:
    # Imported when first used: the launcher imports this package and never needs a strategy.
    if name in __all__:
        from phalanx.elastic import custom_loop

        return getattr(custom_loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
