"""Describing an optimizer to a server costs nothing that a job's start would show."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.backends import BACKENDS
from tests.training.jobs import ROOT

PROGRAM = """
import sys
import keras
import numpy as np
from phalanx.backends import make_updater
from phalanx.backends.updater import Piece, description_of, slots_of_model

variable = keras.Variable(np.zeros((3, 4), "float32"))
optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.8), momentum=0.9)
optimizer.build([variable])
constraint = description_of(keras.constraints.NonNeg())
updater = make_updater(description_of(optimizer), [Piece("v", np.zeros((3, 4), "float32"), constraint, True)])
assert updater.slots == slots_of_model(optimizer, [variable])
assert "tensorflow" not in sys.modules
import tensorflow
from keras.src.utils import module_utils
assert module_utils.tensorflow.available
"""


@pytest.mark.skipif(not {"jax", "tensorflow"} <= set(BACKENDS), reason="needs JAX, and TensorFlow beside it")
def test_tensorflow_is_not_imported_to_describe_an_optimizer_on_jax() -> None:
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=120,
        check=True,
    )
