"""An alias of `phalanx.horovod.keras`, as in Horovod: `import phalanx.horovod.tensorflow.keras as hvd`."""

from __future__ import annotations

from phalanx.horovod import keras
from phalanx.horovod.keras import *  # noqa: F403

__all__ = [*keras.__all__]
