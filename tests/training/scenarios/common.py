"""Small models and data that most scenarios share, and the observed results of a training run.

33 samples in global batches of 16: the last batch of an epoch holds one sample, fewer than there are replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.training.scenarios.registry import Setting

SAMPLES = 33
BATCH = 16
FEATURES = 6
CLASSES = 3


def features(samples: int = SAMPLES, width: int = FEATURES, seed: int = 0) -> Any:
    return np.random.default_rng([seed, 1]).normal(size=(samples, width)).astype("float32")


def labels(samples: int = SAMPLES, classes: int = CLASSES, seed: int = 0) -> Any:
    return np.random.default_rng([seed, 2]).integers(0, classes, samples).astype("int32")


def numbers(samples: int = SAMPLES, width: int = 1, seed: int = 0) -> Any:
    return np.random.default_rng([seed, 3]).normal(size=(samples, width)).astype("float32")


def weights(samples: int = SAMPLES, seed: int = 0) -> Any:
    """Sample weights; the first rank's part of the first batch weighs far more than the last rank's."""
    return np.linspace(3.0, 0.1, samples).astype("float32")


def classifier(**dense: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh", **dense),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def regressor() -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def compiled(setting: Setting, build: Callable[[], Any] = classifier, **arguments: Any) -> Any:
    """Create and compile a model in the scope, by default with SGD and cross entropy.

    SGD, because its weights show a wrong scale of the gradients, which Adam hides.
    """
    arguments.setdefault("optimizer", keras.optimizers.SGD(0.2))
    arguments.setdefault("loss", "sparse_categorical_crossentropy")
    with setting.scope():
        model = build()
        model.compile(**arguments)
    return model


def fitted(model: Any, x: Any = None, y: Any = None, **arguments: Any) -> dict[str, Any]:
    """Train for two epochs, in order and silently. Return history and weights."""
    x = features() if x is None else x
    y = labels() if y is None else y
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    history = model.fit(x, y, **arguments)
    return {"history": history.history, "weights": model.get_weights()}


def fitted_on(model: Any, data: Any, **arguments: Any) -> dict[str, Any]:
    """Like `fitted`, for a dataset with its own batches."""
    history = model.fit(data, **{"shuffle": False, "epochs": 2, "verbose": 0, **arguments})
    return {"history": history.history, "weights": model.get_weights()}


def observed(model: Any, x: Any = None, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
    """Return the results of `evaluate` and `predict` after training."""
    x = features() if x is None else x
    y = labels() if y is None else y
    return {
        "evaluate": model.evaluate(x, y, batch_size=BATCH, sample_weight=sample_weight, return_dict=True, verbose=0),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
    }
