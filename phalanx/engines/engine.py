"""The contract of an engine: computes the steps of a compiled Keras model on this process's devices.

The training loops see a stepper (`phalanx.training.steps`), and only steppers see an engine. An engine of another
kind, in which one compiled program spans many devices, may therefore keep its arrays where they are: NumPy arrays are
what *replica* engines exchange with a merge over processes, not what a loop computes with.
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
"""`(x, y, sample_weight)`, nested structures of arrays; None where there is none."""


class GradientRows(NamedTuple):
    """Single rows of a variable's gradient.

    Attributes:
        numbers: indices of the rows; one may occur several times.
        gradients: one row for each index.
        of_any_batch: whether these rows are looked up in every batch: positions, a table that is read whole.
    """

    numbers: Array
    gradients: Array
    of_any_batch: bool = False


class MicroBatchKept(Exception):
    """A merge has what it needs of this micro-batch: the engine leaves everything as before, and gets the next one."""


Gather = Callable[[Sequence[GradientRows], float], list[GradientRows]]
"""See `Merge.gather`."""


class Merge(ABC):
    """Merges the arrays of one step over all ranks. It is all that an engine knows of the other replicas.

    Attributes:
        updates: whether the merge also updates the weights, as parameter servers do. It then returns the new weights
            instead of gradients, and must be given a gradient for every trainable variable, in their order.
        once_per_step: whether it can only be called once in a step, with the gradients of all trainable variables.
        repeats: whether a step whose merge fails is repeated. Then a failed step must leave nothing behind.
        in_micro_batches: whether a step may have several calls, one for each micro-batch; the same for all steps of a
            model.
        synchronizes_batch_norm: whether all batch normalization is over the batches of all ranks; set before an engine
            is made.
        global_size: the number of samples of the step's global batch (see `expect`); None if each rank takes steps on
            batches of its own.
        fixed_size: the size of every global batch of the step's input, if Keras on TensorFlow would know it in advance.
    """

    updates = once_per_step = repeats = in_micro_batches = synchronizes_batch_norm = False
    global_size: int | None = None
    fixed_size: int | None = None

    def expect(self, global_size: int | None, fixed_size: int | None = None) -> None:
        """The next step, of training, evaluation or prediction, is on such a batch."""
        self.global_size, self.fixed_size = global_size, fixed_size

    @property
    def separate(self) -> bool:
        """Whether gradients must come one by one, in the shapes of their variables."""
        return False

    @property
    def gather(self) -> Gather | None:
        """Merges gradients that are single rows (`tf.IndexedSlices`) as rows; None if they must be dense.

        It returns for each variable the rows of all ranks, weighted by their shares: one rank's after the other's,
        except that rows which every batch looks up are summed.
        """
        return None

    @abstractmethod
    def total(self, own: Array, share: float) -> Array:
        """The sum of an array over all ranks, in the middle of a step; a rank with share 0 does not count."""

    @abstractmethod
    def all_gather(self, own: Array, share: float) -> tuple[Array, int]:
        """The rows of all ranks in rank order, and where this rank's begin; in the middle of a step. A rank with share
        0 has none."""

    @abstractmethod
    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        """The flat buffers of `layout`, merged over all ranks.

        They belong to the merge and are overwritten by the call after the next one with the same layout.

        Raises: MicroBatchKept where another micro-batch of the same step follows.
        """


class ModelValues(ABC):
    """Where the newest values of a model's variables are; see `Engine` for what each method does. Where they are in the
    variables themselves, there is nothing to fetch or to put back."""

    @property
    def in_variables(self) -> bool:
        return True

    def begin(self) -> None:  # noqa: B027
        pass

    @abstractmethod
    def read(self, variables: Sequence[Any]) -> list[Array]: ...

    @abstractmethod
    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Give variables new values, arrays or tensors of the backend."""

    def end(self) -> None:  # noqa: B027
        pass


class Engine(ABC):
    """Runs the steps of one compiled Keras model on this replica.

    `share` is this rank's fraction of the global batch. After each training step weights, optimizer state, floating
    non-trainable state and metrics are the same on every rank. If a step raises (a peer is lost), they are as before
    it, apart from random seeds. The same holds for `MicroBatchKept`.

    Args:
        model: compiled.
        values: where its values are between the steps.

    Attributes:
        merges: whether ranks merge what they contribute to a step; one program for many devices has nothing to merge.
        metric_rules: how the variables of the metrics are merged, and their values; known after `build`.
        origins: what the logs of training steps are made of.
        drawing_apart: makes the context around a step, where its layers draw from a random state of the whole process
            (`engines.random_state`).
    """

    merges = True
    drawing_apart: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, model: Any, values: ModelValues) -> None:
        self._model = model
        self._values = values
        self._batches = BatchPacking()
        self.metric_rules = MetricRules(values.read, values.write)
        self.origins = LogOrigins(model)

    @property
    def builds_from_a_batch(self) -> bool:
        """Whether Keras's own `fit` would now read a batch ahead, to build model or metrics from it."""
        return model_state.is_unbuilt(self._model)

    @property
    def runs_python(self) -> bool:
        """Whether each step runs the program's Python code, which can then keep more than variables."""
        return True

    @cached_property
    def counts_in_predictions(self) -> bool:
        """Whether predictions change the model's metrics."""
        return model_state.has_metrics_of_layers(self._model)

    @property
    def in_variables(self) -> bool:
        """Whether the newest values are in the model's variables, where a callback may have changed them."""
        return self._values.in_variables

    @abstractmethod
    def build(self, data: Batch) -> None:
        """Create all variables of model, metrics and optimizer for batches like `data`."""

    def expect(self, form: ElementStructure) -> None:
        """Set the structure in which custom steps get the next batches to train and test with."""
        self._batches.form = form

    def begin(self) -> None:
        """Call before the first step of an epoch or an evaluation."""
        self._values.begin()

    @abstractmethod
    def train(self, data: Batch, share: float) -> None:
        """Take a training step on the global batch, of which `data` is this rank's part."""

    def warm(self, data: Batch, share: float) -> Callable[[], None] | None:
        """Prepare for steps with a local batch of another size, if that takes long.

        Returns: the rest of the work, which another thread may do; None if there is none.
        """
        return None

    def read(self, variables: Sequence[Any]) -> list[Array]:
        """Copies of the newest values of variables of the model, its metrics or its optimizer."""
        return self._values.read(variables)

    def layer_state(self) -> list[Any]:
        """The floating variables (on PyTorch also buffers) that layers change while they compute."""
        return model_state.layer_state(self._model)

    def write(self, values: Sequence[tuple[Any, Array]]) -> None:
        """Give variables of the model, its metrics or its optimizer these values, for the next step."""
        self._values.write([variable for variable, _ in values], [value for _, value in values])

    @abstractmethod
    def retrace(self) -> None:
        """Call between `end` and `begin` after variables of the model were replaced by others."""

    @abstractmethod
    def logs(self) -> Mapping[str, Any]:
        """The merged logs of the last training step; computed when they are asked for."""

    @abstractmethod
    def test(self, data: Batch, share: float) -> None:
        """Add a local batch to this rank's own metric state; if its share is 0 (a stand-in), only compute it."""

    @abstractmethod
    def merged_metrics(
        self, share: float, start: Sequence[Array], *, final: bool, training: bool = False
    ) -> Mapping[str, Any]:
        """The logs of the batches tested on all ranks since the metrics' variables had the values `start`.

        Args:
            share: this rank's fraction of their samples.
            start: the same on all ranks; it counts once.
            final: the merged values become every rank's metric state; otherwise each rank keeps its own and can add
                to it.
            training: the logs of batches that each rank has trained on alone, instead of tested.
        """

    @abstractmethod
    def merge_metrics(self, share: float, start: Sequence[Array]) -> None:
        """Merge the metrics' state over all ranks, of batches that have no logs; the arguments are those of
        `merged_metrics`."""

    @abstractmethod
    def predict(self, data: Batch, form: ElementStructure = ElementStructure.PARTS, share: float = 1.0) -> Any:
        """The model's outputs for a local batch, a structure of NumPy arrays; `form` as in `expect`. One program over
        several processes returns those for the global batch, of which `data` is this share."""

    def end(self) -> None:
        """Put all state back into the model's variables."""
        self._values.end()
