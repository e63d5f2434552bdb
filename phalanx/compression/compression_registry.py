"""The built-in compressions, by name.

To add one, write a module with a `Compression` and add a line to `NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.compression.base_compression import Compression
from phalanx.compression.cast import BFloat16, Float16
from phalanx.compression.power_sgd import PowerSGD
from phalanx.compression.quantized import Int4, Int6, Int8
from phalanx.compression.top_k import TopK
from phalanx.errors import ConfigurationError

NAMES: dict[str, Callable[[], Compression]] = {
    "float16": Float16,
    "bfloat16": BFloat16,
    "int8": Int8,
    "int6": Int6,
    "int4": Int4,
    "top_k": TopK,
    "power_sgd": PowerSGD,
}


def resolve(compression: Compression | str | None) -> Compression | None:
    """The compression for a strategy's `compression=`: an object, or the name of a built-in one with its defaults.

    Raises: ConfigurationError for anything else; the message lists the names.
    """
    if compression is None:
        return None
    if isinstance(compression, str):
        if compression not in NAMES:
            raise ConfigurationError(
                f"compression is {compression!r}; write {', '.join(map(repr, NAMES))}, None, or an object such as "
                f"phalanx.compression.PowerSGD(rank=2)."
            )
        return NAMES[compression]()
    if isinstance(compression, type) or not all(
        hasattr(compression, name) for name in ("all_reduce", "takes", "feedback")
    ):
        raise ConfigurationError(
            f"compression is {compression!r}; it must be one of {', '.join(map(repr, NAMES))}, "
            f"or an object with `feedback`, `takes` and `all_reduce` (see phalanx.compression.Compression)."
        )
    return compression


def describe(compression: Compression | None) -> str:
    """The name of a compression, for messages."""
    if compression is None:
        return "none"
    name = next((name for name, kind in NAMES.items() if isinstance(kind, type) and type(compression) is kind), None)
    return name or type(compression).__name__
