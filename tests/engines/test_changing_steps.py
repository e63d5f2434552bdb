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


class Counting(keras.Sequential):
    # In some steps another metric.
    also = False

    @property
    def metrics(self):
        if not hasattr(self, "other"):
            self.other = keras.metrics.Mean(name="other")
        return [each for each in super().metrics if each is not self.other or self.also]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if self.also:
            self.other.update_state(y)
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {"loss": logs["loss"]}


KINDS = {"logs_more": Logging, "counts_more": Counting}


def made():
    kind = KINDS.get(sys.argv[1], keras.Sequential)
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


def counts_more(model, step):
    model.also = step % 2 == 1
    return x, y, weight


scenario = globals()[sys.argv[1]]
model, plain = made(), made()
engine = make_engine(model, LocalRanks())
engine.build((x, y, weight))
engine.metric_rules.decide(engine.metric_rules.rules)
for step in range(4):
    batch = scenario(model, step)
    scenario(plain, step)
    if scenario is counts_more:
        engine.build(batch)
        engine.metric_rules.decide(engine.metric_rules.rules)
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


FORMER = """
import keras, numpy as np
from phalanx.engines import make_engine
from phalanx.engines.local_ranks import LocalRanks

x = -np.ones((4, 3), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
engines = []
for activation in (keras.activations.linear, keras.activations.relu):
    model.layers[0].activation = activation
    model.compile("sgd", "mse")
    engines.append(make_engine(model, LocalRanks()))
    engines[-1].begin()
    outputs = engines[-1].predict((x, None, None))
    engines[-1].end()
assert not outputs.any(), outputs
"""


CASES = [
    *(("freezes", "torch"), ("changes_dtype", "jax"), ("counts_more", "jax"), ("counts_more", "torch")),
    *(("logs_more", name) for name in BACKENDS),
]


@pytest.mark.parametrize(("scenario", "backend"), CASES)
def test_a_step_is_that_of_plain_keras_whatever_was_before(scenario: str, backend: str) -> None:
    if backend not in BACKENDS:
        pytest.skip(f"needs {backend}")
    check_python("-c", PROGRAM, scenario, backend=backend)


@pytest.mark.jax
def test_a_model_that_is_compiled_again_is_traced_again_also_if_something_keeps_the_former_engine() -> None:
    check_python("-c", FORMER, backend="jax")
