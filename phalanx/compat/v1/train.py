"""The names of `tf.train` in TensorFlow 1; those for distributed training are Phalanx's."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1.train as _tensorflow

from phalanx.compat.unsupported_names import missing_attribute
from phalanx.tensorflow1.graph_server import Server
from phalanx.tensorflow1.graph_sessions import (
    ChiefSessionCreator,
    MonitoredTrainingSession,
    Supervisor,
    WorkerSessionCreator,
)

__all__ = ["ChiefSessionCreator", "MonitoredTrainingSession", "Server", "Supervisor", "WorkerSessionCreator"]


def __getattr__(name: str) -> Any:
    try:
        return getattr(_tensorflow, name)
    except AttributeError:
        raise missing_attribute(__name__, name) from None
