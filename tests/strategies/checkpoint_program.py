"""Variables that are merged on read, saved and restored with `tf.distribute`, and with Phalanx instead of it.

    python checkpoint_program.py tf.distribute FOLDER [CHECKPOINT]
    python checkpoint_program.py phalanx FOLDER [CHECKPOINT]

CHECKPOINT is one that the other has written in its FOLDER. What the first replica found goes to standard output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
import tensorflow as tf

import phalanx

AGGREGATIONS = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")


def main(distribute: Any, folder: str, *others: str) -> None:
    if distribute is tf.distribute:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
    strategy = distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    is_chief = getattr(strategy, "is_chief", True)
    with strategy.scope():
        variables = {
            how: tf.Variable(
                0.0,
                trainable=False,
                aggregation=tf.VariableAggregation[how],
                synchronization=tf.VariableSynchronization.ON_READ,
            )
            for how in AGGREGATIONS
        }

    def update() -> None:
        own = distribute.get_replica_context().replica_id_in_sync_group
        for variable in variables.values():
            variable.assign_add(tf.cast(own, tf.float32) + 1.0)

    def read() -> dict[str, float]:
        return {how: float(variable.read_value()) for how, variable in variables.items()}

    checkpoint = tf.train.Checkpoint(**variables)
    strategy.run(update)
    # As TensorFlow's guide for several workers has it: each saves, all but the chief to a folder to throw away.
    written = checkpoint.write(os.path.join(folder, "saved" if is_chief else "discarded", "variables"))
    strategy.run(update)
    steps = [read()]
    for path in (written, *others):
        checkpoint.read(path).assert_consumed()
        steps.append(read())
        strategy.run(update)
        steps.append(read())
    if is_chief:
        reader = tf.train.load_checkpoint(written)
        saved = {how: float(reader.get_tensor(f"{how}/.ATTRIBUTES/VARIABLE_VALUE")) for how in AGGREGATIONS}
        print(json.dumps({"saved": saved, "steps": steps}))
    if distribute is phalanx:
        checkpoint_if_preempted(checkpoint, variables["SUM"], os.path.join(folder, "preempted"), is_chief=is_chief)
        with pytest.raises(phalanx.errors.CollectiveMismatchError, match=r"saving 'Variable:0', which every replica"):
            checkpoint.write(written) if is_chief else strategy.reduce("SUM", variables["SUM"], axis=None)


def checkpoint_if_preempted(checkpoint: Any, variable: Any, folder: str, *, is_chief: bool) -> None:
    """Its handler does on each replica what saving needs."""
    variable.assign(5.0)
    config = phalanx.experimental.TerminationConfig(exit_fn=lambda: None)
    handler = phalanx.experimental.PreemptionCheckpointHandler(None, checkpoint, folder, config)
    if not is_chief:
        os.kill(os.getpid(), signal.SIGTERM)
    handler.save_checkpoint_if_preempted()
    variable.assign(6.0)
    checkpoint.restore(tf.train.latest_checkpoint(folder))
    assert float(variable) == 5
    assert len(os.listdir(folder)) == 3, "the chief's state, index and data"


if __name__ == "__main__":
    main(phalanx if sys.argv[1] == "phalanx" else tf.distribute, *sys.argv[2:])
