"""The random numbers that a replica draws apart from the others.

Python's `random`, `np.random` and PyTorch's generator are the program's, and in the same state on all ranks: what a
program draws from them in its data, in callbacks and between two methods is the same everywhere. What one replica does
apart (`RandomStream`) draws from streams instead, or all replicas would drop the same units, and is not seen in the
program's generators. A stream follows from their states when the method began, its number, and the rank. So streams
need not be saved: a process that joins or resumes continues to count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from phalanx.data.rank_local_reads import drawing_samples_from
from phalanx.engines import random_state
from phalanx.engines.random_state import hash_of
from phalanx.keras_compat.model_state import has_own_code
from phalanx.training.checks.loss_probe import has_open_questions
from phalanx.training.program_effects import program_random_state

if TYPE_CHECKING:
    from phalanx.training.replica import Replica


class RandomStream(IntEnum):
    """What one replica does apart from the others."""

    STEP = 0
    """Of its part of a batch; on a backend whose layers draw from the state of the whole process."""
    SAMPLES = 1
    """Loading samples of a `DataLoader` that no other replica loads."""
    CALLBACK = 2
    """Running a callback of the chief alone."""


class PerRankRandomStreams:
    """The streams of one replica."""

    def __init__(self) -> None:
        self._origins: list[int] | None = None  # digests of the program's generators; None before the first stream
        self._methods = 0  # in a row with these origins
        self._counts = [0] * len(RandomStream)  # of streams
        self._final: list[int] | None = None  # digests when the last method with streams had ended

    def begin(self) -> None:
        """A method begins."""
        self._origins = None
        self._counts = [0] * len(RandomStream)

    def end(self) -> None:
        """A method has ended."""
        if self._origins is not None:
            self._final = program_random_state.digests()

    @property
    def position(self) -> list[int]:
        """Of the streams to come, the same on all ranks, in numbers of 63 bits."""
        if self._origins is None:
            self._origins = program_random_state.digests()
            # Unless a program has seeded its generators again, it expects other numbers than in the last method.
            self._methods = self._methods + 1 if self._origins == self._final else 0
        return [*self._origins, self._methods, *self._counts]

    @position.setter
    def position(self, position: list[int]) -> None:
        self._origins, self._methods, self._counts = position[:3], position[3], position[4:]

    @contextmanager
    def stream(self, what: RandomStream, replica: Replica, *, in_program: bool = True) -> Iterator[None]:
        """While inside, draw from the next stream of a kind.

        Args:
            in_program: whether code of the program runs, which may draw from any generator; else only layers of Keras
                do.
        """
        *origins, methods = self.position[:4]
        self._counts[what] += 1
        seeds = [hash_of(origin, methods, what, self._counts[what], replica.rank) for origin in origins]
        of_backend = random_state.random_state()
        with program_random_state.kept() if in_program else nullcontext():
            if in_program:
                program_random_state.seed(seeds)
            random_state.seed_random_state(seeds[-1])
            try:
                yield
            finally:
                random_state.set_random_state(of_backend)


_running: list[Replica] = []  # whose methods run in this process, the innermost last


@contextmanager
def running_method(replica: Replica) -> Iterator[None]:
    """Around a call of a model's method that all replicas make."""
    if replica.is_alone and not replica.micro_batches:
        yield
        return
    streams = replica.random_streams
    streams.begin()
    _running.append(replica)
    samples = partial(streams.stream, RandomStream.SAMPLES, replica)
    try:
        with drawing_samples_from(samples) if draws_apart(replica) else nullcontext():
            yield
    finally:
        _running.pop()
        streams.end()


def drawing_in_steps(model: Any, replica: Replica) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context around each step of a model on a replica that `draws_apart`."""

    @cache
    def runs_program(knows_losses: bool) -> bool:
        return not knows_losses or has_own_code(model) or has_open_questions(model)

    def drawing() -> AbstractContextManager[None]:
        knows_losses = bool(getattr(getattr(model, "_compile_loss", None), "built", False))
        return replica.random_streams.stream(RandomStream.STEP, replica, in_program=runs_program(knows_losses))

    return drawing


def drawing_in_callback() -> AbstractContextManager[None]:
    """Around what the chief alone does for a callback while a method runs."""
    return _running[-1].random_streams.stream(RandomStream.CALLBACK, _running[-1]) if _running else nullcontext()


def draws_apart(replica: Replica) -> bool:
    """Whether steps and samples draw from streams. Micro-batches have random numbers of their own, the same whichever
    rank computes them, and a replica that is alone draws as Keras does."""
    return not replica.is_alone and not replica.micro_batches
