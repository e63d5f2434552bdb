"""Buffers of PyTorch modules take values as variables of Keras do."""

from __future__ import annotations

import pytest

from tests.support.programs import check_python

pytestmark = pytest.mark.torch

PROGRAM = """
import keras, numpy as np, torch
from phalanx.engines import buffers

for dtype in (torch.float32, torch.bfloat16):
    wrapped = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(3).to(dtype))
    model = keras.Sequential([keras.Input((3,)), wrapped])
    mean, variance, count = buffers(model)
    value = keras.ops.convert_to_numpy(variance.value) * 3
    mean.assign(value)
    count.assign(np.int64(7))
    assert mean.value.tolist() == [3.0] * 3, mean.value
    assert int(count.value) == 7
    variance.assign(mean.value)
    assert variance.value.tolist() == [3.0] * 3
"""


def test_they_take_arrays_and_tensors_of_every_dtype() -> None:
    check_python("-c", PROGRAM, backend="torch")
