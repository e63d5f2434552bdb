"""An alias of `phalanx.horovod.keras.elastic`, as in Horovod."""

from __future__ import annotations

from phalanx.horovod.keras import elastic
from phalanx.horovod.keras.elastic import *  # noqa: F403

__all__ = [*elastic.__all__]
