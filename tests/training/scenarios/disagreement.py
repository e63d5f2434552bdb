"""Ranks that differ in what must be equal: the same error on every rank, and the job can continue."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.support.seeds import set_random_seed
from tests.training.scenarios.common import FEATURES, compiled, features, fitted, labels
from tests.training.scenarios.registry import BACKENDS, ONE_BACKEND, Setting, scenario


def _on_all(kind: str, text: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(BACKENDS, (kind, text))


@scenario(error=_on_all("DisagreementError", "second/kernel"), quick=ONE_BACKEND)
def model_of_other_width_on_one_rank(setting: Setting) -> dict[str, Any]:
    width = 5 if setting.rank == setting.world_size - 1 else 4

    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(3, name="first"),
                keras.layers.Dense(width, name="second"),
                keras.layers.Dense(3, activation="softmax", name="third"),
            ]
        )

    return fitted(compiled(setting, build))


@scenario(needs=("torch",), error=_on_all("DisagreementError", "random_split"), quick=ONE_BACKEND)
def other_subset_of_a_data_loader_on_one_rank(setting: Setting) -> dict[str, Any]:
    import torch

    samples = torch.utils.data.TensorDataset(torch.from_numpy(features()), torch.from_numpy(labels()))
    own = torch.Generator().manual_seed(setting.rank)
    chosen, _ = torch.utils.data.random_split(samples, [20, len(samples) - 20], generator=own)
    compiled(setting).fit(torch.utils.data.DataLoader(chosen, batch_size=5), verbose=0)
    return {}


@scenario(error=_on_all("DisagreementError", "optimizer"))
def other_optimizer_on_one_rank(setting: Setting) -> dict[str, Any]:
    optimizer = keras.optimizers.Adam() if setting.rank else keras.optimizers.SGD(momentum=0.9)
    return fitted(compiled(setting, optimizer=optimizer))


@scenario(error=_on_all("DisagreementError", "momentum of SGD is 0.9 on rank 0, and 0.8 on rank 1"))
def other_momentum_on_one_rank(setting: Setting) -> dict[str, Any]:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9 if setting.rank == 0 else 0.8)
    return fitted(compiled(setting, optimizer=optimizer))


@scenario(error=_on_all("DisagreementError", "metrics is ['accuracy'] on rank 0, and ['mae'] on rank 1"))
def other_metrics_on_one_rank(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, metrics=["mae" if setting.rank else "accuracy"]))


@scenario(error=_on_all("DisagreementError", "epochs of fit() is 2 on rank 0, and 3 on rank 1"))
def other_epochs_on_one_rank(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting), epochs=3 if setting.rank else 2)


@scenario(
    error=_on_all("DisagreementError", "validation data of fit() is 'given' on rank 0, and 'not given' on rank 1")
)
def validation_data_on_one_rank(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting), validation_data=None if setting.rank else (features(9), labels(9)))


@scenario(error=_on_all("DisagreementError", "different data"), quick=ONE_BACKEND)
def other_length_of_data_on_one_rank(setting: Setting) -> dict[str, Any]:
    samples = 33 + setting.rank
    return fitted(compiled(setting), features(samples), labels(samples))


@scenario(error=_on_all("DisagreementError", "different data"))
def other_length_of_validation_data_on_one_rank(setting: Setting) -> dict[str, Any]:
    validation = features(9 + setting.rank), labels(9 + setting.rank)
    return fitted(compiled(setting), validation_data=validation)


@scenario(error=_on_all("DisagreementError", "different data"))
def other_batch_size_on_one_rank(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting), batch_size=16 + setting.rank)


@scenario(error=_on_all("DisagreementError", "The data ended on rank 1 after 4 batches"))
def a_stream_that_ends_early_on_one_rank(setting: Setting) -> dict[str, Any]:
    batches = ((features(8, seed=i), labels(8, seed=i)) for i in range(4 if setting.rank == 1 else 6))
    return {"history": compiled(setting).fit(batches, verbose=0).history}


@scenario(plain=False, quick=ONE_BACKEND)
def other_initial_weights_are_the_chiefs(setting: Setting) -> dict[str, Any]:
    set_random_seed(100 + setting.rank)
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.0))
    return fitted(model)


@scenario(error=_on_all("DisagreementError", "another order"), quick=ONE_BACKEND)
def data_in_another_order_on_one_rank(setting: Setting) -> dict[str, Any]:
    x, y = features(), labels()
    return fitted(compiled(setting), x[:: -1 if setting.rank else 1].copy(), y[:: -1 if setting.rank else 1].copy())


@scenario(quick=ONE_BACKEND)
def weights_that_the_chief_alone_sets_are_everybodys(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, metrics=["accuracy"])
    fitted(model)
    best = [np.full_like(weight, 0.1 * (i + 1)) for i, weight in enumerate(model.get_weights())]
    best[0][0] = -1.0
    if setting.alone or setting.rank == 0:
        model.set_weights(best)
    evaluated = model.evaluate(features(), labels(), batch_size=10, verbose=0)
    if setting.alone or setting.rank == 0:
        model.set_weights([2 * weight for weight in best])
    return {"evaluate": evaluated, "predict": model.predict(features(), batch_size=10, verbose=0)}


@scenario(quick=ONE_BACKEND)
def only_the_chief_shows_the_evaluation(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, metrics=["accuracy"])
    shows = 1 if setting.alone or setting.rank == 0 else 0
    return {"evaluate": model.evaluate(features(), labels(), batch_size=10, verbose=shows)}


@scenario(error=_on_all("DisagreementError", "Rank 0 called evaluate() where rank 1 called fit()"))
def evaluation_by_the_chief_alone(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    if setting.rank == 0:
        model.evaluate(features(), labels(), verbose=0)
    return fitted(model)


@scenario(error=_on_all("ConfigurationError", "lstm is stateful, with a state for each of the 11 samples"))
def stateful_layer_for_the_global_batch(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input(batch_shape=(11, FEATURES, 1))
        return keras.Sequential([inputs, keras.layers.LSTM(3, stateful=True, name="lstm"), keras.layers.Dense(3)])

    x = features()[..., None]
    return fitted(compiled(setting, build), x, labels(), batch_size=11)
