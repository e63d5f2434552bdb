"""The walk of all ranks over one epoch."""

from __future__ import annotations

import numpy as np

from phalanx.data import ShardedInput
from phalanx.training.joint_batches import JointBatches
from phalanx.training.replica import single_replica
from tests.data.merging import shard_input


def shuffled() -> ShardedInput:
    x = np.arange(40.0)[:, None]
    return shard_input(x, x, batch_size=4, steps_per_epoch=6, shuffle=True, rank=0, world_size=1, seed=3)


def test_an_epoch_has_begun_before_its_first_batch_is_read() -> None:
    """There, where steps are not merged, checkpoints are taken and members join."""
    plain, disturbed, resumed = shuffled(), shuffled(), shuffled()
    for source in (plain, disturbed):
        list(source.epoch(0))
    batches = JointBatches(disturbed, 1, single_replica())
    resumed.position.resume_epoch(disturbed.position.running_epoch, batches.done)
    batches.reshard()
    after = JointBatches(resumed, 1, single_replica(), done=0)
    for batch in plain.epoch(1):
        for walk in (batches, after):
            joint = walk.next()
            assert joint is not None
            np.testing.assert_array_equal(joint.data[0], batch.data[0])
    assert batches.next() is after.next() is None
