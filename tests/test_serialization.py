"""Plain values come back as they were, and what would not is refused."""

from __future__ import annotations

import datetime
from collections import deque
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from phalanx.transport.serialization import decode, encode, is_serializable


@pytest.mark.parametrize(
    "dtype",
    ["<f4", ">f4", ">i8", "?", "<U3", "S2", "<c8", "<M8[D]", "<m8[s]", "<f2", np.longdouble, ml_dtypes.bfloat16],
    ids=lambda dtype: np.dtype(dtype).str + np.dtype(dtype).name,
)
def test_arrays_keep_their_type_and_values(dtype: Any) -> None:
    values = np.array([[0, 1], [2, 10]])
    array = values.astype("<m8[s]" if np.dtype(dtype).kind == "m" else dtype)
    assert is_serializable({"a": [array]})
    back = decode(encode({"a": [array]}))["a"][0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    back[0, 0] = back[1, 1]  # it may be written


def test_empty_ones_too() -> None:
    for array in (np.zeros((0, 3), "float32"), np.array([], "U"), np.array(5.0)):
        assert decode(encode(array)).shape == array.shape


def test_numbers_and_containers() -> None:
    value = {"a": (1, [2.5, None, True], "s", b"b"), "b": np.float32(0.5), "c": 2**64 - 1, "d": -(2**63)}
    assert is_serializable(value)
    assert decode(encode(value)) == value | {"b": 0.5}


def test_dictionaries_with_other_keys_sets_and_deques() -> None:
    value = {0: "a", 1.5: "b", (1, "x"): {2}, "s": set(), None: {}, b"b": deque([1, (2,)], maxlen=3), True: deque()}
    assert is_serializable(value)
    back = decode(encode(value))
    assert back == value
    assert list(back) == list(value)
    assert (back[b"b"].maxlen, back[True].maxlen) == (3, None)
    assert decode(encode({np.int64(3): 1})) == {3: 1}


NOT_PLAIN: list[Any] = [2**64, -(2**63) - 1, 1j, np.complex64(1), np.longdouble(1), np.datetime64("2020-01-01")]
NOT_PLAIN += [datetime.date(2020, 1, 1), np.array([[1]], object)]
NOT_PLAIN += [
    "\udcf6",
    {"\udcf6": 1},
    object(),
    {object(): 1},
    frozenset({1}),
    {1j},
    np.array([object()]),
    np.zeros(2, [("a", "f4")]),
]


@pytest.mark.parametrize("value", NOT_PLAIN, ids=range(len(NOT_PLAIN)))
def test_what_would_not_come_back_is_refused(value: Any) -> None:
    assert not is_serializable(value)
    assert not is_serializable([value])
    for content in (value, [value]):
        with pytest.raises(TypeError, match="do not travel between processes"):
            encode(content)


class Text(str):
    """As a program may have one, with methods."""


class Number(int):
    pass


class Real(float):
    pass


@pytest.mark.parametrize("value", [Text("a"), Number(3), Real(0.5), {Text("a"): Number(1)}, [True, Number(0)]])
def test_values_of_classes_of_the_program_come_back_as_plain_ones(value: Any) -> None:
    assert is_serializable(value)
    back = decode(encode(value))
    assert back == value
    assert type(back) in (str, int, float, dict, list)


def test_arrays_of_strings_come_back() -> None:
    array = np.array([["a", "bc"], [b"\xff", ""]], object)
    assert is_serializable(array)
    np.testing.assert_array_equal(decode(encode(array)), array)
