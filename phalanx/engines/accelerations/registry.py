"""Which accelerations are in use: all of them, unless `PHALANX_ACCELERATIONS` says otherwise.

    PHALANX_ACCELERATIONS=none                         none of them
    PHALANX_ACCELERATIONS=-torch_fused_adam            all but this one
    PHALANX_ACCELERATIONS=vectorized_updater           only this one

Several names are separated by commas. An engine asks once, when it is created, so a step costs nothing more.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import ACCELERATIONS
from phalanx.errors import ConfigurationError

KNOWN: Mapping[str, str] = {
    "tensorflow_fused_adam": "Adam on TensorFlow in one kernel instead of a dozen passes over the memory",
    "torch_flush_denormals": "updates on PyTorch with numbers as zero that are so small that processors take long",
    "torch_fused_adam": "Adam on PyTorch in one kernel instead of a dozen passes over the memory",
    "torch_onednn_matmul": "matrix products of Keras on PyTorch by oneDNN, where it is faster than MKL",
    "vectorized_updater": "on parameter servers, many small variables updated as one vector",
}


def enabled_accelerations(text: str) -> frozenset[str]:
    """Return the names that a value of `PHALANX_ACCELERATIONS` enables.

    Args:
        text: "all", "" (the same), "none", names to enable, or names with a minus to disable, separated by commas.

    Raises: ConfigurationError for an unknown name, or if names to enable and to disable are mixed.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words in ([], ["all"]):
        return frozenset(KNOWN)
    if words == ["none"]:
        return frozenset()
    names = frozenset(word.removeprefix("-") for word in words)
    disables = {word.startswith("-") for word in words}
    if names - KNOWN.keys() or len(disables) > 1:
        raise ConfigurationError(
            f"{ACCELERATIONS} is {text!r}. Write `all`, `none`, the names to enable, or the names to disable with a "
            f"minus before each. The names are {', '.join(KNOWN)}."
        )
    return frozenset(KNOWN) - names if disables == {True} else names


@functools.cache
def _enabled() -> frozenset[str]:
    return enabled_accelerations(process_environment().get(ACCELERATIONS, ""))


def is_enabled(name: str) -> bool:
    """Whether this acceleration may be used in this process."""
    assert name in KNOWN, name
    return name in _enabled()


def choose(name: str, accelerated: Any, plain: Any) -> Any:
    """Return `accelerated` if the acceleration of this name is enabled, else `plain`."""
    return accelerated if is_enabled(name) else plain
