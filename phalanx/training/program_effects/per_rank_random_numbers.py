"""Random numbers that a replica draws independently of the others.

Python's `random`, `np.random` and PyTorch's generator belong to the program, and have the same state on all ranks: a
program's draws in its data, in callbacks and between two methods are the same everywhere. What one replica does alone
(`RandomStream`) draws from streams instead, because otherwise all replicas would drop the same units, and does not
affect the program's generators. A stream follows from their states when the method began, its number, and the rank. So
streams need not be saved: a process that joins or resumes continues the count.
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
from phalanx.keras_compat.model_state import has_custom_code
from phalanx.training.checks.loss_probe import needs_probing
from phalanx.training.program_effects import program_random_state

if TYPE_CHECKING:
    from phalanx.training.replica import Replica


class RandomStream(IntEnum):
    """Activities of one replica that draw independently of the others."""

    STEP = 0
    """A step on its part of a batch, on a backend whose layers draw from the process-wide state."""
    SAMPLES = 1
    """Loading samples of a `DataLoader` that no other replica loads."""
    CALLBACK = 2
    """Running a callback that only the chief runs."""


class PerRankRandomStreams:
    """The streams of one replica."""

    def __init__(self) -> None:
        self._origins: list[int] | None = None  # digests of the program's generators; None before the first stream
        self._methods = 0  # number of consecutive methods with these origins
        self._counts = [0] * len(RandomStream)  # number of streams of each kind
        self._final: list[int] | None = None  # digests when the last method with streams ended

    def begin(self) -> None:
        """Begin a method."""
        self._origins = None
        self._counts = [0] * len(RandomStream)

    def end(self) -> None:
        """End a method."""
        if self._origins is not None:
            self._final = program_random_state.digests()

    @property
    def position(self) -> list[int]:
        """Position of the next streams, the same on all ranks, in 63-bit numbers."""
        if self._origins is None:
            self._origins = program_random_state.digests()
            # Unless a program has reseeded its generators, it expects other numbers than in the last method.
            self._methods = self._methods + 1 if self._origins == self._final else 0
        return [*self._origins, self._methods, *self._counts]

    @position.setter
    def position(self, position: list[int]) -> None:
        self._origins, self._methods, self._counts = position[:3], position[3], position[4:]

    @contextmanager
    def stream(self, kind: RandomStream, replica: Replica, *, in_program: bool = True) -> Iterator[None]:
        """Draw from the next stream of a kind inside the context.

        Args:
            in_program: Whether the program's code runs, which may draw from any generator; if not, only Keras's layers
                draw.
        """
        *origins, methods = self.position[:4]
        self._counts[kind] += 1
        seeds = [hash_of(origin, methods, kind, self._counts[kind], replica.rank) for origin in origins]
        of_backend = random_state.random_state()
        with program_random_state.restored_on_exit() if in_program else nullcontext():
            if in_program:
                program_random_state.seed(seeds)
            random_state.seed_random_state(seeds[-1])
            try:
                yield
            finally:
                random_state.set_random_state(of_backend)


_running: list[Replica] = []  # replicas whose methods run in this process, innermost last


@contextmanager
def running_method(replica: Replica) -> Iterator[None]:
    """Run a method of a model that all replicas call inside the context."""
    if replica.is_alone and not replica.micro_batches:
        yield
        return
    streams = replica.random_streams
    streams.begin()
    _running.append(replica)
    samples = partial(streams.stream, RandomStream.SAMPLES, replica)
    try:
        with drawing_samples_from(samples) if uses_rank_streams(replica) else nullcontext():
            yield
    finally:
        _running.pop()
        streams.end()


def step_stream_factory(model: Any, replica: Replica) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that creates the context for each step of a model on a replica that `uses_rank_streams`."""

    @cache
    def runs_program(knows_losses: bool) -> bool:
        return not knows_losses or has_custom_code(model) or needs_probing(model)

    def drawing() -> AbstractContextManager[None]:
        knows_losses = bool(getattr(getattr(model, "_compile_loss", None), "built", False))
        return replica.random_streams.stream(RandomStream.STEP, replica, in_program=runs_program(knows_losses))

    return drawing


def callback_stream() -> AbstractContextManager[None]:
    """Return the context for what only the chief does for a callback while a method runs."""
    return _running[-1].random_streams.stream(RandomStream.CALLBACK, _running[-1]) if _running else nullcontext()


def uses_rank_streams(replica: Replica) -> bool:
    """Whether steps and samples draw from streams. Micro-batches have their own random numbers, equal on any rank, and
    a replica that is alone draws as Keras does."""
    return not replica.is_alone and not replica.micro_batches
