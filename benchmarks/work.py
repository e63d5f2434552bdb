"""The works that every tool is timed on: models, batch sizes and synthetic data.

The data are float32 arrays in memory with a fixed seed, so that no tool waits for a disk. Models are written once for
Keras (Keras 3 and tf_keras have the same layers) and once for PyTorch, with identical layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

CLASSES = 10
SEED = 7


@dataclass(frozen=True)
class Work:
    """One model at one global batch size.

    Attributes:
        name: Name in `--only` and the tables.
        model: `mlp`, `wide` (the same with 10 million weights) or `cnn`.
        batch: Samples per step over all processes: the global batch. With parameter servers, where one worker takes a
            step, the batch of that worker.
        steps: Steps of one timed window, and of one epoch for tools with epochs.
        slow_ms: Additional milliseconds that the last worker takes for each of its steps.
    """

    name: str
    model: str
    batch: int
    steps: int
    slow_ms: float = 0.0

    @property
    def together(self) -> bool:
        """Whether all workers take each step together."""
        return self.name in TOGETHER

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, channels last."""
        return (784,) if self._widths else (32, 32, 3)

    @property
    def _widths(self) -> tuple[int, ...]:
        """Widths of the hidden layers of a dense model."""
        return {"mlp": (256, 256), "wide": (2048, 2048, 2048)}.get(self.model, ())

    @property
    def flop(self) -> float:
        """Floating-point operations of the matrix products and convolutions of one step.

        The forward pass, the gradient of the weights and the gradient of the inputs cost the same. The first layer
        needs no gradient of its inputs.
        """
        if self._widths:
            sizes = (*self.shape, *self._widths, CLASSES)
            forward = [2 * before * after for before, after in pairwise(sizes)]
        else:
            # Output height x width x channels, times kernel x input channels.
            convolutions = [2 * 30**2 * 32 * 9 * 3, 2 * 13**2 * 64 * 9 * 32, 2 * 4**2 * 64 * 9 * 64]
            forward = [*convolutions, 2 * 1024 * 64, 2 * 64 * CLASSES]
        return self.batch * (3.0 * sum(forward) - forward[0])

    def data(self, steps: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Create float32 samples of shape (steps * batch, *shape) and their int32 labels."""
        rng = np.random.default_rng(SEED)
        count = (self.steps if steps is None else steps) * self.batch
        return rng.random((count, *self.shape), dtype=np.float32), rng.integers(0, CLASSES, count, dtype=np.int32)

    def keras_model(self, keras: Any) -> Any:
        """Build the model, not compiled, from the layers of `keras` (Keras 3 or tf_keras)."""
        layers = keras.layers
        if self._widths:
            hidden = [layers.Dense(width, activation="relu") for width in self._widths]
        else:
            hidden = [
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
            ]
        return keras.Sequential([layers.Input(self.shape), *hidden, layers.Dense(CLASSES)])

    def compiled_keras_model(self, keras: Any, **compile_options: Any) -> Any:
        """Build and compile the model with Adam and cross entropy, and no metric except the loss."""
        model = self.keras_model(keras)
        model.compile(
            optimizer=keras.optimizers.Adam(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **compile_options,
        )
        return model

    def torch_model(self) -> Any:
        """Build the same model in plain PyTorch. Images are channels first."""
        from torch import nn

        if self._widths:
            pairs = pairwise((*self.shape, *self._widths))
            hidden = [layer for before, after in pairs for layer in (nn.Linear(before, after), nn.ReLU())]
            return nn.Sequential(*hidden, nn.Linear(self._widths[-1], CLASSES))
        hidden = [
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(1024, 64), nn.ReLU()),
        ]
        return nn.Sequential(*hidden, nn.Linear(64, CLASSES))


# Windows are long enough to make the clock and the change of epochs negligible, and short enough for five of them to
# stay within half a minute on the slowest tool.
WORKS = {
    work.name: work
    for work in (
        Work("mlp64", "mlp", batch=64, steps=200),
        Work("mlp512", "mlp", batch=512, steps=100),
        Work("cnn64", "cnn", batch=64, steps=40),
        Work("wide512", "wide", batch=512, steps=40),
        Work("servers64", "mlp", batch=64, steps=400),
        Work("uneven64", "mlp", batch=64, steps=400, slow_ms=10.0),
    )
}
# Works whose steps are taken by all workers together, and those whose steps are taken by one. `wide512` is for GPUs.
TOGETHER = ("mlp64", "mlp512", "cnn64")
APART = ("servers64", "uneven64")
