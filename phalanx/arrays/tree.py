"""Nested structures of arrays: walked without Keras's tree, which costs more than a batch's slices do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """The same structure with `function` applied to each leaf.

    Dicts, lists, tuples and named tuples are walked; None stays None; everything else is a leaf.
    """
    if isinstance(structure, np.ndarray):
        return function(structure)
    if structure is None:
        return None
    if isinstance(structure, tuple):
        items = [map_leaves(function, item) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, list):
        return [map_leaves(function, item) for item in structure]
    if isinstance(structure, Mapping):
        return {key: map_leaves(function, item) for key, item in structure.items()}
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """The leaves of a structure, None left out, in the order in which they stand."""
    found: list[Any] = []
    map_leaves(found.append, structure)
    return found
