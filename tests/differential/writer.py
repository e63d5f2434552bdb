"""Writes the source of a program while hypothesis draws what is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Writer:
    """The parts of a source, and the draws behind it.

    Attributes:
        backend: that the program is for.
        definitions: classes and functions, by name.
        lines: of the function `program`.
        has_several_rates: whether a model has a `MultiOptimizer`, whose learning rate cannot be set.
        rounds_coarsely: whether the program computes with half precision.
        anneals: whether a loss has a term whose `weight` begins at zero.
    """

    draw: Draw
    backend: str
    definitions: dict[str, str] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    has_several_rates: bool = False
    rounds_coarsely: bool = False
    anneals: bool = False
    _depth: int = 1

    def one_of(self, choices: Sequence[Any]) -> Any:
        """One of the choices; the first is the simplest."""
        return self.draw(st.sampled_from(list(choices)))

    def number(self, least: int, most: int) -> int:
        return int(self.draw(st.integers(least, most)))

    def chance(self, in_: int = 2) -> bool:
        """True once in so many times."""
        return bool(self.draw(st.integers(0, in_ - 1)) == in_ - 1)

    def write(self, text: str) -> None:
        self.lines.append(indent(dedent(text).strip("\n"), "    " * self._depth))

    def define(self, name: str, text: str) -> str:
        """Put a class or function before the program; returns its name."""
        self.definitions[name] = dedent(text).strip("\n")
        return name

    def in_scope(self) -> _Scope:
        self.write("with scope():")
        return _Scope(self)


@dataclass
class _Scope:
    writer: Writer

    def __enter__(self) -> None:
        self.writer._depth += 1

    def __exit__(self, *_: object) -> None:
        self.writer._depth -= 1
