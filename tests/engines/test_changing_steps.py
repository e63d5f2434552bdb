"""Engines take steps that differ from those before, as plain Keras does."""

from __future__ import annotations

import pytest

from tests.support.backends import BACKENDS
from tests.support.programs import check_python

PROGRAM = """
import sys
import keras, numpy as np
from phalanx.engines import make_engine
from phalanx.engines.local_ranks import LocalRanks
from phalanx.keras_compat import model_state

rng = np.random.default_rng(0)
x, y = rng.normal(size=(2, 8, 3)).astype("float32")
weight = np.linspace(0, 1, 8, dtype="float32")


class Logging(keras.Sequential):
    # Of batches with weights.
    def train_step(self, *arguments):
        data = arguments[-1]
        result = super().train_step(*arguments)
        logs = result[0] if len(arguments) == 2 else result
        if len(data) == 3 and data[2] is not None:
            logs = {**logs, "of weights": {"mean": keras.ops.mean(data[2])}}
        return (logs, result[1]) if len(arguments) == 2 else logs


def made():
    kind = Logging if sys.argv[1] == "logs_more" else keras.Sequential
    model = kind([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    model.set_weights([np.random.default_rng(1).normal(size=each.shape) for each in model.get_weights()])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    return model


def freezes(model, step):
    # Without another `compile`: on PyTorch, Keras looks at every step which weights are trained.
    model.layers[0].trainable, model.layers[1].trainable = step != 1, step != 2
    return x, y, weight


def changes_dtype(model, step):
    return x, y.round().astype("int32") if step % 2 else y, weight


def logs_more(model, step):
    return x, y, weight if step % 2 else None


scenario = globals()[sys.argv[1]]
model, plain = made(), made()
ranks = LocalRanks()
ranks.be_whole()
engine = make_engine(model, ranks)
engine.build((x, y, weight))
engine.metric_rules.decide(engine.metric_rules.rules)
for step in range(4):
    batch = scenario(model, step)
    scenario(plain, step)
    engine.begin()
    engine.train(batch, 1.0)
    engine.end()
    plain.train_on_batch(*batch)
    more = {"of weights": {"mean": 0.5}} if scenario is logs_more and step % 2 else {}
    logs = model_state.plain_logs(engine.logs())
    assert logs == {"loss": logs["loss"], **more}
for ours, keras_own in zip(model.get_weights(), plain.get_weights(), strict=True):
    np.testing.assert_allclose(ours, keras_own, rtol=1e-5, atol=1e-6)
"""


CASES = [("freezes", "torch"), ("changes_dtype", "jax"), *(("logs_more", name) for name in BACKENDS)]


@pytest.mark.parametrize(("scenario", "backend"), CASES)
def test_a_step_is_that_of_plain_keras_whatever_was_before(scenario: str, backend: str) -> None:
    if backend not in BACKENDS:
        pytest.skip(f"needs {backend}")
    check_python("-c", PROGRAM, scenario, backend=backend)
