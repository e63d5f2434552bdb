"""What parameter servers cannot train is refused when the model is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import keras
import pytest

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.patching import set_untracked
from phalanx.runtime.undistributed_fit import OWNER
from phalanx.training import model_dispatch
from phalanx.training.checks.model_checks import check_stateless
from phalanx.training.model_dispatch import ModelDispatcher
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker


class TwoOptimizers(keras.Sequential):
    def __init__(self) -> None:
        super().__init__([keras.Input((2,)), keras.layers.Dense(1)])
        self.second = keras.optimizers.SGD()


def compiled(optimizer: Any, *layers: keras.layers.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def multi_optimizer() -> Any:
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD()))


def two_optimizers() -> keras.Model:
    model = TwoOptimizers()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compiled(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())), "Use the policy 'mixed_bfloat"),
        (lambda: compiled(keras.optimizers.Adafactor()), "Adafactor does not record"),
        (lambda: compiled(multi_optimizer()), "MultiOptimizer hides which optimizer"),
        (lambda: compiled(keras.optimizers.SGD(lambda: 0.1)), "a function as its learning rate"),
        (lambda: compiled("sgd", keras.layers.SpectralNormalization(keras.layers.Dense(2))), "sets its own weights"),
        (two_optimizers, "several optimizers"),
    ],
)
def test_what_servers_cannot_train_is_refused_at_compile(make: Callable[[], keras.Model], message: str) -> None:
    worker = object.__new__(ParameterServerWorker)
    dispatcher = ModelDispatcher(lambda: None, lambda gradients, variables: gradients)
    for model in (make(), compiled("adam")):
        dispatcher.register_model(model)  # no strategy: all are allowed
        set_untracked(model, **{OWNER: model_dispatch.ModelOwner(worker)})
    dispatcher.register_model(model)
    served = make()
    set_untracked(served, **{OWNER: model_dispatch.ModelOwner(worker)})
    with pytest.raises(UnsupportedError, match=message):
        dispatcher.register_model(served)


def test_a_stateful_layer_is_refused_for_several_workers() -> None:
    model = keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), keras.layers.LSTM(2, stateful=True, name="memory")])
    with pytest.raises(UnsupportedError, match="is stateful: it continues"):
        check_stateless(model)
    check_stateless(compiled("sgd"))


def test_a_fit_inside_of_another_one_is_refused() -> None:
    """The servers would give up the outer one's schedule."""
    worker = ParameterServerWorker(Mock(), 0, 2, Mock(), None, None, "")
    for _ in range(2):
        with worker.fitting(), pytest.raises(UnsupportedError, match="one model at a time"), worker.fitting():
            pass
