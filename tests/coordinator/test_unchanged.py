"""When a function must be pickled again."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phalanx.coordinator.change_detection import trace_references, traces_equal


def traced(function: Any) -> Any:
    return trace_references(function, lambda thing: isinstance(thing, np.ndarray) and thing.nbytes > 1000, pickle.dumps)


def made() -> tuple[Callable[..., Any], Callable[[str], None]]:
    """A function, and how to change something that it refers to."""
    number, options, small, large = 1, {"rate": 0.1}, np.zeros(3), np.zeros(1000)

    def helper(x: int) -> int:
        return x + number

    def function(x: int, scale: int = 2) -> Any:
        return helper(x) * scale, options["rate"], small, large

    def change(what: str) -> None:
        nonlocal number, large
        match what:
            case "a name, bound again":
                number = 2
            case "a large array, bound again":
                large = np.zeros(1000)
            case "the inside of a dictionary":
                options["rate"] = 0.2
            case "the inside of a small array":
                small[0] = 1
            case "a default":
                function.__defaults__ = (3,)

    return function, change


def test_what_is_the_same_is_the_same() -> None:
    function, _ = made()
    assert traces_equal(traced(function), traced(function))
    partial = functools.partial(function, 1, scale=(2, "x"))
    assert traces_equal(traced(partial), traced(partial))
    assert not traces_equal(traced(partial), traced(functools.partial(function, 1, scale=(3, "x"))))
    assert not traces_equal(traced(function), traced(made()[0]))
    assert not traces_equal(traced(lambda: 1), traced(lambda: 1))


@pytest.mark.parametrize(
    "what",
    [
        "a name, bound again",
        "a large array, bound again",
        "the inside of a dictionary",
        "the inside of a small array",
        "a default",
    ],
)
def test_what_changed_is_noticed(what: str) -> None:
    function, change = made()
    before = traced(function)
    change(what)
    assert not traces_equal(before, traced(function))


def test_functions_that_refer_to_themselves_end() -> None:
    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    assert traces_equal(traced(odd), traced(odd))


class Config:
    rate = 1

    def scaled(self) -> int:
        return self.rate * FACTOR


FACTOR = 2


def test_a_class_of_the_main_program_is_compared_with_all_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> int:
        return Config().scaled()

    before = traced(function)
    assert traces_equal(traced(function), before)  # a class of a module travels by its name
    monkeypatch.setattr(Config, "rate", 2)
    assert traces_equal(traced(function), before)
    monkeypatch.setattr(Config, "__module__", "__main__")
    monkeypatch.setattr(Config.scaled, "__module__", "__main__")
    before = traced(function)
    assert traces_equal(traced(function), before)
    monkeypatch.setattr(Config, "rate", 3)
    assert not traces_equal(traced(function), before)
    before = traced(function)
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert not traces_equal(traced(function), before)
