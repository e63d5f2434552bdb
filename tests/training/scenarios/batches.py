"""The methods that take one batch."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tests.training.scenarios.common import BATCH, FEATURES, compiled, features, labels, weights
from tests.training.scenarios.registry import BACKENDS, Setting, scenario


@scenario(quick=BACKENDS)
def single_batches(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=keras.optimizers.Adam(0.05), metrics=["accuracy"])
    x, y = features(7), labels(7)
    logs = [model.train_on_batch(x, y, sample_weight=weights(7), return_dict=True)]
    logs += [model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0}, return_dict=True)]
    logs += [model.train_on_batch(x[:1], y[:1], return_dict=True)]
    return {
        "train": logs,
        "list": [float(value) for value in model.train_on_batch(x, y)],
        "test": model.test_on_batch(x, y, return_dict=True),
        "predict": model.predict_on_batch(x),
        "predict_one": model.predict_on_batch(x[:1]),
        "weights": model.get_weights(),
    }


@scenario()
def single_batches_after_fit(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    model.fit(features(), labels(), batch_size=16, shuffle=False, verbose=0)
    return {"loss": float(model.train_on_batch(features(5), labels(5))), "weights": model.get_weights()}


@scenario()
def saved_while_gradients_accumulate(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.2, gradient_accumulation_steps=3))
    for _ in range(4):
        model.train_on_batch(features(8), labels(8))
    model.fit(features(28), labels(28), batch_size=8, shuffle=False, verbose=0)
    model.fit(features(32), labels(32), batch_size=8, shuffle=False, verbose=0)
    state = [ops.convert_to_numpy(variable) for variable in model.optimizer.variables]
    return {"weights": model.get_weights(), "optimizer": state}


@scenario()
def outputs_with_several_rows_for_each_sample(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, [inputs, keras.layers.Lambda(lambda x: ops.reshape(x, (-1, 2)))(inputs)])

    model = compiled(setting, build, loss=None)
    return {
        "predict": model.predict(features(), batch_size=BATCH, verbose=0),
        "one": model.predict_on_batch(features(1)),
    }


@scenario(quick=BACKENDS)
def outputs_without_a_row_for_each_sample(setting: Setting) -> dict[str, Any]:
    """As many columns as a replica has samples, a table of the features, and one number."""
    x = features(8)[:, :4]

    def build(function: Any) -> Any:
        inputs = keras.Input((4,))
        return keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Lambda(function)(inputs)])

    def predicted(function: Any) -> Any:
        model = compiled(setting, lambda: build(function), loss=None)
        return [
            model.predict(x, batch_size=4, verbose=0),
            model.predict(((x[:8],) for _ in range(3)), verbose=0),
            model.predict_on_batch(x),
            model.predict(x, batch_size=4, verbose=0),
        ]

    return {
        "transposed": predicted(ops.transpose),
        "correlated": predicted(lambda x: ops.matmul(ops.transpose(x), x)),
        "number": compiled(setting, lambda: build(ops.sum), loss=None).predict_on_batch(x),
    }


@scenario(error=dict.fromkeys(BACKENDS, ("UnsupportedError", "which rows belong to which sample")))
def outputs_of_a_batch_as_a_whole(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, keras.layers.Lambda(lambda x: ops.concatenate([x, x[:1]]))(inputs))

    return {"predict": compiled(setting, build, loss=None).predict(features(8), verbose=0)}
