"""Steps that are bitwise independent of the number of ranks: each global batch has the same micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from phalanx.data.dataset_elements import ElementStructure
from phalanx.data.micro_batches import MicroBatch
from phalanx.engines.engine import Engine
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.training.checks.model_checks import stateful_layer
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import StepMerge
from phalanx.training.steps.micro_batch_merge import MicroBatchMerge
from phalanx.training.steps.micro_batch_randomness import MicroBatchRandomness
from phalanx.training.steps.stepper import ReplicaStepper

Array = np.ndarray[Any, Any]

_OPTION = "CommunicationOptions(deterministic=True)"


class DeterministicStepper(ReplicaStepper):
    """Stepper that trains, tests and predicts micro-batch by micro-batch (`CommunicationOptions.deterministic`).

    Every step is merged, so an optimizer that accumulates gradients receives those of all ranks at each step.
    """

    def __init__(self, model: Any, engine: Engine, merge: StepMerge, replica: Replica) -> None:
        super().__init__(model, engine, merge, replica)
        # From here on the merge of this model sums micro-batches, in training and in evaluation.
        self._sums = merge.micro_batches = MicroBatchMerge(replica)
        self._randomness = MicroBatchRandomness(model, engine)

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""

        def compute(micro: MicroBatch) -> None:
            self._randomness.enter(micro.number)
            self._engine.train(micro.data, micro.share)

        # Of the whole batch, not of a micro-batch: Keras traces its step for the whole batch.
        self._merge.set_batch_size(batch.global_size, batch.fixed_size)
        with self._randomness.step():
            self._sums.run(batch, compute)

    def test(self, batch: JointBatch, start: Sequence[Array]) -> Mapping[str, Any]:
        """Add a global batch to the metrics, which had the values `start`; see `Engine.merged_metrics`."""
        logs: Mapping[str, Any] = {}

        def compute(micro: MicroBatch) -> None:
            nonlocal logs
            self._randomness.enter(micro.number)
            # Each micro-batch begins at the common start: the merge adds them in its own order, and the start once.
            self._engine.metric_rules.set_values(start)
            self._engine.test(micro.data, micro.share)
            logs = self._engine.merged_metrics(micro.share, start, final=True)

        with self._randomness.step():
            self._sums.run(batch, compute)
        return logs

    def predict(self, batch: JointBatch, structure: ElementStructure) -> Any:
        """Return the model's outputs for this rank's micro-batches; see `Engine.predict`.

        If the outputs have no row for each sample (`LocalOutputs.create`), the batch is computed whole.
        """
        if not batch.micro_batches:
            return self._engine.predict(batch.data, structure)
        parts = []
        with self._randomness.step():
            for micro in batch.micro_batches:
                self._randomness.enter(micro.number)
                parts.append(self._engine.predict(micro.data, structure))
        return tree.map_structure_up_to(parts[0], lambda *each: np.concatenate(each), *parts)


def check_deterministic(model: Any, *, trains: bool) -> None:
    """Check that the steps of a model can be taken micro-batch by micro-batch.

    Args:
        trains: Whether they are training steps.

    Raises: UnsupportedError that names what cannot.
    """
    backend = keras.backend.backend()
    if trains and backend != "jax" and model_state.overrides(model, "train_step"):
        raise UnsupportedError(
            f"{_OPTION}: {type(model).__name__} has its own train_step(), and on {backend} its gradients are merged "
            f"inside of it, where the other micro-batches of the step are not known yet. Say what is computed in "
            f"compute_loss() or call(), or use the JAX backend."
        )
    if backend == "torch" and model.jit_compile:
        raise UnsupportedError(
            f"{_OPTION}: {model.name!r} was compiled with jit_compile=True. The code that torch.compile generates "
            f"depends on the shapes that a process has seen before. Leave out jit_compile=True."
        )
    if (stateful := stateful_layer(model)) is not None:
        raise UnsupportedError(
            f"{_OPTION}: {stateful.name!r} of {model.name!r} is stateful, with a state for each sample of a batch, and "
            f"batches are cut into micro-batches. Leave out stateful=True."
        )
    if trains and (layer := _torch_normalization(model)) is not None:
        raise UnsupportedError(
            f"{_OPTION}: {layer.name!r} of {model.name!r} has a batch normalization of PyTorch, which would normalize "
            f"each micro-batch by itself. Use keras.layers.BatchNormalization, or freeze it: trainable=False and "
            f"module.eval()."
        )


def _torch_normalization(model: Any) -> Any:
    """Return the first layer with a PyTorch module that normalizes with batch statistics; None if there is none."""
    if keras.backend.backend() != "torch":
        return None
    for layer in model._flatten_layers():
        for module in layer.modules():
            kinds = {kind.__name__ for kind in type(module).__mro__}
            if "_NormBase" in kinds and "_InstanceNorm" not in kinds and module.training:
                return layer
    return None
