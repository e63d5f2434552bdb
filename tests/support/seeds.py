"""The seed of a test program."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import keras


def set_random_seed(seed: int) -> None:
    """Like the function of Keras, which imports TensorFlow on any backend if installed: two seconds per process."""
    if keras.backend.backend() == "tensorflow" or "tensorflow" in sys.modules:
        keras.utils.set_random_seed(seed)
    else:
        with mock.patch("keras.src.utils.rng_utils.tf", SimpleNamespace(available=False)):
            keras.utils.set_random_seed(seed)
