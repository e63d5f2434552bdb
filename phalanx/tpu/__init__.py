"""The names of `tf.tpu`."""

from __future__ import annotations

from typing import Any

from phalanx.compat.unsupported_names import missing_attribute
from phalanx.strategies.run_options import XLAOptions
from phalanx.tpu import experimental as experimental

__all__ = ["XLAOptions", "experimental"]


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
