"""The names of `tf.layers` in TensorFlow 1."""

from __future__ import annotations

from typing import Any

from phalanx.compat.unsupported_names import missing_attribute
from phalanx.tensorflow1.graph_layers import (
    average_pooling2d,
    batch_normalization,
    conv2d,
    dense,
    dropout,
    flatten,
    max_pooling2d,
)

__all__ = ["average_pooling2d", "batch_normalization", "conv2d", "dense", "dropout", "flatten", "max_pooling2d"]


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
