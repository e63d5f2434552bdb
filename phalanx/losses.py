"""Losses over the global batch."""

from __future__ import annotations

from typing import Any

import keras

from phalanx.keras_compat.global_batch.global_losses import over_global_batch


@keras.saving.register_keras_serializable(package="phalanx")
class OverGlobalBatch(keras.losses.Loss):  # type: ignore[misc]
    """A loss that relates the samples of a batch to each other, computed over the batches of all replicas together.

    Targets, predictions and sample weights are gathered in every step, and each replica computes the whole loss:
    contrastive losses see the negatives of all replicas, and a Dice loss is that of the global batch. Gradients flow
    back to the predictions of every replica: the numbers are those of one process. Outside of `fit`, `evaluate` and
    `strategy.run`, and in plain Keras, it is the loss itself.

        model.compile("adam", loss=phalanx.losses.OverGlobalBatch(contrastive_loss))

    Losses that are a sum or a mean over samples need no gathering, which costs time and memory. Keras's own losses that
    relate samples (`Dice` and `Tversky` with their default `axis=None`, `Circle`) need no wrapper: they are always
    computed over the batches of all replicas.

    Args:
        loss: A `keras.losses.Loss`, a function `(y_true, y_pred)`, or a name. It gets the global batch, with a number
            of rows that is not known while TensorFlow traces.
        name: None: that of the loss.

    With local SGD, the batch is the one that a replica trains on. Raises UnsupportedError in a `fit` with parameter
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
    """A loss function as an object."""

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
