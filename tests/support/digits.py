"""The digits data set of scikit-learn without its import, which takes a process longer than training on it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np


def load_digits() -> tuple[Any, Any]:
    """Load images of shape (1797, 64) with values up to 16, and their labels of shape (1797,)."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None, "scikit-learn is not installed"
    assert spec.submodule_search_locations is not None
    data = np.loadtxt(Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=",")
    return data[:, :-1], data[:, -1].astype(int)
