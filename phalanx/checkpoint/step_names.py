"""Names of checkpoints, which contain their steps: `model-000000120.suffix`."""

from __future__ import annotations

import re

from phalanx.errors import ConfigurationError
from phalanx.storage.files import list_names
from phalanx.storage.paths import StoragePath

WEIGHTS_SUFFIX, KERAS_SUFFIX = ".weights.h5", ".keras"
"""Suffixes of weights files, and of Keras's files of whole models."""
STEP_DIGITS = 9
"""Names sort like steps up to a billion; beyond that, the numbers are compared."""

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def name_of_step(basename: str, suffix: str, step: int) -> str:
    """The name of a step's checkpoint, whether or not it exists."""
    return f"{basename}-{step:0{STEP_DIGITS}}{suffix}"


def names_by_step(directory: StoragePath, basename: str, suffix: str) -> list[tuple[int, str]]:
    """The steps and names of all checkpoints, including damaged ones, in the order of their steps."""
    pattern = re.compile(re.escape(basename) + r"-(\d+)" + re.escape(suffix))
    return sorted((int(match[1]), name) for name in list_names(directory) if (match := pattern.fullmatch(name)))


def last_number(name: str) -> int | None:
    """The last number in the name of a weights or model file, as programs choose it; None if it has none."""
    match = _LAST_NUMBER.search(name.removesuffix(WEIGHTS_SUFFIX).removesuffix(KERAS_SUFFIX))
    return int(match[1]) if match else None


def check_keep(keep: int | None) -> None:
    """Raise ConfigurationError unless at least one checkpoint is kept; None keeps all."""
    if keep is not None and keep < 1:
        raise ConfigurationError(f"{keep} checkpoints are to be kept: pass a number from 1 up, or None for all.")
