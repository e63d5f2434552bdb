"""The digits of scikit-learn, without its import, which takes a job's process longer than to train on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np


def load_digits() -> tuple[Any, Any]:
    """Images of shape (1797, 64) with values up to 16, and their numbers of shape (1797,)."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None, "scikit-learn is not installed"
    assert spec.submodule_search_locations is not None
    data = np.loadtxt(Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=",")
    return data[:, :-1], data[:, -1].astype(int)
