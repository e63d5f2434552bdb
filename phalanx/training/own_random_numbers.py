"""The random numbers that a replica draws apart from the others.

Python's `random`, `np.random` and PyTorch's generator are the program's, and in the same state on all ranks: what a
program draws from them in its data, in callbacks and between two methods is the same everywhere. Steps, and samples of
a `DataLoader` that one replica alone loads, draw from streams instead, or all replicas would drop the same units. A
stream follows from the program's state when the method began, its number in the method, and the rank. So streams need
not be saved: a process that joins or resumes continues to count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.data.reading_apart import drawing_samples_from
from phalanx.engines import random_state
from phalanx.training import program_random_state

if TYPE_CHECKING:
    from phalanx.training.replica import Replica


class _Generators(NamedTuple):
    """Those that draw from a kind of streams while one is open."""

    state: Callable[[], Any]
    restore: Callable[[Any], None]
    seed: Callable[[Sequence[int]], None]
    differ: Callable[[Any, Any], bool]


_KINDS = (
    _Generators(
        random_state.random_state, random_state.set_random_state, random_state.seed_random_state, random_state.differ
    ),
    _Generators(
        program_random_state.states, program_random_state.set_states, program_random_state.seed, lambda a, b: a != b
    ),
)
_LAYERS, _DATA = range(2)

_NEXT = 2
"""No kind has this number."""


class OwnRandomNumbers:
    """The streams of one replica."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A method begins."""
        self._origin: int | None = None
        self._counts = [0, 0]  # streams of each kind
        self._is_drawn = [False, False]  # from any of each kind

    @property
    def position(self) -> list[int]:
        """Of the streams to come, the same on all ranks: a digest of the state from which all follow, of 64 bits, and
        how many there were of each kind."""
        if self._origin is None:
            self._origin = _digest_of_program()
        return [self._origin, *self._counts]

    @position.setter
    def position(self, position: list[int]) -> None:
        self._origin, *self._counts = position

    def of_step(self, rank: int) -> AbstractContextManager[None]:
        """While inside, layers draw from the stream of the next step, on a backend whose layers draw from the state of
        the whole process."""
        return self._stream(_LAYERS, rank)

    def of_data(self, rank: int) -> AbstractContextManager[None]:
        """While inside, the program draws from the stream of what is read next."""
        return self._stream(_DATA, rank)

    @contextmanager
    def _stream(self, kind: int, rank: int) -> Iterator[None]:
        generators = _KINDS[kind]
        programs = generators.state()
        self._counts[kind] += 1
        generators.seed([rank, kind, *self.position])
        first = None if self._is_drawn[kind] else generators.state()
        try:
            yield
        finally:
            self._is_drawn[kind] = first is None or generators.differ(first, generators.state())
            generators.restore(programs)

    def end(self, is_drawn_anywhere: Callable[[bool], bool]) -> None:
        """A method has ended: if streams were drawn from, go on from another state, so that the next method has others.

        Args:
            is_drawn_anywhere: whether something is true on any rank.
        """
        # A rank may have had no sample, and so no step; but each has loaded samples, or none.
        may_be_drawn = random_state.keeps_random_state(), self._counts[_DATA] > 0
        for may_be, is_drawn, generators in zip(may_be_drawn, self._is_drawn, _KINDS, strict=True):
            if may_be and is_drawn_anywhere(is_drawn):
                generators.seed([_NEXT, _digest_of_program()])


@contextmanager
def running_method(replica: Replica, method: str) -> Iterator[None]:
    """Around a call of a model's method that all replicas make.

    Args:
        method: by name.
    """
    if not draws_apart(replica):
        yield
        return
    own = replica.own_numbers
    own.begin()
    with drawing_samples_from(lambda: own.of_data(replica.rank)):
        yield
    if method.endswith("_on_batch"):
        # Layers have drawn on all ranks, or on none. A collective would take long next to one batch.
        own.end(lambda is_drawn: is_drawn)
    elif not replica.is_candidate:  # which has not taken part
        own.end(lambda is_drawn: replica.retry(lambda: replica.any(is_drawn)))


def draws_apart(replica: Replica) -> bool:
    """Whether steps and samples draw from streams. Micro-batches have random numbers of their own, the same whichever
    rank computes them, and a replica that is alone draws as Keras does."""
    return not replica.is_alone and not replica.micro_batches


def _digest_of_program() -> int:
    return int.from_bytes(hashlib.blake2b(program_random_state.random_state(), digest_size=8).digest(), "big")
