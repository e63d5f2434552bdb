"""Describing an optimizer to a server costs nothing that a job's start would show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import pytest

from phalanx.keras_compat.copies.object_config import config_json_of
from tests.support.backends import BACKENDS
from tests.support.programs import check_python

PROGRAM = """
import sys
import keras
import numpy as np
from phalanx.engines import make_updater
from phalanx.keras_compat.copies.object_config import config_of, config_json_of
from phalanx.engines.updater import UpdaterPiece
from phalanx.keras_compat.variables.optimizer_slots import slots_of_model

variable = keras.Variable(np.zeros((3, 4), "float32"))
optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.8), momentum=0.9)
optimizer.build([variable])
constraint = config_json_of(keras.constraints.NonNeg())
updater = make_updater(config_json_of(optimizer), [UpdaterPiece("v", np.zeros((3, 4), "float32"), constraint, True)])
assert updater.slots == slots_of_model(optimizer, [variable])
scaled = keras.optimizers.LossScaleOptimizer(optimizer)
for thing in optimizer, scaled, keras.losses.Huber(), keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error):
    assert config_of(thing) == config_of(thing)
assert "tensorflow" not in sys.modules
import tensorflow
from keras.src.saving import serialization_lib
assert serialization_lib.tf.available
"""


TRAINING = """
import sys
import keras
import numpy as np
import phalanx

x, y = np.ones((8, 3), "float32"), np.ones(8, "float32")
with phalanx.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)), keras.losses.Huber())
model.fit(x, y, batch_size=4, verbose=0)
assert "tensorflow" not in sys.modules
"""

beside_tensorflow = pytest.mark.skipif(
    not {"jax", "tensorflow"} <= set(BACKENDS), reason="needs JAX, and TensorFlow beside it"
)


@beside_tensorflow
def test_tensorflow_is_not_imported_to_describe_an_optimizer_on_jax() -> None:
    check_python("-c", PROGRAM, backend="jax")


@beside_tensorflow
def test_tensorflow_is_not_imported_to_compare_what_ranks_were_told(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    check_python("-m", "phalanx", "run", "--workers", "2", str(tmp_path / "training.py"), backend="jax")


@keras.saving.register_keras_serializable("test_object_config")
class Centralized(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer of the program."""


@keras.saving.register_keras_serializable("test_object_config")
class Halved(keras.constraints.Constraint):  # type: ignore[misc]
    """A constraint of the program."""


@pytest.mark.parametrize("thing", [Centralized(0.1), Halved()], ids=["optimizer", "constraint"])
def test_registered_classes_of_the_program_are_found_again(thing: Any) -> None:
    assert type(keras.saving.deserialize_keras_object(json.loads(config_json_of(thing)))) is type(thing)
