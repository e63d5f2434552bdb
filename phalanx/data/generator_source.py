"""Python generators: read once, in order, by every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.arrays.tree import map_leaves
from phalanx.data.elements import to_numpy
from phalanx.data.source import StreamSource
from phalanx.errors import ConfigurationError

_KIND = "Python generator"


def generator_source(generator: Iterator[Any], *, rank: int, world_size: int) -> StreamSource:
    """A source over a generator of `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or of dicts.

    A generator cannot be begun again. Where it ends, training ends: Keras would repeat its first two
    batches, which it had read to learn their shapes, in every further epoch.

    Whether it ends at all cannot be known: without `steps_per_epoch` an endless one trains for ever.
    """
    elements = map(_standardize, generator)
    return StreamSource(lambda key: elements, kind=_KIND, rank=rank, world_size=world_size, once=True)


def _standardize(element: Any) -> Any:
    if not isinstance(element, (tuple, dict)):
        raise ConfigurationError(
            "When passing a Python generator to a Keras model, the generator must return a tuple, either "
            "(input,) or (inputs, targets) or (inputs, targets, sample_weights). "
            f"Received an element of type {type(element).__name__}."
        )
    return map_leaves(to_numpy, element)
