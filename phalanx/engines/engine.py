"""The contract of a backend: what one replica computes of a compiled Keras model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from phalanx.data.elements import ElementStructure
from phalanx.engines.step_layout import StepLayout
from phalanx.keras_compat.log_origins import LogOrigins

Array = np.ndarray[Any, Any]
Batch = tuple[Any, Any, Any]
Exchange = Callable[[Sequence[Any], Sequence[Any]], list[Array | None]]
"""See `Merge.exchange`."""


class GradientRows(NamedTuple):
    """Single rows of a variable's gradient.

    Attributes:
        numbers: of the rows, some perhaps several times.
        gradients: one for each.
        of_any_batch: whether they were looked up whatever is in the batch: positions, a table that is read whole.
    """

    numbers: Array
    gradients: Array
    of_any_batch: bool = False


Gather = Callable[[Sequence[GradientRows], float], list[GradientRows]]
"""See `Merge.gather`."""


class MergeProtocol(Protocol):
    """Merges the arrays of one step over all ranks: the only thing an engine knows of the other replicas."""

    @property
    def updates(self) -> bool:
        """Whether it makes the update as well (parameter servers do): what it returns in the place of gradients are
        then the new weights. It is given a gradient for every trainable variable, in their order."""
        ...

    @property
    def exchange(self) -> Exchange | None:
        """Where nothing but gradients is merged, and all else that a step computes stays this rank's own: gives the new
        weights for the gradients of all trainable variables, None for those that are not known yet. They are lent: the
        call after the next one overwrites them. Engines that have `merges_only_gradients` also say what the variables
        of this rank's metrics hold now, and give None for a gradient of which a backend knows none. It is called in the
        place of a call; None where there is no such way."""
        ...

    @property
    def gather(self) -> Gather | None:
        """Where gradients that are single rows of a variable (`tf.IndexedSlices`) may be merged as such: gives for each
        variable the rows of all ranks, weighted with their shares; one rank's after the other's, but those that any
        batch looks up summed. None where they must be made whole first."""
        ...

    @property
    def repeats(self) -> bool:
        """Whether a step whose merge fails is tried again: then it must leave nothing behind."""
        ...

    @property
    def separate(self) -> bool:
        """Whether gradients must come one by one, in the shapes of their variables."""
        ...

    def total(self, own: Array, share: float) -> Array:
        """The sum over all ranks of a few numbers, in the middle of a step; with share 0 a rank's do not count."""
        ...

    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        """The flat buffers of `layout`, merged over all ranks.

        They belong to the merge and are overwritten by the call after the next one with the same layout.
        """
        ...


class Engine(Protocol):
    """Runs the steps of one compiled Keras model on this replica.

    `data` is `(x, y, sample_weight)` in NumPy arrays. `share` is this rank's fraction of the global batch. After
    each training step weights, optimizer state, floating non-trainable state and metrics are the same on every
    rank; if a step raises (a lost peer), they are as before it, apart from random seeds.
    """

    @property
    def origins(self) -> LogOrigins:
        """What the logs of training steps are made of."""
        ...

    @property
    def builds_from_a_batch(self) -> bool:
        """Whether Keras's own `fit` would now read a batch ahead, to build model or metrics from it."""
        ...

    @property
    def merges_only_gradients(self) -> bool:
        """Whether the steps of this model may be left to `Merge.exchange`: nothing but gradients has to be merged at
        every step, and all else at the end of an epoch (`merged_metrics`)."""
        ...

    @property
    def in_variables(self) -> bool:
        """Whether the newest values are in the model's variables, where a callback may have changed them."""
        ...

    def build(self, data: Batch) -> None:
        """Create all variables of model, metrics and optimizer for batches like `data`."""
        ...

    def expect(self, form: ElementStructure) -> None:
        """Say in which form steps of the model's own are given the next batches to train and test with."""
        ...

    def begin(self) -> None:
        """Call before the first step of an epoch or an evaluation."""
        ...

    def train(self, data: Batch, share: float) -> None:
        """One training step on the global batch, of which `data` is this rank's part."""
        ...

    def warm(self, data: Batch, share: float) -> Callable[[], None] | None:
        """Prepare for steps whose local batch is of another size, where that takes long.

        Returns: the rest of the work, which may be done in another thread; None if there is none.
        """
        ...

    def read(self, variables: Sequence[Any]) -> list[Array]:
        """The newest values of variables of the model or its optimizer, in memory of their own."""
        ...

    def layer_state(self) -> list[Any]:
        """The floating variables (on PyTorch buffers, too) that layers change while they compute."""
        ...

    def write(self, values: Sequence[tuple[Any, Array]]) -> None:
        """Give variables of the model or its optimizer these values, for the next step."""
        ...

    def retrace(self) -> None:
        """Call between `end` and `begin` where variables of the model have been exchanged for others."""
        ...

    def logs(self) -> Mapping[str, Any]:
        """The merged logs of the last training step, formed only when they are wanted."""
        ...

    def results_of(self, metrics: Sequence[Array]) -> Mapping[str, Any]:
        """The results of the metrics, if their variables had these values; on engines that have
        `merges_only_gradients`."""
        ...

    def test(self, data: Batch, share: float) -> None:
        """Add a local batch to this rank's own metric state, or, if its share is 0, only compute it (a stand-in)."""
        ...

    def merged_metrics(self, share: float, *, final: bool, training: bool = False) -> Mapping[str, Any]:
        """The logs of all batches tested so far on all ranks; `share` is this rank's fraction of their samples.

        With `training` those of batches that each rank has trained on alone.

        With `final`, the merged values also become every rank's metric state; without, each rank keeps its own
        and can go on adding to it.
        """
        ...

    def predict(self, data: Batch, form: ElementStructure = ElementStructure.PARTS) -> Any:
        """The model's outputs for a local batch, a structure of NumPy arrays; `form` as in `expect`."""
        ...

    def end(self) -> None:
        """Put all state back into the model's variables."""
        ...
