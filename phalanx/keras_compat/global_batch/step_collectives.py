"""The other replicas, for layers and losses that need them in the middle of a step.

An engine that takes a step, and `strategy.run`, enter `InStep`; what they compute asks `current()` for the collectives.
Every rank computes the same step, so all call the same collectives in the same order: a rank without samples too, whose
placeholder batch counts for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.errors import UnsupportedError


class StepCollectives(Protocol):
    """Collectives on tensors of the backend, inside what is traced or compiled, that gradients flow back through.

    What flows back into a rank's tensor is what all ranks' losses, merged as the step merges gradients, owe to it.
    So a layer computes with the results as one process would with the whole batch, and needs nothing for the way back.
    Gradients of gradients flow as well.

    Attributes:
        weights_gradients: whether what flows back has yet to be weighted by the ranks' shares; see `global_gradients`.
        synchronizes_batch_norm: whether all batch normalization is over the batches of all ranks.
        may_lack_samples: whether a rank without samples computes with a batch of none, and with no placeholder.
    """

    weights_gradients: bool
    synchronizes_batch_norm: bool
    may_lack_samples: bool

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """Sums over the ranks, all in one message.

        Args:
            tensors: of shapes that are known and equal on all ranks. Those of a rank without samples count as zero.
        """
        ...

    def all_gather(self, tensors: list[Any]) -> list[Any]:
        """The rows of all ranks, one rank's after the other's: the order of the global batch.

        Args:
            tensors: each with one row for each sample, or a whole number of them; a rank without samples has none in
                the result.
        """
        ...


class LoneCollectives:
    """Those of a step that no other rank takes part in."""

    weights_gradients = synchronizes_batch_norm = False
    may_lack_samples = True

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_reduce`."""
        return tensors

    def all_gather(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_gather`."""
        return tensors


class PredictionCollectives:
    """Those of predictions, which ranks make of their own rows, not all at once and not all of as many batches.

    Raises: UnsupportedError, whatever is called.
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


LONE = LoneCollectives()
PREDICTION = PredictionCollectives()


# A stack, because a step may contain what is no part of it: that is inside of `InStep(None)`.
class _Stack(threading.local):
    """The contexts that this thread is inside of, innermost last."""

    def __init__(self) -> None:
        self.contexts: list[InStep] = []


_stack = _Stack()


class InStep(AbstractContextManager[None]):
    """A context in which what is computed is one rank's part of a step.

    Args:
        collectives: reach the other ranks; None: what is computed is no part of the step around it.
        key: keeps traces of compiled code apart, which contain these very collectives.
    """

    def __init__(self, collectives: StepCollectives | None, key: Hashable | None = None) -> None:
        self.collectives = collectives
        self.key = key

    def __enter__(self) -> None:
        _stack.contexts.append(self)

    def __exit__(self, *error: object) -> None:
        _stack.contexts.pop()


def current() -> StepCollectives | None:
    """The collectives of the step that runs or is traced; None outside of one."""
    return _stack.contexts[-1].collectives if _stack.contexts else None


def trace_key() -> Hashable | None:
    """See `InStep`; None outside of all."""
    return _stack.contexts[-1].key if _stack.contexts else None
