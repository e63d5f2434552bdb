"""Keras's Adam in one pass gives what Keras's own many passes give."""

from __future__ import annotations

import pytest

from tests.support.programs import check_python

pytestmark = pytest.mark.torch

PROGRAM = """
import keras, numpy as np, torch
from phalanx.engines.accelerations.torch_fused_adam import apply_in_one_pass, fused_adam

optimizers = keras.optimizers
decaying = optimizers.schedules.ExponentialDecay(0.01, 2, 0.9)
CASES = {
    "adam": (lambda: optimizers.Adam(0.01), "float32", True),
    "large epsilon": (lambda: optimizers.Adam(0.01, epsilon=0.1), "float32", True),
    "schedule": (lambda: optimizers.Adam(decaying), "float32", True),
    "adamw": (lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0, use_ema=True), "float32", True),
    "accumulation": (lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3), "float32", True),
    "float64": (lambda: optimizers.Adam(0.01), "float64", True),
    "float16": (lambda: optimizers.Adam(0.01), "float16", False),
    "amsgrad": (lambda: optimizers.Adam(0.01, amsgrad=True), "float32", False),
    "sgd": (lambda: optimizers.SGD(0.01, momentum=0.9), "float32", False),
}


def train(make, dtype, context, apply=lambda optimizer, *arguments: optimizer.apply(*arguments), start=1, steps=20):
    variables = [keras.Variable(np.full((30, 2), start * i, dtype)) for i in range(1, 4)]
    optimizer = make()
    optimizer.build(variables)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        gradients = [torch.tensor(rng.normal(size=(30, 2)).astype(dtype)) for _ in variables]
        with torch.no_grad(), context(optimizer):
            apply(optimizer, gradients, variables)
    return [keras.ops.convert_to_numpy(v) for v in (*variables, *optimizer.variables)]


class nothing:
    def __init__(self, optimizer): pass
    def __enter__(self): pass
    def __exit__(self, *error): pass


kernel, calls = torch._fused_adam_, []
torch._fused_adam_ = lambda *args, **options: (calls.append(1), kernel(*args, **options))
for name, (make, dtype, in_one_pass) in CASES.items():
    calls.clear()
    expected = train(make, dtype, nothing)
    assert not calls
    found = train(make, dtype, fused_adam)
    assert bool(calls) == in_one_pass, name
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
    calls.clear()
    done = []
    found = train(make, dtype, nothing, lambda *arguments: done.append(apply_in_one_pass(*arguments)))
    assert set(done) == {name in ("adam", "large epsilon", "float64")}, name
    if done[0]:
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
    else:
        assert not calls
    print(name, "ok")


# Weights at zero hide nothing of an update. Keras rounds 1 - b2^t, a thousandth, to the precision of a one.
for steps in (1, 3):
    make = lambda: optimizers.Adam(0.01)
    expected, found = (train(make, "float32", context, start=0, steps=steps) for context in (nothing, fused_adam))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8)


class Custom(optimizers.Adam):
    pass


def refused(make, gradient=lambda variable: torch.ones(tuple(variable.shape)), twice=False):
    variables = [keras.Variable(np.ones((30, 2), "float32"))] * (2 if twice else 1)
    optimizer = make()
    optimizer.build(variables[:1])
    calls.clear()
    with torch.no_grad(), fused_adam(optimizer):
        assert not apply_in_one_pass(optimizer, [gradient(v) for v in variables], variables)
        optimizer.apply([gradient(v) for v in variables], variables)
    assert not calls


def varying():
    optimizer = optimizers.Adam(0.01)
    optimizer.beta_1 = keras.Variable(0.9)
    return optimizer


refused(lambda: Custom(0.01))
refused(varying)
refused(lambda: optimizers.Adam(0.01), lambda variable: torch.ones((1, 2)))  # Keras broadcasts it
refused(lambda: optimizers.Adam(0.01), lambda variable: torch.ones((2, 30)).t())
refused(lambda: optimizers.Adam(0.01), twice=True)
"""


def test_one_pass_gives_the_same_weights_and_state() -> None:
    output = check_python("-c", PROGRAM, backend="torch", bound_s=200)
    assert output.count("ok") == 9
