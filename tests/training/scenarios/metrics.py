"""Metrics whose state is more than a sum and a count."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, metrics, ops

from tests.training.scenarios.common import (
    CLASSES,
    FEATURES,
    classifier,
    compiled,
    fitted,
    numbers,
    observed,
    regressor,
    weights,
)
from tests.training.scenarios.registry import BACKENDS, Setting, scenario


@scenario(quick=BACKENDS)
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
