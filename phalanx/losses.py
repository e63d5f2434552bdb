"""Losses computed over the global batch."""

from __future__ import annotations

from typing import Any

import keras

from phalanx.keras_compat.global_batch.global_losses import over_global_batch


@keras.saving.register_keras_serializable(package="phalanx")
class OverGlobalBatch(keras.losses.Loss):  # type: ignore[misc]
    """A loss that relates the samples of a batch to each other, computed over the global batch.

    Each step gathers targets, predictions and sample weights, and each replica computes the whole loss: contrastive
    losses see the negatives of all replicas, and a Dice loss covers the global batch. Gradients flow back to the
    predictions of every replica, so the numbers equal those of one process. Outside `fit`, `evaluate` and
    `strategy.run`, and in plain Keras, it is the wrapped loss.

        model.compile("adam", loss=phalanx.losses.OverGlobalBatch(contrastive_loss))

    Losses that are a sum or a mean over samples need no gathering, which costs time and memory. Keras's own losses that
    relate samples (`Dice` and `Tversky` with their default `axis=None`, `Circle`) need no wrapper: they are always
    computed over the global batch.

    Args:
        loss: A `keras.losses.Loss`, a function `(y_true, y_pred)`, or a name. It receives the global batch, whose
            number of rows is unknown while TensorFlow traces.
        name: Name of the loss. None: the name of the wrapped loss.

    With local SGD, it covers the batch on which a replica trains. Raises UnsupportedError in a `fit` with parameter
    servers, whose workers have no links to each other.
    """

    def __init__(self, loss: Any, name: str | None = None) -> None:
        inner = keras.losses.get(loss)
        self.loss = inner if isinstance(inner, keras.losses.Loss) else _FunctionLoss(inner)
        super().__init__(name=name or self.loss.name, reduction=self.loss.reduction, dtype=self.loss.dtype)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return over_global_batch(self.loss, y_true, y_pred, sample_weight)

    def get_config(self) -> dict[str, Any]:
        return {"loss": keras.saving.serialize_keras_object(self.loss), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(keras.saving.deserialize_keras_object(config["loss"]), config["name"])


@keras.saving.register_keras_serializable(package="phalanx")
class _FunctionLoss(keras.losses.Loss):  # type: ignore[misc]
    """A loss function as a `Loss` object."""

    def __init__(self, function: Any, name: str | None = None) -> None:
        super().__init__(name=name or getattr(function, "__name__", "loss").strip("<>"))
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._function(y_true, y_pred)

    def get_config(self) -> dict[str, Any]:
        return {"function": keras.saving.serialize_keras_object(self._function), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(keras.saving.deserialize_keras_object(config["function"]), config["name"])
