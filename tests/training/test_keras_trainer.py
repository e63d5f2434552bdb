"""What callbacks and arguments do to Keras's own trainer, they do to that of replicas; here of one, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from phalanx.data import DatasetCreator, distribute_dataset, distribute_from_function
from phalanx.data.distributed_dataset import DatasetDistribution
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import trainer_hook
from phalanx.keras_compat.trainer_hook import KerasMethod
from phalanx.training.model_dispatch import ModelDispatcher, _trainer_of
from phalanx.training.replica import single_replica
from phalanx.training.replica_trainer import ReplicaTrainer
from tests.support.seeds import set_random_seed

SAMPLES, BATCH = 20, 8


def data() -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(SAMPLES, 3)).astype("float32")
    return x, x[:, :1] * 2 + 1


def trainers(optimizer: Callable[[], Any] = keras.optimizers.SGD) -> list[Any]:
    """Of two models that are alike: Keras's, which is the model itself, and that of replicas."""
    made = []
    for _ in range(2):
        set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse", run_eagerly=True)  # compiling takes longer
        made.append(model)
    return [made[0], ReplicaTrainer(made[1], single_replica())]


def losses(trainer: Any, *callbacks: Any, **arguments: Any) -> Any:
    x, y = data()
    settings = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    return trainer.fit(**settings, callbacks=[*callbacks]).history.get("loss", [])


class Stop(keras.callbacks.Callback):
    """Stops an evaluation or a prediction before its first batch."""

    def on_test_begin(self, logs: Any = None) -> None:
        self.model.stop_evaluating = True

    def on_predict_begin(self, logs: Any = None) -> None:
        self.model.stop_predicting = True


class Seen(Stop):
    """Sees single batches as well."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        assert batch == 0

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        assert batch == 0


@pytest.mark.parametrize("stopping", [Stop, Seen])
def test_an_evaluation_or_prediction_that_is_stopped_before_it_begins_has_one_batch(stopping: type[Stop]) -> None:
    x, y = data()
    plain, ours = trainers()
    options = {"batch_size": BATCH, "verbose": 0}
    found = [each.evaluate(x, y, callbacks=[stopping()], **options) for each in (plain, ours)]
    assert found[1] == pytest.approx(found[0])
    assert ours.evaluate(x, y, **options) == pytest.approx(plain.evaluate(x, y, **options))
    for each in (plain, ours):
        assert each.predict(x, callbacks=[stopping()], **options).shape == (BATCH, 1)
        assert each.predict(x, **options).shape == (SAMPLES, 1)


def test_an_epoch_that_is_stopped_before_it_begins_logs_its_step_also_where_gradients_are_accumulated() -> None:
    class StopTraining(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    plain, ours = trainers(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    assert losses(ours, StopTraining()) == pytest.approx(losses(plain, StopTraining()))


def test_an_epoch_logs_what_the_metrics_say_after_a_callback_has_evaluated() -> None:
    x, y = data()

    class Evaluate(keras.callbacks.Callback):
        def __init__(self, trainer: Any) -> None:
            super().__init__()
            self.trainer = trainer
            self.found = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.get_weights()  # on JAX, Keras puts all values into the variables when `model` is touched
            self.found = self.trainer.evaluate(x, y, verbose=0)

    plain, ours = map(Evaluate, trainers())
    assert losses(ours.trainer, ours) == pytest.approx(losses(plain.trainer, plain))
    assert ours.found == pytest.approx(plain.found)


def test_no_epoch_is_none_also_under_a_cap() -> None:
    keras.config.set_max_epochs(3)
    try:
        assert [losses(trainer, epochs=0) for trainer in trainers()] == [[], []]
    finally:
        keras.config.set_max_epochs(None)


def test_evaluate_refuses_what_it_does_not_know_as_keras_does() -> None:
    x, y = data()
    for trainer in trainers():
        with pytest.raises(ValueError, match=r"Arguments not recognized: \{'weights': 1\}"):
            trainer.evaluate(x, y, weights=1)


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end"])
def test_a_model_that_is_compiled_while_it_is_trained_is_refused(hook: str) -> None:
    """Keras fails at the next step, unless the program has it make another function of the step."""
    _, ours = trainers()

    class Compile(keras.callbacks.Callback):
        pass

    compiling = Compile()
    setattr(compiling, hook, lambda *_, **__: compiling.model.compile("adam", "mse"))
    with pytest.raises(UnsupportedError, match="compiled in the middle of fit"):
        losses(ours, compiling, batch_size=SAMPLES)


def test_a_model_may_be_compiled_when_it_has_been_trained() -> None:
    _, ours = trainers()
    compiling = keras.callbacks.LambdaCallback(on_train_end=lambda logs: compiling.model.compile("adam", "mse"))
    assert losses(ours, compiling)


def batches(context: Any = None) -> Iterator[Any]:
    x, y = data()
    return ((x[start : start + BATCH], y[start : start + BATCH]) for start in range(0, SAMPLES, BATCH))


ALONE = DatasetDistribution(rank=0, world_size=1, seed=0)
DATASETS = {
    "creator": lambda: DatasetCreator(batches),
    "distributed": lambda: distribute_dataset(batches(), ALONE),
    "from a function": lambda: distribute_from_function(batches, ALONE),
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
def test_one_replica_takes_the_datasets_that_several_take(make: Callable[[], Any]) -> None:
    """Keras itself trains it, which does not know these."""
    model, _ = trainers()
    dispatcher = ModelDispatcher(lambda: None, lambda gradients, variables: gradients)

    def call(name: str, **arguments: Any) -> Any:
        return dispatcher.run(model, KerasMethod.of(getattr(keras.Model, name)), (make(),), {"verbose": 0, **arguments})

    history = call("fit", validation_data=make()).history
    assert history["val_loss"] == pytest.approx([model.evaluate(*data(), verbose=0)])
    assert call("evaluate") == pytest.approx(history["val_loss"][0])
    assert call("predict").shape == (SAMPLES, 1)


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
def test_a_worker_among_parameter_servers_evaluates_them_too(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trainers()
    for name in ("evaluate", "predict"):
        monkeypatch.setitem(trainer_hook._keras_methods, name, KerasMethod.of(getattr(keras.Model, name)))
    worker: Any = SimpleNamespace(client=None, workers=1, rules=SimpleNamespace(synchronous=False))
    trainer = _trainer_of(model, worker)
    assert trainer.evaluate(make(), verbose=0) == pytest.approx(model.evaluate(*data(), verbose=0))
    assert trainer.predict(make(), verbose=0).shape == (SAMPLES, 1)
