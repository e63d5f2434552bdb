"""The names of `tf.tpu.experimental`."""

from __future__ import annotations

from typing import Any

from phalanx.compat.unsupported_names import missing_attribute
from phalanx.strategies.tpu_system import Topology, initialize_tpu_system, shutdown_tpu_system

__all__ = ["Topology", "initialize_tpu_system", "shutdown_tpu_system"]


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
