"""Python generators: read once, in order, by every rank."""

from __future__ import annotations

from typing import Any

from phalanx.arrays.tree import map_leaves
from phalanx.data.dataset_elements import to_numpy
from phalanx.data.input_request import InputRequest
from phalanx.data.source import SourceTraits, StreamSource
from phalanx.errors import ConfigurationError

_KIND = "Python generator"


def make_source(request: InputRequest) -> StreamSource:
    """Create the source of a generator of `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or of dicts.

    A generator cannot restart. As in Keras, which reads two batches to learn their shapes, each pass begins with these
    two batches: an epoch after the end of the generator has no others.

    It is unknown whether a generator ends: without `steps_per_epoch`, an endless one trains forever.
    """
    elements = map(_standardize, request.x)
    traits = SourceTraits(_KIND, signature=_KIND)
    return StreamSource(lambda key: elements, traits, request, is_single_pass=True)


def _standardize(element: Any) -> Any:
    if not isinstance(element, (tuple, dict)):
        raise ConfigurationError(
            "When passing a Python generator to a Keras model, the generator must return a tuple, either "
            "(input,) or (inputs, targets) or (inputs, targets, sample_weights). "
            f"Received an element of type {type(element).__name__}."
        )
    return map_leaves(to_numpy, element)
