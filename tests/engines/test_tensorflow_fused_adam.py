"""Keras's Adam on TensorFlow in one pass gives what Keras's own many passes give."""

from __future__ import annotations

import pytest

from tests.support.programs import check_python

pytestmark = pytest.mark.tensorflow

PROGRAM = """
import keras, numpy as np, tensorflow as tf
from contextlib import nullcontext
from phalanx.engines.accelerations.tensorflow_fused_adam import fused_adam

optimizers = keras.optimizers
decaying = optimizers.schedules.ExponentialDecay(0.01, 2, 0.9)


class Custom(optimizers.Adam):
    pass


def varying():
    optimizer = optimizers.Adam(0.01)
    optimizer.beta_1 = keras.Variable(0.9)
    return optimizer


CASES = {
    "adam": (lambda: optimizers.Adam(0.01), "float32", True),
    "large epsilon": (lambda: optimizers.Adam(0.01, epsilon=0.1), "float32", True),
    "beta that is rounded to 1": (lambda: optimizers.Adam(0.01, beta_2=1 - 1e-9), "float32", True),
    "schedule": (lambda: optimizers.Adam(decaying), "float32", True),
    "adamw": (lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0, use_ema=True), "float32", True),
    "accumulation": (lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3), "float32", True),
    "float64": (lambda: optimizers.Adam(0.01), "float64", True),
    "float16": (lambda: optimizers.Adam(0.01), "float16", False),
    "amsgrad": (lambda: optimizers.Adam(0.01, amsgrad=True), "float32", False),
    "custom": (lambda: Custom(0.01), "float32", False),
    "coefficient that varies": (varying, "float32", False),
    "sgd": (lambda: optimizers.SGD(0.01, momentum=0.9), "float32", False),
}
kernel, calls = tf.raw_ops.ResourceApplyAdam, []
tf.raw_ops.ResourceApplyAdam = lambda **options: (calls.append(1), kernel(**options))


def train(make, dtype, context):
    variables = [keras.Variable(np.full((30, 2), i, dtype)) for i in range(1, 4)]
    optimizer = make()
    optimizer.build(variables)
    rng = np.random.default_rng(0)

    @tf.function
    def step(*gradients):
        with context(optimizer):
            optimizer.apply(list(gradients), variables)

    for _ in range(20):
        step(*[tf.constant(rng.normal(size=(30, 2)).astype(dtype)) for _ in variables])
    return [keras.ops.convert_to_numpy(v) for v in (*variables, *optimizer.variables)]


for name, (make, dtype, in_one_pass) in CASES.items():
    expected = train(make, dtype, nullcontext)
    assert not calls
    found = train(make, dtype, fused_adam)
    assert bool(calls) == in_one_pass, name
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
    rounding = 1e-12 if dtype == "float64" else 1e-3 if dtype == "float16" else 1e-6
    for start, (a, b) in enumerate(zip(expected[:3], found[:3], strict=True), 1):
        np.testing.assert_allclose(a - start, b - start, rtol=rounding, atol=rounding, err_msg=name)
    calls.clear()
    print(name, "ok")

variable = keras.Variable(np.ones((30, 2), "float32"))
optimizer = optimizers.Adam(0.01)
optimizer.build([variable])
with fused_adam(optimizer):
    optimizer.apply([tf.IndexedSlices(tf.ones((2, 2)), [1, 3], [30, 2])], [variable])
assert not calls
"""


def test_one_pass_gives_the_same_weights_and_state() -> None:
    output = check_python("-c", PROGRAM, backend="tensorflow", bound_s=200)
    assert output.count("ok") == 12
