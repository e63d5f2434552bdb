"""Access to the other replicas for layers and losses that need them in the middle of a step.

An engine that takes a step, and `strategy.run`, enter a `StepScope`. The code inside gets the collectives from
`current()`. Every rank computes the same step, so all call the same collectives in the same order. This includes a rank
without samples, whose placeholder batch counts for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.errors import UnsupportedError


class StepCollectives(Protocol):
    """Collectives on tensors of the backend, inside traced or compiled code, through which gradients flow back.

    The gradient of a rank's tensor includes the contributions of all ranks' losses, merged as the step merges
    gradients. So a layer computes with the results as one process would with the whole batch, and needs no code for
    the backward pass. Gradients of gradients work as well.

    Attributes:
        weights_gradients: Whether gradients still have to be weighted by the ranks' shares; see `global_gradients`.
        synchronizes_batch_norm: Whether all batch normalization is over the batches of all ranks.
        may_lack_samples: Whether a rank without samples computes with an empty batch, not with a placeholder.
    """

    weights_gradients: bool
    synchronizes_batch_norm: bool
    may_lack_samples: bool

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """Sum tensors over the ranks, all in one message.

        Args:
            tensors: Tensors of shapes that are known and equal on all ranks. A rank without samples counts as zero.
        """
        ...

    def all_gather(self, tensors: list[Any]) -> list[Any]:
        """Return the rows of all ranks in rank order, which is the order of the global batch.

        Args:
            tensors: Tensors with one row, or a fixed number of rows, per sample. A rank without samples has no rows in
                the result.
        """
        ...


class SingleRankCollectives:
    """The collectives of a step in which no other rank takes part."""

    weights_gradients = synchronizes_batch_norm = False
    may_lack_samples = True

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_reduce`."""
        return tensors

    def all_gather(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_gather`."""
        return tensors


class PredictionCollectives:
    """The collectives of predictions. Ranks predict their own rows, not in lockstep and not in equally many batches.

    Raises: UnsupportedError on any call.
    """

    weights_gradients = synchronizes_batch_norm = False
    may_lack_samples = True

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_reduce`."""
        return self._refuse("all_reduce")

    def all_gather(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_gather`."""
        return self._refuse("all_gather")

    def _refuse(self, name: str) -> list[Any]:
        raise UnsupportedError(
            f"{name}() was called in predict(), where the replicas do not compute in step. Call it only "
            f"`if training:`, and store what predictions need of it in a variable (self.add_weight)."
        )


SINGLE_RANK = SingleRankCollectives()
PREDICTION = PredictionCollectives()


# A stack, because a step may contain code that is not part of it, inside `StepScope(None)`.
class _Stack(threading.local):
    """The contexts that this thread has entered, innermost last."""

    def __init__(self) -> None:
        self.contexts: list[StepScope] = []


_stack = _Stack()


class StepScope(AbstractContextManager[None]):
    """A context in which code computes one rank's part of a step.

    Args:
        collectives: Collectives with the other ranks; None: the code is not part of the surrounding step.
        key: Separates traces of compiled code that contain these collectives from other traces.
    """

    def __init__(self, collectives: StepCollectives | None, key: Hashable | None = None) -> None:
        self.collectives = collectives
        self.key = key

    def __enter__(self) -> None:
        _stack.contexts.append(self)

    def __exit__(self, *error: object) -> None:
        _stack.contexts.pop()


def current() -> StepCollectives | None:
    """Return the collectives of the step that runs or is traced; None outside of steps."""
    return _stack.contexts[-1].collectives if _stack.contexts else None


def trace_key() -> Hashable | None:
    """Return the `key` of the innermost `StepScope`; None outside of all."""
    return _stack.contexts[-1].key if _stack.contexts else None
