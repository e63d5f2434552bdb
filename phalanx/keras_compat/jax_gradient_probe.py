"""The gradients that a train step on JAX passes to its optimizer, without the update.

While the step is traced, `optimizer.stateless_apply` is overridden: it notes its arguments and returns placeholders,
which the step must return unchanged. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.global_gradients import GlobalGradients
from phalanx.keras_compat.patching import overridden_methods

Values = list[Any]


class _Later:
    """Placeholder for a value after the update, which is not known yet: using it raises an error."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            "`train_step` computes with the weights or optimizer variables that `optimizer.stateless_apply` returned "
            "(a moving average of the weights, a log). Under a strategy on the JAX backend the update comes after the "
            "step, when the gradients of all replicas are merged: do it in a callback, or write a custom training "
            "loop with `strategy.run` and `strategy.reduce` (docs/custom_loops.md)."
        )

    __jax_array__ = __array__ = __getitem__ = __iter__ = __len__ = __float__ = __int__ = __bool__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    shape = dtype = ndim = property(_refuse)


class OptimizerCall(NamedTuple):
    """One call of `stateless_apply`: its arguments, and the placeholders that it returned."""

    optimizer: Values
    gradients: Values
    trainable: Values
    new_trainable: list[_Later]
    new_optimizer: list[_Later]


@contextmanager
def probe(optimizer: Any) -> Iterator[list[OptimizerCall]]:
    """A context in which `optimizer.stateless_apply` notes its arguments and returns placeholders."""
    calls: list[OptimizerCall] = []
    own = GlobalGradients(optimizer)

    def note(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
        later = [_Later() for _ in trainable_variables], [_Later() for _ in optimizer_variables]
        gradients = own.to_merge(grads, optimizer._trainable_variables)
        calls.append(OptimizerCall(optimizer_variables, gradients, trainable_variables, *later))
        return later

    with overridden_methods(optimizer, stateless_apply=note, **own.methods):
        yield calls


def only_call(calls: list[OptimizerCall], state: tuple[Any, ...], trainable: Values, optimizer: Values) -> Values:
    """The gradients of the only `stateless_apply` of a train step.

    Raises: UnsupportedError if there were none or several, or the step did more to weights or optimizer variables.
    """
    if len(calls) != 1:
        raise UnsupportedError(
            f"`train_step` calls `optimizer.stateless_apply` {len(calls)} times; under a strategy on the JAX backend "
            f"it must be exactly once, because the gradients are merged there. Write a custom training loop with "
            f"`strategy.run` and `strategy.reduce` instead (docs/custom_loops.md)."
        )
    (call,) = calls
    given = _same(call.trainable, trainable) and _same(call.optimizer, optimizer)
    if not given or not _same(state[0], call.new_trainable) or not _same(state[2], call.new_optimizer):
        raise UnsupportedError(
            "`train_step` changes the weights or the optimizer's variables outside `optimizer.stateless_apply`; "
            "under a strategy on the JAX backend all changes must come from that one call. Write a custom training "
            "loop with `strategy.run` and `strategy.reduce` instead (docs/custom_loops.md)."
        )
    return call.gradients


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
