"""Internals of Keras's PyTorch backend, used unpatched. Import only when Keras runs on PyTorch.

Tested with Keras 3.12 and 3.15. `tests/keras_compat/contract.py` checks each.
"""

from __future__ import annotations

from keras.src.backend.common import KerasVariable
from keras.src.backend.torch import numpy as keras_numpy
from keras.src.backend.torch.core import convert_to_tensor, get_device
from keras.src.backend.torch.optimizers.torch_adam import Adam
from keras.src.backend.torch.optimizers.torch_adamax import Adamax
from keras.src.backend.torch.optimizers.torch_adamw import AdamW
from keras.src.backend.torch.optimizers.torch_nadam import Nadam
from keras.src.backend.torch.optimizers.torch_rmsprop import RMSprop
from keras.src.backend.torch.optimizers.torch_sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "KerasVariable",
    "Nadam",
    "RMSprop",
    "convert_to_tensor",
    "get_device",
    "keras_numpy",
]
