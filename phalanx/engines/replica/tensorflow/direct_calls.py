"""Calls of a traced function whose arguments are known to match those for which it was traced.

For each call, TensorFlow binds the arguments to the function's parameters and casts them, which is 40 of the 100 us
that a small function takes on one core. Only the order in which the function takes its tensors is needed.
"""

from __future__ import annotations

from typing import Any

from phalanx.arrays.tree import leaves


class DirectCall:
    """A direct call of one of TensorFlow's concrete functions.

    Args:
        function: The concrete function.
        arguments: The arguments for which it was traced: nested structures of tensors.
    """

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._function = function
        self._order = _order(function, arguments)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with arguments of the same structure, shapes and dtypes."""
        if self._order is None:
            return self._function(*arguments)
        tensors = leaves(arguments)
        taken = [tensors[number] for number in self._order]
        return self._function.inference_fn.call_preflattened(taken + self._function.captured_inputs)


def _order(function: Any, arguments: tuple[Any, ...]) -> list[int] | None:
    """Return the indices of the arguments' tensors in the order in which the function takes them; None if unknown: in
    another version of TensorFlow, or if one tensor occurs twice."""
    kind: Any = getattr(function, "function_type", None)
    run: Any = getattr(function, "inference_fn", None)
    if not (hasattr(kind, "bind") and hasattr(kind, "unpack_inputs") and hasattr(run, "call_preflattened")):
        return None
    tensors = leaves(arguments)
    # The function's own binding shows where each tensor goes. It runs once, on tensors with distinct identities.
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    taken = [numbers.get(id(tensor)) for tensor in kind.unpack_inputs(kind.bind(*arguments))]
    order = [number for number in taken if number is not None]
    return order if len(order) == len(taken) == len(numbers) == len(tensors) else None
