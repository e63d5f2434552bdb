"""Names that Keras gives to unnamed objects: it counts them, and copies of objects need the counters of the originals.

Uses the global attribute `object_name_uids` and `Variable._path`. Tested with Keras 3.15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute

_COUNTERS = "object_name_uids"


def name_counters() -> dict[str, int]:
    """Return how many objects of each kind Keras has named."""
    return dict(get_global_attribute(_COUNTERS) or {})


def set_name_counters(counters: Mapping[str, int]) -> None:
    """Make Keras continue its names from these counters."""
    set_global_attribute(_COUNTERS, defaultdict(int, counters))


@contextmanager
def naming_from(counters: Mapping[str, int]) -> Iterator[None]:
    """Context in which Keras names objects as it did when the counters had these values."""
    before = name_counters()
    set_name_counters(counters)
    try:
        yield
    finally:
        set_name_counters(before)


def set_path(variable: Any, path: str) -> None:
    """Set the path of a variable that is a copy."""
    variable._path = path
