"""What is trained with parameter servers, to be compared with plain Keras; and the program that does it.

    python -m tests.parameter_server.cases FOLDER CASE...

Every task runs it. The chief trains the same model once more without Phalanx, and writes both results.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.seeds import set_random_seed

SAMPLES, FEATURES, CLASSES = 101, 6, 3
BATCH = 20  # the last one has a single sample: fewer than there are workers


@dataclass
class Case:
    """A way to train, and what the result must be.

    Attributes:
        workers: for how many it is.
        strategy: arguments of ParameterServerStrategy.
        exact: whether the numbers must be those of one process.
        looks: whether a callback looks at the model between batches.
        sets: whether a callback sets weights between epochs.
        idles: whether a fit without epochs to make comes first.
        stops: after how many batches of the second epoch a callback stops the training; -1: none does.
        swaps: whether a callback exchanges the weights with their averages between epochs, and back.
        error: a part of the UnsupportedError that all workers raise instead.
    """

    workers: int
    strategy: dict[str, Any]
    optimizer: Callable[[Any], Any] = lambda keras: keras.optimizers.Adam(0.01)
    fit: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] = lambda keras: "sparse_categorical_crossentropy"
    model: Callable[[Any], Any] | None = None
    weighted: bool = False
    exact: bool = True
    looks: bool = False
    sets: bool = False
    idles: bool = False
    stops: int = -1
    swaps: bool = False
    error: str = ""


def _shards(count: int) -> Any:
    import phalanx

    return phalanx.FixedShardsPartitioner(count)


def _own_step(keras: Any) -> Any:
    """A model whose class trains itself."""
    from tests.training.scenarios.steps import STEPS

    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return STEPS[keras.backend.backend()](inputs, keras.layers.Dense(CLASSES, activation="softmax")(hidden))


def _own_evaluate(keras: Any) -> Any:
    """A model whose class validates what `fit` has prepared otherwise than other data, as KerasHub's do."""

    class Model(keras.Model):
        def evaluate(self, x: Any = None, y: Any = None, **options: Any) -> Any:
            if not options.get("_use_cached_eval_dataset"):
                x = 2 * x
            found = super().evaluate(x=x, y=y, **options)
            return {**found, "twice": 2.0} if options.get("return_dict") else found

    inputs = keras.Input((FEATURES,))
    return Model(inputs, keras.layers.Dense(CLASSES, activation="softmax")(inputs))


def _doubling(keras: Any) -> Any:
    """A model that depends on its mode, which PyTorch's modules have."""

    class Doubling(keras.Model):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return super().call(inputs * (2.0 if getattr(self, "training", True) else 1.0))

    inputs = keras.Input((FEATURES,))
    return Doubling(inputs, keras.layers.Dense(CLASSES, activation="softmax")(inputs))


def _centering(keras: Any) -> Any:
    """A model that uses the mean of a batch."""
    from tests.training.scenarios.own_code import Centering

    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8), Centering(), layers.Dense(CLASSES, "softmax")])


def _sum(keras: Any) -> Any:
    """A loss that is one sum over the batch."""
    entropy = keras.losses.sparse_categorical_crossentropy
    return lambda y, prediction: keras.ops.sum(entropy(y, prediction))


def _ratio(keras: Any) -> Any:
    """A loss that is a ratio of two sums over the batch."""

    def ratio(y: Any, prediction: Any) -> Any:
        ops = keras.ops
        chosen = ops.cast(ops.reshape(y, (-1,)) > 0, "float32")
        return ops.sum(chosen * keras.losses.sparse_categorical_crossentropy(y, prediction)) / (ops.sum(chosen) + 0.1)

    return ratio


def _wide(keras: Any) -> Any:
    """A model whose gradients pass through shared memory."""
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4096, "tanh"), layers.Dense(CLASSES, "softmax")])


def _scaled(keras: Any) -> Any:
    """A model with a variable without axes, of which NumPy likes to make a number."""

    class Scale(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

        def call(self, inputs: Any) -> Any:
            return inputs * self.factor

    layers = keras.layers
    hidden = [layers.Dense(8, "tanh"), Scale(), layers.Dense(CLASSES, "softmax")]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden])


def _of_float64(keras: Any) -> Any:
    """What JAX keeps in float32 all the same."""
    layers = keras.layers
    layer = layers.Dense(CLASSES, "softmax", dtype="float64")
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh", dtype="float64"), layer])


def _schedule(keras: Any) -> Any:
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)


def _decaying_but_kernels(keras: Any) -> Any:
    optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    return optimizer


CASES = {
    "alone": Case(1, {}),
    "alone_in_pieces_clipped": Case(
        1, {"variable_partitioner": 2}, lambda keras: keras.optimizers.AdamW(0.02, global_clipnorm=0.1)
    ),
    "alone_with_variables_that_do_not_decay": Case(1, {}, _decaying_but_kernels),
    "alone_with_a_schedule": Case(1, {}, _schedule, weighted=True),
    "alone_accumulating": Case(1, {}, lambda keras: keras.optimizers.Adam(0.02, gradient_accumulation_steps=3)),
    "alone_averaging_weights": Case(1, {}, lambda keras: keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8)),
    "alone_with_own_train_step": Case(1, {}, model=_own_step),
    "alone_with_fewer_steps_than_data": Case(1, {}, fit={"steps_per_epoch": 4, "epochs": 3, "validation_data": None}),
    "alone_looked_at": Case(1, {}, model=_wide, looks=True),
    "alone_set_by_a_callback": Case(1, {}, fit={"epochs": 4}, sets=True),
    "alone_stopped_within_an_epoch": Case(1, {}, fit={"epochs": 4}, stops=3),
    "alone_wide": Case(1, {"variable_partitioner": 2}, model=_wide),
    "alone_in_float64": Case(1, {}, model=_of_float64),
    "alone_with_a_variable_without_axes": Case(1, {}, model=_scaled),
    "alone_with_lamb": Case(1, {}, lambda keras: keras.optimizers.Lamb(0.01)),
    "synchronous": Case(2, {"synchronous": True}),
    "synchronous_stopped_before_an_epoch": Case(2, {"synchronous": True}, fit={"epochs": 4}, stops=0),
    "synchronous_after_a_fit_of_no_epochs": Case(2, {"synchronous": True}, idles=True, fit={"shuffle": False}),
    "synchronous_set_by_a_callback": Case(
        2, {"synchronous": True, "variable_partitioner": 2}, _schedule, fit={"epochs": 4}, sets=True
    ),
    "synchronous_wide": Case(2, {"synchronous": True}, _schedule, model=_wide),
    "synchronous_in_pieces": Case(2, {"synchronous": True, "variable_partitioner": 3}, _schedule, weighted=True),
    "synchronous_in_pieces_clipped": Case(
        2,
        {"synchronous": True, "variable_partitioner": 2},
        lambda keras: keras.optimizers.AdamW(0.02, global_clipnorm=0.1),
        loss=_sum,
    ),
    "synchronous_with_a_loss_that_is_a_sum": Case(
        2, {"synchronous": True}, lambda keras: keras.optimizers.SGD(0.01), loss=_sum
    ),
    "synchronous_with_a_loss_that_is_a_ratio": Case(
        2, {"synchronous": True}, loss=_ratio, error="phalanx.losses.OverGlobalBatch"
    ),
    "synchronous_with_the_mean_of_a_batch": Case(
        2, {"synchronous": True}, model=_centering, error="computes something of all samples"
    ),
    "synchronous_clipped_one_by_one": Case(
        2, {"synchronous": True}, lambda keras: keras.optimizers.SGD(1.0, clipnorm=0.05)
    ),
    "synchronous_with_a_variable_without_axes": Case(
        2, {"synchronous": True}, lambda keras: keras.optimizers.Lamb(0.01), model=_scaled
    ),
    "synchronous_with_a_variable_without_axes_clipped": Case(
        2, {"synchronous": True}, lambda keras: keras.optimizers.SGD(0.1, clipnorm=0.05), model=_scaled
    ),
    "synchronous_accumulating": Case(
        2, {"synchronous": True}, lambda keras: keras.optimizers.Adam(0.02, gradient_accumulation_steps=3)
    ),
    "synchronous_swapping_averages": Case(
        2,
        {"synchronous": True},
        lambda keras: keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8),
        fit={"epochs": 4},
        swaps=True,
    ),
    "synchronous_stopped_with_swapped_averages": Case(
        2,
        {"synchronous": True},
        lambda keras: keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8),
        fit={"epochs": 4},
        stops=6,
        swaps=True,
    ),
    "synchronous_class_weights": Case(2, {"synchronous": True}, fit={"class_weight": {0: 0.5, 1: 1.0, 2: 2.0}}),
    "synchronous_with_own_train_step": Case(2, {"synchronous": True}, model=_own_step),
    "synchronous_with_own_evaluate": Case(2, {"synchronous": True}, model=_own_evaluate),
    "synchronous_with_a_model_that_depends_on_its_mode": Case(2, {"synchronous": True}, model=_doubling),
    "synchronous_with_a_loss_divided_by_weights": Case(
        2,
        {"synchronous": True},
        loss=lambda keras: keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
        weighted=True,
    ),
    "synchronous_of_the_first": Case(
        2, {"synchronous": True, "replicas_to_aggregate": 1}, fit={"epochs": 12}, exact=False
    ),
    "asynchronous": Case(2, {}, fit={"epochs": 12}, exact=False),
    "asynchronous_in_half_precision": Case(2, {"compression": "float16"}, fit={"epochs": 12}, exact=False),
    "asynchronous_in_bfloat16": Case(2, {"compression": "bfloat16"}, fit={"epochs": 12}, exact=False),
    "asynchronous_with_a_schedule": Case(2, {}, _schedule, fit={"epochs": 12}, exact=False),
    "asynchronous_with_fewer_steps_than_data": Case(2, {}, fit={"steps_per_epoch": 3, "epochs": 12}, exact=False),
    "asynchronous_with_a_batch_for_one_worker": Case(3, {}, fit={"steps_per_epoch": 1, "epochs": 30}, exact=False),
    "asynchronous_looked_at": Case(
        2, {}, lambda keras: keras.optimizers.Adam(0.0003), fit={"epochs": 12}, model=_wide, exact=False, looks=True
    ),
    "overlapped_looked_at": Case(
        2,
        {"overlap": True},
        lambda keras: keras.optimizers.Adam(0.0003),
        fit={"epochs": 12},
        model=_wide,
        exact=False,
        looks=True,
    ),
    "bounded_staleness": Case(2, {"staleness": 1}, fit={"epochs": 12}, exact=False),
}


class _Looks:
    """A callback that keeps what it sees of the model between batches, and predicts there.

    Args:
        predicting: the model by another name than Keras gives it to callbacks, which Keras itself cannot do on JAX.
    """

    def __init__(self, keras: Any, x: Any, predicting: Any) -> None:
        self._kept: list[Any] = []
        self._copies: list[Any] = []

        def look(batch: int, logs: Any) -> None:
            if batch == 2 and predicting:
                predicting.predict_on_batch(x[:7])
                return
            model = self.callback.model
            # On JAX the arrays themselves, which never change; elsewhere a variable's value does.
            immutable = keras.backend.backend() == "jax"
            self._kept += [weight.value for weight in model.weights] if immutable else model.get_weights()
            self._copies += [array.copy() for array in model.get_weights()]
            if batch == 1:
                model.predict(x[:7], verbose=0)
            if batch == 3:
                model.predict_on_batch(x[:7])

        self.callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)

    def check(self) -> None:
        import numpy as np

        assert self._kept, "no batch was seen"
        for kept, copy in zip(self._kept, self._copies, strict=True):
            np.testing.assert_array_equal(kept, copy, "what a callback keeps stays as it was")


def _setter(keras: Any) -> Any:
    """Halves one variable when the first epoch has ended, another before the third begins, all when the last has ended,
    and one at the very end."""

    class Sets(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch in (0, 3):
                self._halve(self.model.weights[:1] if epoch == 0 else self.model.weights)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                self._halve(self.model.weights[2:3])

        def on_train_end(self, logs: Any = None) -> None:
            self._halve(self.model.weights[1:2])

        def _halve(self, weights: Any) -> None:
            for weight in weights:
                weight.assign(weight * 0.5)

    return Sets()


def _stopper(keras: Any, after: int) -> Any:
    """Stops the training after so many batches of the second epoch."""

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch, self._batches = epoch, 0
            self._decide()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._batches += 1
            self._decide()

        def _decide(self) -> None:
            self.model.stop_training |= (self._epoch, self._batches) == (1, after)

    return Stops()


def train(case: Case, scope: Any) -> dict[str, Any]:
    """What a case comes to, in the scope of a strategy or in none."""
    import keras
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, FEATURES)).astype("float32")
    y = np.argmax(x[:, :CLASSES] + 0.1 * x[:, CLASSES:], axis=1).astype("int32")
    weights = np.linspace(0.2, 2.0, SAMPLES).astype("float32") if case.weighted else None
    keras.backend.clear_session()  # the chief makes models more than the others, which must have the same names
    set_random_seed(1)
    with scope:
        model = (
            case.model(keras)
            if case.model
            else keras.Sequential(
                [
                    keras.Input((FEATURES,)),
                    keras.layers.Dense(8, activation="tanh"),
                    keras.layers.Dense(CLASSES, activation="softmax"),
                ]
            )
        )
        model.compile(case.optimizer(keras), case.loss(keras), weighted_metrics=["accuracy"])
    plain = isinstance(scope, contextlib.nullcontext)
    looks = _Looks(keras, x, None if plain else model) if case.looks else None
    if case.idles:
        model.fit(x, y, initial_epoch=2, epochs=2, verbose=0)
    callbacks = [
        *([looks.callback] if looks else []),
        *([_setter(keras)] if case.sets else []),
        *([_stopper(keras, case.stops)] if case.stops >= 0 else []),
        *([keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if case.swaps else []),
    ]
    history = model.fit(
        x,
        y,
        **{"batch_size": BATCH, "epochs": 2, "verbose": 0, "sample_weight": weights, "validation_data": (x, y)}
        | case.fit
        | ({"callbacks": callbacks} if callbacks else {}),
    )
    # First of all: Keras itself evaluates on JAX with buffers that an optimizer which averages weights shares.
    state = [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.optimizer.variables]
    if looks and not plain:  # Keras itself gives away what a callback keeps
        looks.check()
    return {
        "history": history.history,
        "evaluated": model.evaluate(x, y, verbose=0),
        "predicted": model.predict(x[:7], verbose=0),
        "weights": model.get_weights(),
        "optimizer": state,
    }


def _refused(case: Case, scope: Any) -> str:
    """The text of the error that a case comes to; empty if it trains."""
    import phalanx

    try:
        train(case, scope)
    except phalanx.errors.UnsupportedError as error:
        return str(error)
    return ""


def main() -> None:
    import phalanx

    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case = CASES[name]
        options = dict(case.strategy)
        if "variable_partitioner" in options:
            options["variable_partitioner"] = _shards(options["variable_partitioner"])
        strategy = phalanx.ParameterServerStrategy(**options)
        before = strategy.global_step
        if case.error:
            (folder / f"{name}.{strategy.rank}").write_bytes(pickle.dumps(_refused(case, strategy.scope())))
            continue
        found = {"job": train(case, strategy.scope()), "steps": strategy.global_step - before}
        if strategy.is_chief:
            found["plain"] = train(case, contextlib.nullcontext())
        (folder / f"{name}.{strategy.rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
