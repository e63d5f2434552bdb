"""Metrics whose state is more than a sum and a count."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, metrics, ops

from tests.training.scenarios.common import (
    BATCH,
    CLASSES,
    FEATURES,
    classifier,
    compiled,
    features,
    fitted,
    numbers,
    observed,
    regressor,
    weights,
)
from tests.training.scenarios.registry import BACKENDS, EACH_KIND, ONE_BACKEND, Setting, scenario


@scenario(quick=ONE_BACKEND)
def metrics_of_two_classes(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1, activation="sigmoid")])

    names = [
        metrics.AUC(num_thresholds=20),
        metrics.AUC(num_thresholds=20, curve="PR", name="pr"),
        metrics.Precision(),
        metrics.Recall(),
        metrics.BinaryAccuracy(),
        metrics.F1Score(threshold=0.5),
        metrics.TruePositives(),
        metrics.BinaryIoU(),
        metrics.PrecisionAtRecall(0.5, num_thresholds=20),
    ]
    model = compiled(
        setting,
        build,
        loss="binary_crossentropy",
        metrics=names,
        weighted_metrics=[metrics.AUC(num_thresholds=20, name="weighted_auc"), "binary_accuracy"],
    )
    y = np.random.default_rng(20).integers(0, 2, (33, 1)).astype("float32")
    return fitted(model, y=y, sample_weight=weights()) | observed(model, y=y, sample_weight=weights())


@scenario()
def metrics_of_many_classes(setting: Setting) -> dict[str, Any]:
    y = np.eye(CLASSES, dtype="float32")[np.random.default_rng(21).integers(0, CLASSES, 33)]
    model = compiled(
        setting,
        classifier,
        loss="categorical_crossentropy",
        metrics=[
            metrics.F1Score(average="macro"),
            metrics.FBetaScore(beta=2.0),
            metrics.OneHotMeanIoU(CLASSES),
            metrics.TopKCategoricalAccuracy(2),
            metrics.CategoricalCrossentropy(),
            metrics.AUC(multi_label=True, num_labels=CLASSES, num_thresholds=20),
        ],
    )
    return fitted(model, y=y) | observed(model, y=y)


@scenario()
def metrics_of_regression(setting: Setting) -> dict[str, Any]:
    model = compiled(
        setting,
        regressor,
        loss="mse",
        metrics=[
            metrics.RootMeanSquaredError(),
            metrics.R2Score(),
            metrics.MeanAbsoluteError(),
            metrics.CosineSimilarity(),
        ],
    )
    return fitted(model, y=numbers()) | observed(model, y=numbers())


class Counted(keras.metrics.Metric):
    """Counts and remembers in variables of every kind.

    Args:
        keeps: Whether an epoch begins with the counts of the previous one.
    """

    def __init__(self, *, keeps: bool = False, name: str = "counted") -> None:
        super().__init__(name=name)
        self.keeps = keeps
        self.from_seven = self.add_variable((), keras.initializers.Constant(7), name="from_seven")
        self.samples = self.add_variable((), "zeros", dtype="int32", name="samples")
        self.steps = self.add_variable((), "zeros", dtype="int32", name="steps")
        self.largest = self.add_variable((), keras.initializers.Constant(-1e9), name="largest")
        self.least = self.add_variable((2,), "ones", name="least", aggregation="none")
        self.seen = self.add_variable((), "zeros", dtype="bool", name="seen")
        self.half = self.add_variable((), "ones", dtype="float16", name="half")
        self.total = keras.Variable(0.0, name="total")
        self.count = keras.Variable(0.0, name="count")
        self.moving = self.add_variable((), "ones", name="moving", aggregation="mean")
        self.newest = keras.Variable(0.0, name="newest")
        self.plain = keras.Variable(0.0, name="plain")
        self.above = self.add_variable((), "zeros", name="above")  # the first sample is below

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        size = ops.shape(y_pred)[0]
        mean = ops.mean(y_true)
        self.from_seven.assign_add(ops.sum(y_true))
        self.samples.assign_add(ops.cast(size, "int32"))
        self.steps.assign_add(1)
        self.largest.assign(ops.maximum(self.largest, ops.max(y_true)))
        self.least.assign(ops.minimum(self.least, ops.min(y_true)))
        self.seen.assign(ops.logical_or(self.seen, ops.any(y_true > 1.0)))
        self.half.assign_add(ops.cast(size, "float16"))
        self.total.assign_add(mean)
        self.count.assign_add(1.0)
        self.moving.assign(0.9 * self.moving + 0.1 * mean)
        self.newest.assign(mean)
        self.plain.assign_add(ops.cast(size, "float32"))
        self.above.assign(ops.maximum(self.above, ops.max(y_true)))

    def reset_state(self) -> None:
        if self.keeps:
            return
        for variable, value in zip(self.variables, [7, 0, 0, -1e9, 1, False, 1, 0, 0, 1, 0, 0, 0], strict=True):
            variable.assign(ops.cast(ops.broadcast_to(value, variable.shape), variable.dtype))

    def result(self) -> Any:
        return {variable.name: ops.sum(ops.cast(variable, "float32")) for variable in self.variables}


@scenario(quick=EACH_KIND)
def metric_state_of_every_kind(setting: Setting) -> dict[str, Any]:
    """Whatever its aggregation and dtype, wherever it starts: sums, steps, extremes, means and what is newest."""
    model = compiled(setting, regressor, loss="mse", metrics=[Counted()])
    y = numbers()
    seen: list[Any] = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(dict(logs))

        on_test_batch_end = on_train_batch_end

    found = fitted(model, y=y, validation_data=(features(), y), callbacks=[Notes()]) | observed(model, y=y)
    x, y = features(BATCH), numbers(BATCH)  # of a size that is compiled already
    return found | {
        "batches": seen,
        "trained": model.train_on_batch(x, y, return_dict=True),
        "tested": model.test_on_batch(x, y, return_dict=True),
    }


class Largest(keras.metrics.Metric):
    def __init__(self, start: float = 0.0, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_variable((), keras.initializers.Constant(start), name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(ops.cast(y_pred, "float32"))))

    def result(self) -> Any:
        return self.value + 0.0


@scenario(quick=("torch",), tolerance=2**-8)
def maximum_of_single_predictions_in_half_precision(setting: Setting) -> dict[str, Any]:
    """The chief has one prediction, which alone does not tell a maximum from a mean.

    Compared to the rounding of bfloat16: one process rounds the gradient of the whole batch, replicas those of parts.
    """

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1, "sigmoid", dtype="mixed_bfloat16")])

    model = compiled(setting, build, loss="mse", metrics=[Largest()])
    return fitted(model, features()[:12], numbers()[:12], batch_size=2)["history"]  # type: ignore[no-any-return]


@scenario(quick=ONE_BACKEND)
def maximum_that_predictions_at_the_first_step_do_not_tell(setting: Setting) -> dict[str, Any]:
    """They are all alike, as a mean of them is; and one metric begins so near to them that a sum differs by nothing."""

    def build() -> Any:
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(1, kernel_initializer="zeros", bias_initializer="ones")]
        )

    model = compiled(setting, build, loss="mse", metrics=[Largest(), Largest(1.0 - 1e-6, "near")])
    return fitted(model, y=numbers())["history"]  # type: ignore[no-any-return]


class CountsCalls(layers.Layer):
    """Its outputs grow with each call, also of `predict`."""

    def build(self, input_shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        return inputs * (1.0 + 0.1 * self.calls)


@scenario(quick=ONE_BACKEND, worlds=(2,))
def metric_that_is_tried_beside_a_stateful_layer(setting: Setting) -> dict[str, Any]:
    """How a metric is merged is found out on predictions, which leave nothing in the layers."""

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, {"out": layers.Dense(1)(CountsCalls()(inputs))})

    # TensorFlow wraps the dictionary, which is an attribute of the model.
    model = compiled(setting, build, loss={"out": "mse"}, metrics={"out": Largest()})
    return fitted(model, y={"out": numbers()})


@scenario(quick=ONE_BACKEND)
def metric_that_is_not_reset(setting: Setting) -> dict[str, Any]:
    """Every epoch and evaluation begins with what the last one has counted, which counts once."""
    y = numbers()
    model = compiled(setting, regressor, loss="mse", metrics=[Counted(keeps=True)])
    found = fitted(model, y=y, epochs=3, validation_data=(features(), y))
    return found | observed(model, y=y) | {"again": fitted(model, y=y, epochs=1)}


@scenario()
def metric_of_ones_own(setting: Setting) -> dict[str, Any]:
    class Positives(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="positives")
            self.seen = self.add_variable(shape=(), initializer="zeros", name="seen")
            self.positive = self.add_variable(shape=(), initializer="zeros", name="positive")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.seen.assign_add(ops.cast(ops.size(y_pred), "float32"))
            self.positive.assign_add(ops.sum(ops.cast(y_pred > 0, "float32")))

        def result(self) -> Any:
            return self.positive / self.seen

    model = compiled(setting, regressor, loss="mse", metrics=[Positives()])
    return fitted(model, y=numbers()) | observed(model, y=numbers())


@scenario(quick=ONE_BACKEND)
def metric_that_the_first_batch_leaves_alone(setting: Setting) -> dict[str, Any]:
    """What its targets or predictions do to a variable shows in later batches only."""

    class Positive(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="positive")
            self.highest = self.add_variable((), "zeros", name="highest")
            self.largest = self.add_variable((), "zeros", name="largest")
            self.count = self.add_variable((), "zeros", name="count")
            self.weight = self.add_variable((), "zeros", name="weight")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.highest.assign(ops.maximum(self.highest, ops.max(y_pred)))
            self.largest.assign(ops.maximum(self.largest, ops.max(y_true)))
            self.count.assign_add(ops.sum(ops.cast(y_true > 1.0, "float32")))
            self.weight.assign(ops.maximum(self.weight, ops.max(sample_weight)))

        def result(self) -> Any:
            return {variable.name: ops.convert_to_tensor(variable) for variable in self.variables}

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1, kernel_initializer="ones")])

    x, y, weight = abs(features()), abs(numbers()), weights()
    for values in (x, y, weight):
        values[:BATCH] *= -1
    optimizer = keras.optimizers.SGD(1e-3)
    model = compiled(setting, build, optimizer=optimizer, loss="mse", weighted_metrics=[Positive()])
    return fitted(model, x, y, sample_weight=weight) | observed(model, x, y, sample_weight=weight)


def mean_error(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred))


def errors(y_true: Any, y_pred: Any) -> Any:
    return ops.squeeze(ops.abs(y_true - y_pred), -1)


def root_error(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


@scenario(quick=ONE_BACKEND)
def metric_functions(setting: Setting) -> dict[str, Any]:
    """Functions of one value for each sample, with weights and without, and of their mean."""
    model = compiled(setting, regressor, loss="mse", metrics=[mean_error, errors], weighted_metrics=[errors])
    y = numbers()
    return fitted(model, y=y, sample_weight=weights()) | observed(model, y=y, sample_weight=weights())


def _refused(*words: str) -> dict[str, tuple[str, str]]:
    return {backend: ("UnsupportedError", " ".join(words)) for backend in BACKENDS}


@scenario(quick=ONE_BACKEND, error=_refused("The metric 'root_error' (MeanMetricWrapper) cannot be merged"))
def metric_function_of_the_whole_batch(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, regressor, loss="mse", metrics=["mae", root_error]), y=numbers())


def hardest(y: Any, y_pred: Any) -> Any:
    """Needs more samples than the first parts that are tried have."""
    return ops.mean(ops.top_k(ops.mean(ops.square(y - y_pred), axis=-1), 7)[0])


@scenario(quick=ONE_BACKEND, error=_refused("The metric 'hardest' (MeanMetricWrapper) cannot be merged"))
def metric_of_the_hardest_samples(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, regressor, loss="mse", metrics=[hardest])
    return fitted(model, features(48), numbers(48), batch_size=24)


def largest_errors(y: Any, y_pred: Any) -> Any:
    """Of a few samples it is a mean over all of them."""
    return ops.mean(ops.top_k(ops.mean(ops.square(y - y_pred), axis=-1), min(16, y_pred.shape[0] or 16))[0])


@scenario(quick=ONE_BACKEND, error=_refused("The metric 'largest_errors' (MeanMetricWrapper) cannot be merged"))
def metric_of_at_most_sixteen_samples(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, regressor, loss="mse", metrics=[largest_errors])
    return fitted(model, features(96), numbers(96), batch_size=48)


def error_of_positives(y: Any, y_pred: Any) -> Any:
    """Zero for the first samples, which are not positive."""
    mask = ops.cast(y > 0, "float32")
    return ops.sum(mask * ops.abs(y - y_pred)) / ops.maximum(ops.sum(mask), 1.0)


@scenario(quick=ONE_BACKEND, error=_refused("The metric 'error_of_positives' (MeanMetricWrapper) cannot be merged"))
def metric_of_positives_that_the_first_samples_are_not(setting: Setting) -> dict[str, Any]:
    y = ((np.arange(96) > 8) & (np.arange(96) % 5 == 0)).astype("float32").reshape(-1, 1)
    model = compiled(setting, regressor, loss="mse", metrics=[error_of_positives])
    return fitted(model, features(96), y, batch_size=48)


class RankedLists(keras.metrics.Metric):
    """As keras-rs weighs lists: one without relevant items has the mean weight of the others in its batch."""

    def __init__(self) -> None:
        super().__init__(name="ranked")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        given = ops.ones((ops.shape(y_true)[0],)) if sample_weight is None else ops.reshape(sample_weight, (-1,))
        relevant = ops.cast(ops.any(y_true > 0, axis=1), "float32")
        mean = ops.sum(given * relevant) / ops.maximum(ops.sum(relevant), 1.0)
        weight = ops.where(relevant > 0, given, mean)
        self.total.assign_add(ops.sum(weight * ops.max(y_pred, axis=1)))
        self.count.assign_add(ops.sum(weight))

    def result(self) -> Any:
        return self.total / self.count


@scenario(quick=ONE_BACKEND, error=_refused("The metric 'ranked' (RankedLists) cannot be merged"))
def metric_of_lists_of_which_the_first_are_relevant(setting: Setting) -> dict[str, Any]:
    y = np.ones((33, 4), "float32")
    y[20:23] = 0
    model = compiled(
        setting,
        lambda: keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4)]),
        loss="mse",
        weighted_metrics=[RankedLists()],
    )
    return fitted(model, features(), y, sample_weight=weights())


class Pairs(keras.metrics.Metric):
    """A mean over pairs of neighbours in a batch."""

    def __init__(self) -> None:
        super().__init__(name="pairs")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        distances = ops.reshape(y_pred, (-1, 2))
        self.total.assign_add(ops.sum(ops.abs(distances[:, 0] - distances[:, 1])))
        self.count.assign_add(ops.cast(ops.shape(distances)[0], "float32"))

    def result(self) -> Any:
        return self.total / self.count


@scenario(quick=ONE_BACKEND)
def metric_of_pairs_of_samples(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, regressor, loss="mse", metrics=[Pairs()])
    return fitted(model, features(48), numbers(48), batch_size=24)


@scenario(quick=ONE_BACKEND, error=_refused("The metric 'correlation' (PearsonCorrelation) cannot be merged"))
def metric_over_the_samples_of_a_batch(setting: Setting) -> dict[str, Any]:
    correlation = metrics.PearsonCorrelation(axis=0, name="correlation")
    return observed(compiled(setting, regressor, loss="mse", metrics=[correlation]), y=numbers())


@scenario(error=_refused("The metric 'product' (Product) cannot be merged"))
def metric_of_the_products(setting: Setting) -> dict[str, Any]:
    class Product(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="product")
            self.product = self.add_variable((), "ones", name="product")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.product.assign(self.product.value * ops.prod(1.0 + 0.1 * y_true))

        def result(self) -> Any:
            return ops.convert_to_tensor(self.product)

    return fitted(compiled(setting, regressor, loss="mse", metrics=[Product()]), y=numbers())


class _Watching(layers.Layer):
    """Counts in metrics of its own whenever it is called: by samples, and by batches."""

    def __init__(self) -> None:
        super().__init__(name="watching")
        self.size = metrics.Mean(name="size")
        self.square = metrics.Mean(name="square")

    def call(self, inputs: Any) -> Any:
        self.size.update_state(ops.abs(inputs))
        self.square.update_state(ops.mean(ops.square(inputs)))
        return inputs


@scenario(backends=("tensorflow", "torch"), quick=("torch",))
def predictions_count_in_metrics_of_layers(setting: Setting) -> dict[str, Any]:
    """Also where some replicas have no sample of a batch. (Plain Keras on JAX has no such metrics after a step.)"""

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), _Watching(), layers.Dense(1)])

    model = compiled(setting, build, loss="mse")
    model.fit(features(8), numbers(8), batch_size=3, shuffle=False, verbose=0)
    found: dict[str, Any] = {"predict": model.predict(features(7), batch_size=2, verbose=0)}
    found["after predict"] = {name: float(value) for name, value in model.get_metrics_result().items()}
    found["predict_on_batch"] = model.predict_on_batch(features(4))
    return found | {"at last": {name: float(value) for name, value in model.get_metrics_result().items()}}


class CountedInPython(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="counted")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = 0

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(y_pred))
        self.count += len(y)

    def result(self) -> Any:
        return self.total / max(self.count, 1)


# Elsewhere, steps are compiled, and count once in Python.
@scenario(backends=("torch",), error=_refused("The metric 'counted' (CountedInPython) cannot be merged"))
def metric_that_counts_in_python(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, metrics=[CountedInPython()]))


@scenario(quick=ONE_BACKEND, error=_refused("The metric 'last' (Last) cannot be merged"))
def metric_that_keeps_the_last_value(setting: Setting) -> dict[str, Any]:
    class Last(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="last")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(ops.max(y[-1]))

        def result(self) -> Any:
            return ops.convert_to_tensor(self.value)

    y = np.linspace(1, 2, 33, dtype="float32")[:, None]  # of each part the last one is the largest
    return fitted(compiled(setting, regressor, loss="mse", metrics=[Last()]), y=y)


def _flat() -> Any:
    """A model whose outputs have no axis but that of the samples."""
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1, "sigmoid"), layers.Reshape(())])


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "keep the shape (samples, 1)")))
def accuracy_of_flat_outputs(setting: Setting) -> dict[str, Any]:
    """Keras takes the samples for classes."""
    model = compiled(setting, _flat, loss="binary_crossentropy", metrics=["accuracy"])
    return fitted(model, y=(numbers()[:, 0] > 0).astype("float32"))


@scenario(quick=ONE_BACKEND)
def metrics_of_flat_outputs(setting: Setting) -> dict[str, Any]:
    chosen = ["mse", "poisson", metrics.BinaryAccuracy(), metrics.AUC()]
    model = compiled(setting, _flat, loss="binary_crossentropy", metrics=chosen)
    return fitted(model, y=(numbers()[:, 0] > 0).astype("float32"))
