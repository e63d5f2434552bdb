"""The public path of the compressors, as in Horovod. They are the same for all frameworks."""

from __future__ import annotations

from phalanx.horovod.compressors import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
