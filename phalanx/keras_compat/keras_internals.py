"""Functions and classes of Keras without a public name, used unpatched. Those that a patch needs are next to it.

Tested with Keras 3.12 and 3.15. `tests/keras_compat/contract.py` checks that each exists and behaves as expected.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import keras
from keras.src.backend import compute_output_spec, get_keras_mask, set_keras_mask
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.callbacks.monitor_callback import MonitorCallback
from keras.src.models.functional import Functional
from keras.src.saving import saving_lib
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.utils.io_utils import print_msg
from keras.src.utils.python_utils import pythonify_logs

__all__ = [
    "Functional",
    "MonitorCallback",
    "class_weight_to_sample_weights",
    "compute_output_spec",
    "get_keras_mask",
    "global_seed_generator",
    "in_stateless_scope",
    "in_symbolic_scope",
    "keras_trainer",
    "print_msg",
    "pythonify_logs",
    "serialize_weights",
    "set_keras_mask",
    "train_validation_split",
]


@functools.cache
def keras_trainer() -> Any:
    """Return the trainer class of the current backend, from which `keras.Model` inherits `fit`."""
    return next(base for base in keras.Model.__mro__ if "fit" in vars(base) and base is not keras.Model)


def global_seed_generator() -> Any:
    """Return the generator of `keras.random` functions without a seed; None before the first of these is called."""
    return get_global_attribute("global_seed_generator")


def serialize_weights(model: Any) -> memoryview:
    """Return the content of the file that `model.save_weights` would write.

    It is built in memory: when HDF5 cannot write (on a full disk), the process crashes with a segmentation fault.
    """
    buffer = io.BytesIO()
    store = saving_lib.H5IOStore(buffer, mode="w")
    try:
        saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    finally:
        store.close()
    return buffer.getbuffer()
