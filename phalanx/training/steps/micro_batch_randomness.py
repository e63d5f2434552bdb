"""Random numbers of layers that depend on a micro-batch's number, not on the rank that computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.engines.engine import Engine
from phalanx.engines.random_state import (
    advance_shared_state,
    random_state,
    seed_from_rank,
    set_random_state,
    states_differ,
)
from phalanx.training.state_sync import seed_generators, shifted_seed


class MicroBatchRandomness:
    """Random state of micro-batches. Between two steps it is the same on all ranks; each micro-batch starts from it,
    shifted by its number."""

    def __init__(self, model: Any, engine: Engine) -> None:
        self._engine = engine
        self._seeds = [generator.state for generator in seed_generators(model)]
        self._before: list[Any] = []
        self._process_state: list[Any] = []  # of the backend's generator, see `engines.random_state`
        self._entered: list[Any] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step inside the context; if it fails, restore the random state."""
        self._before, self._process_state = self._read(), random_state()
        try:
            yield
            after = self._read()
        except BaseException:
            self._restore()
            raise
        for old, new in zip(self._before, after, strict=True):
            # Word 0 of a Keras seed is the seed, which `shifted_seed` changes; the others count draws. All
            # micro-batches draw equally often, so the last one's count applies to all.
            old[1:] = new[1:]  # how often a micro-batch has drawn
        if states_differ(self._entered, random_state()):
            advance_shared_state(self._process_state)
            self._process_state = random_state()
        self._restore()

    def enter(self, number: int) -> None:
        """Draw the random numbers of this micro-batch from here on."""
        # A placeholder's number is negative.
        number = max(number, 0)
        if self._seeds:
            shifted = [shifted_seed(seed, number) for seed in self._before]
            self._engine.write(list(zip(self._seeds, shifted, strict=True)))
        # Plus 1, because 0 means the chief, for which this does nothing.
        seed_from_rank(self._process_state, number + 1)
        self._entered = random_state()

    def _read(self) -> list[Any]:
        return self._engine.read(self._seeds) if self._seeds else []

    def _restore(self) -> None:
        if self._seeds:
            self._engine.write(list(zip(self._seeds, self._before, strict=True)))
        set_random_state(self._process_state)
