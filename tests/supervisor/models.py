"""A small model and its data, the same in every process."""

from __future__ import annotations

from typing import Any

from tests.support.seeds import set_random_seed

SAMPLES, FEATURES, BATCH = 160, 4, 16
STEPS = SAMPLES // BATCH


def make_model(width: int = 3, optimizer: Any = None, seed: int = 1, metrics: Any = ("mae",)) -> Any:
    import keras

    set_random_seed(seed)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=list(metrics))
    return model


def make_data() -> tuple[Any, Any]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def state_of(model: Any) -> list[Any]:
    """Weights and the optimizer's variables, as host arrays."""
    import keras
    import numpy as np

    return [np.array(keras.ops.convert_to_numpy(v)) for v in [*model.weights, *model.optimizer.variables]]
