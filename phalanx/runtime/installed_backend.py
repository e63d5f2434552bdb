"""Chooses an installed backend for Keras if the one that it would choose is not installed.

Keras defaults to TensorFlow, so on a machine with only JAX, every program would end with a ModuleNotFoundError.
"""

from __future__ import annotations

import logging
import sys

from phalanx.config.environment import process_environment, set_variables
from phalanx.config.environment_variables import KERAS_BACKEND
from phalanx.config.keras_backends import BACKENDS, installed_backends, keras_backend
from phalanx.runtime.first_worker import worker_count_if_first

logger = logging.getLogger(__name__)


def replace_missing_backend() -> None:
    """Set KERAS_BACKEND if the program has not and Keras would not find its backend. Called just before its import."""
    environment = process_environment()
    if environment.get(KERAS_BACKEND):
        return
    chosen, installed = keras_backend(environment), installed_backends()
    if chosen not in BACKENDS or chosen in installed or not installed:
        return
    # Prefer a backend that the program has already imported.
    backend = next((name for name in installed if name in sys.modules), installed[0])
    set_variables({KERAS_BACKEND: backend})
    if worker_count_if_first():
        logger.warning("%s is not installed, so Keras runs on %s. To choose, set %s.", chosen, backend, KERAS_BACKEND)
