"""Calls of a traced function whose arguments are known to be like those that it was traced for.

TensorFlow binds the arguments of each call to the names of its parameters, and casts them to what it takes, which
is 40 of the 100 us that a small function takes on one core. All that is needed is the order in which it takes tensors.
"""

from __future__ import annotations

from typing import Any

from phalanx.arrays.tree import leaves


class ConcreteCall:
    """A concrete function of TensorFlow's.

    Args:
        arguments: what it was traced for; nested structures of tensors.
    """

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._function = function
        self._order = _order(function, arguments)

    def __call__(self, *arguments: Any) -> Any:
        """Args: arguments: of the same structure, shapes and dtypes."""
        if self._order is None:
            return self._function(*arguments)
        tensors = leaves(arguments)
        taken = [tensors[number] for number in self._order]
        return self._function.inference_fn.call_preflattened(taken + self._function.captured_inputs)


def _order(function: Any, arguments: tuple[Any, ...]) -> list[int] | None:
    """The numbers of the arguments' tensors in the order in which the function takes them; None if that cannot be told:
    in another version of TensorFlow, or where one tensor stands in several places."""
    kind: Any = getattr(function, "function_type", None)
    run: Any = getattr(function, "inference_fn", None)
    if not (hasattr(kind, "bind") and hasattr(kind, "unpack_inputs") and hasattr(run, "call_preflattened")):
        return None
    tensors = leaves(arguments)
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    taken = [numbers.get(id(tensor)) for tensor in kind.unpack_inputs(kind.bind(*arguments))]
    order = [number for number in taken if number is not None]
    return order if len(order) == len(taken) == len(numbers) == len(tensors) else None
