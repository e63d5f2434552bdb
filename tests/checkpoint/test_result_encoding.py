"""What a `fit` returns reaches processes that join later, whatever callbacks have logged."""

from __future__ import annotations

import datetime
from typing import Any

import keras
import numpy as np

from phalanx.checkpoint.result_encoding import decode_history, encode_history


def test_a_history_travels_with_whatever_callbacks_have_logged() -> None:
    history: Any = keras.callbacks.History()
    moment = datetime.datetime(2020, 1, 1)
    history.epoch, history.params = [0, 1], {"epochs": 2}
    history.history = {
        "loss": [0.5, np.float32(0.25)],
        "tensor": [keras.ops.convert_to_tensor([1.0, 2.0])] * 2,
        "several": [[keras.ops.convert_to_tensor(1.0), 2]] * 2,
        "when": [moment] * 2,
    }
    back = decode_history(encode_history(history), keras.Model())
    assert (back.epoch, back.params) == ([0, 1], {"epochs": 2})
    assert back.history["loss"] == [0.5, 0.25]
    np.testing.assert_array_equal(back.history["tensor"], [[1.0, 2.0]] * 2)
    assert back.history["several"] == [[1.0, 2]] * 2
    assert back.history["when"] == [repr(moment)] * 2, "no other process has the object"
