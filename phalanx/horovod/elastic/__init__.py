"""Jobs whose members come and go, for every framework; each has its own `elastic` besides. Names are Horovod's."""

from __future__ import annotations

from phalanx.horovod.elastic.loop import run
from phalanx.horovod.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "run"]
