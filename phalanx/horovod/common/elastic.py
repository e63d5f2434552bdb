"""An alias of `phalanx.horovod.elastic`: `from phalanx.horovod.common.elastic import ObjectState`, as in Horovod."""

from __future__ import annotations

from phalanx.horovod.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "run"]
