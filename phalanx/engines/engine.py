"""The contract of an engine: it computes the steps of a compiled Keras model on this process's devices.

The training loops see a stepper (`phalanx.training.steps`), and only steppers see an engine. An engine whose compiled
program spans many devices can therefore keep its arrays where they are: NumPy arrays are what *replica* engines
exchange with a merge across processes, not what a loop computes with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.batch_packing import BatchPacking
from phalanx.engines.metric_rules import MetricRules
from phalanx.engines.step_layout import StepLayout
from phalanx.keras_compat import model_state
from phalanx.keras_compat.observation.log_origins import LogOrigins

Array = np.ndarray[Any, Any]
Batch = tuple[Any, Any, Any]
"""`(x, y, sample_weight)`, nested structures of arrays; absent entries are None."""


class GradientRows(NamedTuple):
    """Some rows of a variable's gradient.

    Attributes:
        indices: Indices of the rows. An index may occur several times.
        gradients: One row for each index.
        is_batch_independent: Whether every batch looks up these rows, such as positions or a table that is read whole.
    """

    indices: Array
    gradients: Array
    is_batch_independent: bool = False


class UpdateDeferred(Exception):
    """The merge has what it needs of this micro-batch. The engine undoes its changes and receives the next one."""


Gather = Callable[[Sequence[GradientRows], float], list[GradientRows]]
"""See `Merge.gather`."""


class Merge(ABC):
    """Merges the arrays of one step over all ranks. It is all that an engine sees of the other replicas.

    Attributes:
        updates_weights: Whether the merge also updates the weights, as parameter servers do. It then returns the new
            weights instead of gradients, and needs a gradient for every trainable variable, in order.
        once_per_step: Whether it can only be called once per step, with the gradients of all trainable variables.
        repeats_steps: Whether a step whose merge fails is repeated. A failed step must then leave no trace.
        uses_micro_batches: Whether a step may have several calls, one per micro-batch. The same for all steps of a
            model.
        synchronizes_batch_norm: Whether all batch normalization is over the batches of all ranks. Set before the engine
            is created.
        global_size: Number of samples in the step's global batch (see `set_batch_size`); None if each rank takes steps
            on batches of its own.
        fixed_size: Size of every global batch of the step's input, if Keras on TensorFlow would know it in advance.
    """

    updates_weights = once_per_step = repeats_steps = uses_micro_batches = synchronizes_batch_norm = False
    global_size: int | None = None
    fixed_size: int | None = None

    def set_batch_size(self, global_size: int | None, fixed_size: int | None = None) -> None:
        """Set the sizes for the next step of training, evaluation or prediction."""
        self.global_size, self.fixed_size = global_size, fixed_size

    @property
    def is_unfused(self) -> bool:
        """Whether gradients must arrive one by one, in the shapes of their variables."""
        return False

    @property
    def gather(self) -> Gather | None:
        """Function that merges row gradients (`tf.IndexedSlices`) as rows; None if gradients must be dense.

        For each variable, it returns the rows of all ranks in rank order, weighted by the ranks' shares. Rows that
        every batch looks up are summed instead.
        """
        return None

    @abstractmethod
    def all_reduce(self, local: Array, share: float) -> Array:
        """Sum an array over all ranks, in the middle of a step. A rank with share 0 does not count."""

    @abstractmethod
    def all_gather(self, local: Array, share: float) -> tuple[Array, int]:
        """Return the rows of all ranks in rank order, and where this rank's rows begin, in the middle of a step. A rank
        with share 0 has none."""

    @abstractmethod
    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        """Return the flat buffers of `layout`, merged over all ranks.

        They belong to the merge. The call after the next one with the same layout overwrites them.

        Raises: UpdateDeferred if another micro-batch of the same step follows.
        """


class ModelValues(ABC):
    """Access to the newest values of a model's variables; see `Engine` for its methods. If the variables hold them
    themselves, there is nothing to fetch or put back."""

    @property
    def variables_are_current(self) -> bool:
        return True

    def begin(self) -> None:  # noqa: B027
        pass

    @abstractmethod
    def read(self, variables: Sequence[Any]) -> list[Array]: ...

    @abstractmethod
    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Assign new values to variables, as arrays or tensors of the backend."""

    def end(self) -> None:  # noqa: B027
        pass


class Engine(ABC):
    """Runs the steps of one compiled Keras model on this replica.

    `share` is this rank's fraction of the global batch. After each training step, weights, optimizer state, floating
    non-trainable state and metrics are the same on every rank. If a step raises (a peer is lost, or `UpdateDeferred`),
    they are as before it, apart from random seeds.

    Args:
        model: A compiled model.
        values: Access to the model's values between steps.

    Attributes:
        merges: Whether ranks merge their contributions to a step. One program for many devices has nothing to merge.
        metric_rules: Rules for merging the metrics' variables, with their values. Available after `build`.
        origins: Origins of the logs of training steps.
        random_state_context: Creates the context around a step in which its layers draw from a random state of the
            whole process (`engines.random_state`).
    """

    merges = True
    random_state_context: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, model: Any, values: ModelValues) -> None:
        self._model = model
        self._values = values
        self._batches = BatchPacking()
        self.metric_rules = MetricRules(values.read, values.write)
        self.origins = LogOrigins(model)

    @property
    def needs_batch_to_build(self) -> bool:
        """Whether Keras's own `fit` would now read a batch ahead, to build the model or its metrics from it."""
        return model_state.is_unbuilt(self._model)

    @property
    def runs_python(self) -> bool:
        """Whether each step runs the program's Python code, which may keep state outside of variables."""
        return True

    @cached_property
    def predictions_update_metrics(self) -> bool:
        """Whether predictions change the model's metrics."""
        return model_state.has_layer_metrics(self._model)

    @property
    def variables_are_current(self) -> bool:
        """Whether the newest values are in the model's variables, where a callback may have changed them."""
        return self._values.variables_are_current

    @abstractmethod
    def build(self, data: Batch) -> None:
        """Create all variables of the model, its metrics and its optimizer for batches like `data`."""

    def set_batch_structure(self, structure: ElementStructure) -> None:
        """Set the structure in which custom steps receive the next batches for training and testing."""
        self._batches.structure = structure

    def begin(self) -> None:
        """Prepare for the first step of an epoch or an evaluation."""
        self._values.begin()

    @abstractmethod
    def train(self, data: Batch, share: float) -> None:
        """Take a training step on the global batch; `data` is this rank's part of it."""

    def compile_ahead(self, data: Batch, share: float) -> Callable[[], None] | None:
        """Prepare for steps with a local batch of another size, if that takes long.

        Returns: The rest of the work, which another thread may do; None if there is none.
        """
        return None

    def read(self, variables: Sequence[Any]) -> list[Array]:
        """Return copies of the newest values of variables of the model, its metrics or its optimizer."""
        return self._values.read(variables)

    def layer_state(self) -> list[Any]:
        """Return the floating variables (on PyTorch also buffers) that layers change while they compute."""
        return model_state.layer_state(self._model)

    def write(self, values: Sequence[tuple[Any, Array]]) -> None:
        """Assign values to variables of the model, its metrics or its optimizer, for the next step."""
        self._values.write([variable for variable, _ in values], [value for _, value in values])

    @abstractmethod
    def retrace(self) -> None:
        """Discard the traced steps. Call between `end` and `begin`, after variables of the model were replaced."""

    @abstractmethod
    def logs(self) -> Mapping[str, Any]:
        """Return the merged logs of the last training step, computed on demand."""

    @abstractmethod
    def test(self, data: Batch, share: float) -> None:
        """Add a local batch to this rank's metric state; with share 0 (a placeholder batch), only compute it."""

    @abstractmethod
    def merged_metrics(
        self, share: float, start: Sequence[Array], *, final: bool, training: bool = False
    ) -> Mapping[str, Any]:
        """Return the logs of the batches tested on all ranks since the metrics' variables had the values `start`.

        Args:
            share: This rank's fraction of the samples.
            start: The same on all ranks. It counts once.
            final: Whether the merged values become every rank's metric state. Otherwise each rank keeps its own and can
                add to it.
            training: Whether each rank has trained on the batches alone, instead of testing them.
        """

    @abstractmethod
    def merge_metrics(self, share: float, start: Sequence[Array]) -> None:
        """Merge the metrics' state over all ranks, for batches without logs; see `merged_metrics` for the arguments."""

    @abstractmethod
    def predict(self, data: Batch, structure: ElementStructure = ElementStructure.PARTS, share: float = 1.0) -> Any:
        """Return the model's outputs for a local batch, as nested NumPy arrays.

        Args:
            data: The local batch.
            structure: See `set_batch_structure`.
            share: One program over several processes returns the outputs for the global batch, of which `data` is this
                share.
        """

    def end(self) -> None:
        """Put all state back into the model's variables."""
        self._values.end()
