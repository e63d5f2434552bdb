"""The table of scenarios, and what each is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKENDS = ("jax", "tensorflow", "torch")
ONE_BACKEND = ("torch",)
"""For `quick`: what lies in code that is the same for all backends runs on the one that compiles nothing."""
ON_TENSORFLOW = ("tensorflow",)
"""For `quick`: data of TensorFlow, whose import costs the other backends more than the rest of a scenario."""
EACH_KIND = ("jax", "torch")
"""For `quick`: one backend for each kind of engine. What they read is read alike on TensorFlow and PyTorch."""


@dataclass
class Setting:
    """Where a scenario runs.

    Attributes:
        strategy: Strategy of the job; None in the plain Keras process that it is compared with.
        folder: This process's own, empty.
        shared: The folder that all ranks share, empty.
        backend: Keras's.
    """

    strategy: Any
    folder: Path
    shared: Path
    backend: str

    @property
    def rank(self) -> int:
        return 0 if self.strategy is None else self.strategy.rank

    @property
    def world_size(self) -> int:
        return 1 if self.strategy is None else self.strategy._replica.world_size  # type: ignore[no-any-return]

    @property
    def alone(self) -> bool:
        return self.strategy is None

    def scope(self) -> Any:
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's bytes; a meeting point as well."""
        if self.strategy is None:
            return [value]
        return self.strategy._replica.communicator.all_gather_bytes(value)  # type: ignore[no-any-return]


Function = Callable[[Setting], dict[str, Any]]


@dataclass(frozen=True)
class Scenario:
    """One entry of the table.

    Attributes:
        function: Takes a `Setting`, returns a dict of what is compared. Keys that begin with "own_" may differ between
            ranks; what they must be is up to the scenario's own test.
        tolerance: Relative, and absolute for weights and outputs.
        backends: Where it runs.
        needs: Modules without which it is left out.
        plain: Whether plain Keras gives the values to compare with. Else only the ranks are compared with each other.
        error: What every rank of a job must raise instead, by backend: the class's name and a part of the text.
        worlds: The job sizes that it runs with.
        quick: The backends on which `make test` runs it with two ranks. All else is marked slow: to start a job and
            compile its models takes seconds.
        quick_of_three: `make test` runs it with three ranks as well, on one backend.
    """

    name: str
    function: Function
    tolerance: float = 1e-4
    backends: tuple[str, ...] = BACKENDS
    needs: tuple[str, ...] = ()
    plain: bool = True
    error: dict[str, tuple[str, str]] | None = None
    worlds: tuple[int, ...] = (2, 3)
    quick: tuple[str, ...] = ()
    quick_of_three: bool = False

    @property
    def has_reference(self) -> bool:
        return self.plain and self.error is None

    def is_slow(self, backend: str, world_size: int, first: str) -> bool:
        """Whether `make test` leaves it out; `first` is the backend that stands for all in jobs of three."""
        if world_size == 2:
            return backend not in self.quick
        return not (self.quick_of_three and backend == first)


class Table(dict[str, Scenario]):
    """Scenarios by name.

    Args:
        quick: Default for each scenario that does not set it.
    """

    def __init__(self, quick: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._quick = quick

    def scenario(self, **options: Any) -> Callable[[Function], Function]:
        """A decorator that enters a function under its own name; options as `Scenario` has them."""

        def register(function: Function) -> Function:
            self.add(function.__name__, function, **options)
            return function

        return register

    def add(self, name: str, function: Function, **options: Any) -> None:
        assert name not in self, f"two scenarios are called {name}"
        self[name] = Scenario(name, function, **{"quick": self._quick, **options})


SCENARIOS = Table()
scenario = SCENARIOS.scenario
add = SCENARIOS.add
