"""The other name of `phalanx.horovod.keras.elastic`, as Horovod has it."""

from __future__ import annotations

from phalanx.horovod.keras import elastic
from phalanx.horovod.keras.elastic import *  # noqa: F403

__all__ = [*elastic.__all__]
