"""Conversion of the operations and values that a program passes to a reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from phalanx.collectives.communicator import ReduceOp
from phalanx.errors import ConfigurationError


def to_reduce_op(value: Any) -> ReduceOp:
    """The `ReduceOp` for a name, a `ReduceOp`, or a `tf.distribute.ReduceOp`."""
    name = value if isinstance(value, str) else getattr(value, "name", None)
    try:
        return ReduceOp[str(name).upper()]
    except KeyError:
        known = ", ".join(op.name for op in ReduceOp)
        raise ConfigurationError(f"reduce_op is {value!r}; it must be one of {known}.") from None


def as_float(leaf: Any) -> Any:
    """Cast integers and booleans to `keras.config.floatx()`, so that they have a mean. None stays None."""
    if leaf is None:
        return None
    kind = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    is_whole = any(name in str(kind) for name in ("int", "bool"))
    return keras.ops.cast(leaf, keras.config.floatx()) if is_whole else leaf


def map_non_none_leaves(function: Callable[[list[Any]], Iterable[Any]], value: Any) -> Any:
    """Apply `function` to the list of a structure's leaves. None, such as the gradient of an unused variable, stays."""
    leaves = keras.tree.flatten(value)
    present = [leaf for leaf in leaves if leaf is not None]
    results = iter(function(present) if present else ())
    return keras.tree.pack_sequence_as(value, [None if leaf is None else next(results) for leaf in leaves])
