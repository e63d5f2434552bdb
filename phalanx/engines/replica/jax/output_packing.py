"""Joins a step's results on JAX into a few arrays to send, and reads them after the merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.engines.metric_rules import MetricRule
from phalanx.engines.step_layout import StepLayout

Values = list[Any]


@dataclass(frozen=True)
class OutputPacking:
    """Joins what a step merges, and reads the merged buffers. It is the same for all batches of a model.

    Attributes:
        layout: Layout of everything that is merged: gradients, state, metrics, logs.
        groups: Indices in `layout`, in the order in which they are sent (`step_layout.group_small_arrays`).
        gradients: Number of gradients.
        state: Indices of the floating non-trainable variables that the step changed.
        metrics: Rule of each metric variable.
        logs: Names of the logs that are not metric results.
    """

    layout: StepLayout
    groups: tuple[tuple[int, ...], ...]
    gradients: int
    state: tuple[int, ...]
    metrics: tuple[MetricRule, ...]
    logs: tuple[str, ...]

    @cached_property
    def _order(self) -> tuple[int, ...]:
        return tuple(index for group in self.groups for index in group)

    @cached_property
    def _contents(self) -> StepLayout:
        return self.layout.select(self._order)

    def join(self, values: Values) -> Values:
        """Join everything that is merged into the few arrays that are sent."""
        return [
            values[group[0]] if len(group) == 1 else jnp.concatenate([jnp.ravel(values[index]) for index in group])
            for group in self.groups
        ]

    @cached_property
    def packed_layout(self) -> StepLayout:
        """The layout of the result of `join`."""
        layout = self.layout
        parts = [layout.select(group) for group in self.groups]
        return StepLayout(
            tuple(part.shapes[0] if len(part.shapes) == 1 else (sum(map(math.prod, part.shapes)),) for part in parts),
            tuple(part.dtypes[0] for part in parts),
            tuple(part.weights[0] for part in parts),
            layout.owners if len(parts) == len(layout.shapes) else (),  # a group belongs to several variables
        )

    def read(self, flats: Sequence[Any]) -> tuple[Values, Values, Values, dict[str, Any]]:
        """Read gradients, state, metrics and logs from the merged flat buffers."""
        return self._sorted(self._contents.unpack(flats))

    def read_packed(self, arrays: Sequence[Any]) -> tuple[Values, Values, Values, dict[str, Any]]:
        """Read the same from arrays like those that `join` returns."""
        pieces: list[Any] = []
        for group, array in zip(self.groups, arrays, strict=True):
            pieces += self.layout.select(group).unpack([jnp.ravel(array)])
        return self._sorted(pieces)

    def _sorted(self, pieces: Sequence[Any]) -> tuple[Values, Values, Values, dict[str, Any]]:
        # Undo the order in which they were sent.
        by_index = dict(zip(self._order, pieces, strict=True))
        values = [by_index[index] for index in range(len(by_index))]
        ends = np.cumsum([self.gradients, len(self.state), len(self.metrics)])
        gradients, state, metrics, logs = (values[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True))
        return gradients, state, metrics, dict(zip(self.logs, logs, strict=True))
