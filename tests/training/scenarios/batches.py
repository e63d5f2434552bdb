"""The methods that take one batch."""

from __future__ import annotations

from typing import Any

import keras

from tests.training.scenarios.common import compiled, features, labels, weights
from tests.training.scenarios.registry import Setting, scenario


@scenario()
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
