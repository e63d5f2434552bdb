"""The gradients that a train step on JAX passes to its optimizer, without the update.

While the step is traced, `optimizer.stateless_apply` is overridden: it records its arguments and returns placeholders,
which the step must return unchanged. Most steps do. A step that computes with them, or applies several optimizers,
needs merged gradients in the middle: `merging_stateless_applies`. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.global_batch.global_gradients import GlobalGradients
from phalanx.keras_compat.model_state import optimizers
from phalanx.keras_compat.patching import PatchedFunction, defining_class, overridden_methods

Values = list[Any]


class UnsupportedUpdateError(UnsupportedError):
    """A train step does more with weights and optimizer variables than return the results of one `stateless_apply`."""


_ONE_UPDATE = (
    "`train_step` does more with weights and optimizer variables than to return those of one "
    "`optimizer.stateless_apply` (several updates, a moving average of the weights, a log of them). With parameter "
    "servers, with Horovod's DistributedOptimizer, and with CommunicationOptions(deterministic=True), the one update "
    "is made after the step. Use MultiWorkerMirroredStrategy without that option."
)


class _Placeholder:
    """Placeholder for a value after the update, which is not known yet. Computing with it raises an error."""


class OptimizerCall(NamedTuple):
    """One call of `stateless_apply`: its arguments, and the placeholders that it returned."""

    optimizer: Values
    gradients: Values
    trainable: Values
    new_trainable: list[_Placeholder]
    new_optimizer: list[_Placeholder]


@contextmanager
def recorded_applies(optimizer: Any, *, is_custom: bool = False) -> Iterator[list[OptimizerCall]]:
    """Context in which `optimizer.stateless_apply` records its arguments and returns placeholders.

    Args:
        optimizer: The model's optimizer.
        is_custom: Whether the step is custom, and so may compute with placeholders.

    Raises: UnsupportedUpdateError if such a step fails after placeholders were returned.
    """
    calls: list[OptimizerCall] = []
    own = GlobalGradients(optimizer)

    def record(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
        # One placeholder per value: with them, `gradients_of_only_call` sees that the step has passed on all of them,
        # in their places.
        later = [_Placeholder() for _ in trainable_variables], [_Placeholder() for _ in optimizer_variables]
        gradients = own.to_merge(grads, optimizer._trainable_variables)
        calls.append(OptimizerCall(optimizer_variables, gradients, trainable_variables, *later))
        return later

    with overridden_methods(optimizer, stateless_apply=record, **own.methods):
        try:
            yield calls
        except Exception as error:
            if not (calls and is_custom):
                raise
            raise UnsupportedUpdateError(_ONE_UPDATE) from error


def gradients_of_only_call(
    calls: list[OptimizerCall], state: tuple[Any, ...], trainable: Values, optimizer: Values
) -> Values:
    """Return the gradients of the only `stateless_apply` of a train step.

    Raises: UnsupportedUpdateError if there were none or several, or if the step did more to weights or optimizer
        variables.
    """
    if len(calls) == 1:
        (call,) = calls
        # By identity, the only way a trace can recognize values: the weights went in unchanged, and the placeholders
        # came out unchanged.
        given = _same(call.trainable, trainable) and _same(call.optimizer, optimizer)
        if given and _same(state[0], call.new_trainable) and _same(state[2], call.new_optimizer):
            return call.gradients
    raise UnsupportedUpdateError(_ONE_UPDATE)


Merge = Callable[[Values, Values], Values]
"""Takes gradients and their variables, and returns the merged gradients."""


@contextmanager
def merging_stateless_applies(model: Any, merge: Merge) -> Iterator[list[Any]]:
    """Context in which every optimizer's `stateless_apply` merges its gradients first.

    Yields: All values that such calls have returned so far.
    """
    applied: list[Any] = []
    is_inside = False

    own = {id(optimizer): GlobalGradients(optimizer) for optimizer in optimizers(model)}

    def merging(kind: type) -> PatchedFunction:
        def stateless_apply(optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # the optimizer inside one that scales the loss
                return patch.original(optimizer, optimizer_variables, grads, trainable_variables)
            known = optimizer._trainable_variables
            gradients = (own.get(id(optimizer)) or GlobalGradients(optimizer)).to_merge(grads, known)
            is_inside = True
            try:
                new = patch.original(optimizer, optimizer_variables, merge(gradients, known), trainable_variables)
            finally:
                is_inside = False
            applied.extend([*new[0], *new[1]])
            return new

        patch = PatchedFunction(defining_class(kind, "stateless_apply"), "stateless_apply", stateless_apply)
        return patch

    with ExitStack() as stack:
        for optimizer in optimizers(model):
            stack.enter_context(overridden_methods(optimizer, **own[id(optimizer)].methods))
        for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            stack.enter_context(merging(kind))
        yield applied


def check_updates(before: Sequence[Any], after: Sequence[Any], applied: Sequence[Any]) -> None:
    """Raise UnsupportedError if a step changed weights or optimizer variables without an optimizer.

    Args:
        before, after: Their values before and after the step.
        applied: The values that optimizers have returned.
    """
    # Only values returned by an optimizer are the same on all ranks. All others depend on this rank's samples.
    known = {id(value) for value in [*before, *applied]}
    if not all(id(value) in known for value in after):
        raise UnsupportedError(
            "`train_step` changes weights or optimizer variables other than by `stateless_apply` of a Keras optimizer, "
            "where the replicas' gradients are merged. Call it outside `jax.jit` and `jax.lax.cond`. Let an optimizer "
            "change them (variables that are averages of others: make them non-trainable), or write a custom training "
            "loop with `strategy.run` and `strategy.reduce` (docs/how-to/custom-training-loops.md)."
        )


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
