"""TensorFlow 1 programs: `import phalanx.compat.v1 as tf` instead of `import tensorflow as tf`.

Contains all names of `tensorflow.compat.v1`, in TensorFlow 1 mode (graphs and sessions). The names for distributed
training are Phalanx's: `tf.Session` and `InteractiveSession`, `tf.train.Server`, `Supervisor` and
`MonitoredTrainingSession`.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as _tensorflow

from phalanx.compat.unsupported_names import missing_attribute
from phalanx.compat.v1 import layers, train
from phalanx.tensorflow1.graph_sessions import InteractiveSession, Session

__all__ = ["InteractiveSession", "Session", "layers", "train"]

# TensorFlow 1 programs need this; every name that they use next depends on it.
_tensorflow.disable_v2_behavior()


def __getattr__(name: str) -> Any:
    try:
        return getattr(_tensorflow, name)
    except AttributeError:
        raise missing_attribute(__name__, name) from None
