"""`from phalanx.horovod.common.elastic import ObjectState`, as programs for Horovod write it."""

from __future__ import annotations

from phalanx.horovod.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "run"]
