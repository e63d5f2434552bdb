"""Gradient compression: the values of a strategy's argument `compression=`, by name or as an object."""

from phalanx.compression.base_compression import Compression, Merged
from phalanx.compression.cast import BFloat16, Float16
from phalanx.compression.codec import Codec
from phalanx.compression.compression_registry import resolve
from phalanx.compression.power_sgd import PowerSGD
from phalanx.compression.quantized import Int4, Int6, Int8
from phalanx.compression.reducer import CompressedReducer
from phalanx.compression.top_k import TopK

__all__ = [
    "BFloat16",
    "Codec",
    "Compression",
    "Float16",
    "Int4",
    "Int6",
    "Int8",
    "Merged",
    "PowerSGD",
    "CompressedReducer",
    "TopK",
    "resolve",
]
