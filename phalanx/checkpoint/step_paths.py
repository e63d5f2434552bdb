"""The checkpoints in a directory by their steps: `model-000000120.suffix`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from phalanx.errors import ConfigurationError

_STEP_DIGITS = 9


def path_of_step(directory: Path, basename: str, suffix: str, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return directory / f"{basename}-{step:0{_STEP_DIGITS}}{suffix}"


def paths_by_step(directory: Path, basename: str, suffix: str) -> list[tuple[int, Path]]:
    """The steps and paths of all checkpoints, damaged ones included, in the order of their steps."""
    pattern = re.compile(re.escape(basename) + r"-(\d+)" + re.escape(suffix))
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted((int(match[1]), name) for name in names if (match := pattern.fullmatch(name)))
    return [(step, directory / name) for step, name in found]


def check_keep(keep: int | None) -> None:
    """Raise ConfigurationError unless at least one checkpoint is kept; None keeps all."""
    if keep is not None and keep < 1:
        raise ConfigurationError(f"{keep} checkpoints are to be kept: pass a number from 1 up, or None for all.")
