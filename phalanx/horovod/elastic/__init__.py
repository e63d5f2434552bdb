"""Elastic jobs with Horovod's interface, for every framework; each framework adds its own `elastic` module."""

from __future__ import annotations

from phalanx.horovod.elastic.loop import run
from phalanx.horovod.elastic.object_state import ObjectState, State

__all__ = ["ObjectState", "State", "run"]
