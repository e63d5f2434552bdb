"""Updates that take denormal numbers for zero give the weights of Keras's own, to the bit."""

from __future__ import annotations

import pytest

from tests.support.programs import check_python

pytestmark = pytest.mark.torch

PROGRAM = """
from unittest import mock

import keras, numpy as np, torch
from phalanx.engines.accelerations.torch_flush_denormals import denormals_as_zero, flushing_denormals
from phalanx.engines.accelerations.torch_fused_adam import fused_adam
from phalanx.engines.replica.torch.accelerated_updates import AcceleratedUpdates

DENORMAL = 5e-324
SMALLEST_NORMAL = np.finfo("float32").smallest_normal
optimizers = keras.optimizers


def denormals(values):
    return int(sum(((abs(v) < SMALLEST_NORMAL) & (v != 0)).sum() for v in values))


def train(make, context):
    # Half of the units stop to have a gradient after the first step.
    variables = [keras.Variable(np.linspace(-1, 1, 40, dtype="float32").reshape(4, 10)) for _ in range(2)]
    optimizer = make()
    optimizer.build(variables)
    rng, seen = np.random.default_rng(0), 0
    for step in range(60):
        gradients = rng.normal(size=(2, 4, 10)).astype("float32") * 10.0 ** rng.uniform(-25, 0, size=(2, 4, 10))
        if step:
            gradients[:, :, ::2] = 0.0
        with torch.no_grad(), context(optimizer):
            optimizer.apply([torch.tensor(g.astype("float32")) for g in gradients], variables)
        assert not DENORMAL == 0.0, "the processor still flushes"
        seen += denormals([v.numpy() for v in optimizer.variables])
    return [keras.ops.convert_to_numpy(v) for v in variables], [v.numpy() for v in optimizer.variables], seen


SAME = {
    "adam": lambda: optimizers.Adam(0.01, beta_1=0.1, beta_2=0.2),
    "amsgrad": lambda: optimizers.Adam(0.01, beta_1=0.1, beta_2=0.2, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, beta_1=0.1, beta_2=0.2, weight_decay=0.1, use_ema=True, clipnorm=0.5),
    "adamax": lambda: optimizers.Adamax(0.01, beta_1=0.1, beta_2=0.2),
    "nadam": lambda: optimizers.Nadam(0.01, beta_1=0.1, beta_2=0.2),
    "rmsprop": lambda: optimizers.RMSprop(0.01, rho=0.1, momentum=0.1, centered=True),
    "sgd": lambda: optimizers.SGD(0.01, momentum=0.1, nesterov=True),
}
for name, make in SAME.items():
    found, state, seen = train(make, AcceleratedUpdates())
    assert not seen, (name, seen)
    # Against the same kernel: a fused Adam rounds otherwise than Keras's.
    with mock.patch("phalanx.engines.accelerations.registry.is_enabled", lambda name: False):
        expected, plain_state, seen = train(make, fused_adam)
    assert seen, name
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    for a, b in zip(plain_state, state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=SMALLEST_NORMAL, err_msg=name)
    print(name, "ok")


class Custom(optimizers.SGD):
    pass


def replaced():
    optimizer = optimizers.SGD(0.01, momentum=0.1)
    update = optimizer._parallel_update_step
    vars(optimizer)["_parallel_update_step"] = lambda *arguments: update(*arguments)
    return optimizer


UNCHANGED = {
    "lion": lambda: optimizers.Lion(0.01, beta_1=0.1, beta_2=0.1),
    "small epsilon": lambda: optimizers.Adam(0.01, beta_1=0.1, beta_2=0.2, epsilon=1e-30),
    "small epsilon, amsgrad": lambda: optimizers.Adam(0.01, beta_1=0.1, beta_2=0.2, epsilon=1e-30, amsgrad=True),
    "subclass": lambda: Custom(0.01, momentum=0.1),
    "replaced": replaced,
}
for name, make in UNCHANGED.items():
    assert train(make, AcceleratedUpdates())[2], name
    print(name, "ok")

half = keras.Variable(np.full((3,), 1.0, "float16"))
optimizer = optimizers.SGD(0.01, momentum=0.1)
optimizer.build([half])
states = []
update = type(optimizer)._parallel_update_step
type(optimizer)._parallel_update_step = lambda *arguments: (states.append(DENORMAL == 0.0), update(*arguments))
with torch.no_grad(), AcceleratedUpdates()(optimizer):
    optimizer.apply([torch.ones(3, dtype=torch.float16)], [half])
assert states == [False]

# A program that flushes by itself continues to.
torch.set_flush_denormal(True)
with flushing_denormals(optimizers.SGD(0.01)), denormals_as_zero():
    pass
assert DENORMAL == 0.0
torch.set_flush_denormal(False)

# An update that fails leaves the processor as it was.
try:
    with denormals_as_zero():
        assert DENORMAL == 0.0
        raise ValueError
except ValueError:
    assert not DENORMAL == 0.0
print("settings ok")
"""


def test_weights_are_the_same_and_state_has_no_denormals() -> None:
    output = check_python("-c", PROGRAM, backend="torch")
    assert output.count("ok") == 7 + 5 + 1
