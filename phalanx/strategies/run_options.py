"""Options of `tf.distribute` for how TensorFlow compiles a step for TPUs: accepted, without effect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class XLAOptions:
    """`tf.tpu.XLAOptions`, accepted so that existing programs run unchanged. Set options of XLA in XLA_FLAGS."""

    use_spmd_for_xla_partitioning: bool = True
    enable_xla_dynamic_padder: bool = True


@dataclass(frozen=True)
class RunOptions:
    """`tf.distribute.RunOptions`, accepted so that programs that pass it to `strategy.run` run unchanged.

    Batches may have any size, so there is nothing to choose.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: XLAOptions | None = None
