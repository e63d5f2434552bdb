"""Distributed datasets that a `tf.function` iterates over: each batch comes from a host call.

A function is traced once and runs many times. A trace would keep the Python iterator that it saw, so an iterator in a
graph is the *number* of an iterator of this process. `iter(dataset)` in a graph starts an iteration each time it runs,
and returns its number. An iterator that is passed to a `tf.function` becomes its number.
AutoGraph calls `reduce` for a loop over a `tf.distribute.DistributedDataset`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.data import DistributedDataset, DistributedIterator
from phalanx.engines.replica.tensorflow.host_calls import call_in_graph
from phalanx.errors import UnsupportedError

_numbers = itertools.count()
# An iteration lives as long as its holder: the program's iterator, or the place in a graph.
_iterations: weakref.WeakValueDictionary[int, _Iteration] = weakref.WeakValueDictionary()


class GraphDataset(DistributedDataset, tf.distribute.DistributedDataset):  # type: ignore[misc]
    """See `DistributedDataset`."""

    element_spec: Any = None  # the interface has a property

    def __iter__(self) -> DistributedIterator:
        if not tf.inside_function():
            iteration = _Iteration(self._begin())
            return GraphIterator(iteration.number, self.element_spec, iteration)
        _check_spec(self.element_spec, self.source.traits.kind)
        running: list[_Iteration] = []  # of this place in the function, which holds it

        def begin() -> Any:
            running[:] = [_Iteration(self._begin())]
            return np.array(running[0].number, np.int64)

        number = call_in_graph(begin, [], tf.int64)
        number.set_shape([])
        return GraphIterator(number, self.element_spec)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return the last state of `state = reduce_func(state, batch)`. AutoGraph loops over the batches with it."""
        iterator: Any = iter(self)
        if not tf.inside_function():
            state = initial_state
            for element in iterator:
                state = reduce_func(state, element)
            return state

        def step(more: Any, element: Any, state: Any) -> Any:
            state = reduce_func(state, element)
            return *iterator.next_or_empty(), state

        first = iterator.next_or_empty()
        return tf.while_loop(lambda more, *_: more, step, (*first, initial_state), parallel_iterations=1)[2]


class _Iteration:
    """One iteration of this process.

    Attributes:
        number: Number by which graphs refer to it.
        elements: The remaining elements, as NumPy arrays.
    """

    def __init__(self, elements: Iterator[Any]) -> None:
        self.number = next(_numbers)
        self.elements = elements
        _iterations[self.number] = self


class GraphIterator(DistributedIterator, tf.distribute.DistributedIterator):  # type: ignore[misc]
    """See `DistributedIterator`. In a `tf.function`, its `number` is a tensor."""

    element_spec: Any = None

    def __init__(self, number: Any, element_spec: Any, iteration: _Iteration | None = None) -> None:
        super().__init__(iter(()), element_spec)
        self.number = number
        self._iteration = iteration  # lives as long as this

    def __next__(self) -> Any:
        if not tf.inside_function():
            iteration = self._iteration or _iterations[int(self.number)]
            return map_leaves(tf.convert_to_tensor, next(iteration.elements))
        return _pack(self.element_spec, self._call(_next, []))

    def get_next(self) -> Any:
        """Return the next element. Raises: tf.errors.OutOfRangeError at the end."""
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def get_next_as_optional(self) -> Any:
        if not tf.inside_function():
            return super().get_next_as_optional()
        more, element = self.next_or_empty()
        kind = tf.experimental.Optional
        return tf.cond(more, lambda: kind.from_value(element), lambda: kind.empty(self.element_spec))

    def next_or_empty(self) -> tuple[Any, Any]:
        """In a graph: return whether there is an element, and the element, or one without samples."""
        specs = leaves(self.element_spec)

        def following(number: Any) -> list[Any]:
            try:
                return [np.array(True), *_next(number)]
            except StopIteration:
                return [np.array(False), *map(_empty_like, specs)]

        more, *values = self._call(following, [tf.bool])
        more.set_shape([])
        return more, _pack(self.element_spec, values)

    def _call(self, function: Callable[[Any], list[Any]], before: Sequence[Any]) -> list[Any]:
        _check_spec(self.element_spec, "dataset")
        kinds = [spec.dtype for spec in leaves(self.element_spec)]
        return list(call_in_graph(function, [tf.convert_to_tensor(self.number, tf.int64)], [*before, *kinds]))

    # What a `tf.function` receives (`tf.nest`): the number as a tensor, and what the trace depends on.

    def __tf_flatten__(self) -> tuple[_ElementKind, tuple[Any]]:
        return _ElementKind(self.element_spec), (tf.convert_to_tensor(self.number, tf.int64),)

    @classmethod
    def __tf_unflatten__(cls, kind: _ElementKind, components: tuple[Any]) -> GraphIterator:
        return cls(components[0], kind.spec)


class _ElementKind:
    """The spec of elements, as a part of a trace's key."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self._key = repr(spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ElementKind) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _next(number: Any) -> list[Any]:
    """Return the arrays of the next element. Raises: StopIteration; TensorFlow converts it to OutOfRangeError."""
    return list(leaves(next(_iterations[int(number)].elements)))


def _pack(spec: Any, values: Sequence[Any]) -> Any:
    given = iter(values)

    def one(leaf: Any) -> Any:
        value = next(given)
        value.set_shape(leaf.shape)
        return value

    return map_leaves(one, spec)


def _empty_like(spec: Any) -> Any:
    return np.zeros([length or 0 for length in spec.shape], spec.dtype.as_numpy_dtype)


def _check_spec(element_spec: Any, kind: str) -> None:
    specs = leaves(element_spec)
    if not specs or any(not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None for spec in specs):
        raise UnsupportedError(
            f"A distributed {kind} was iterated inside a tf.function, which must know the dtypes and ranks of its "
            f"elements: {element_spec}. Use a tf.data.Dataset of dense tensors, or iterate it outside and pass each "
            f"batch to the tf.function."
        )
