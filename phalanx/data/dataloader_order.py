"""The samples of the global batches in each pass over a map-style DataLoader, in Keras's order on every rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from phalanx.data.input_request import InputRequest
from phalanx.data.source import PassOrder
from phalanx.keras_compat import data_adapters
from phalanx.transport.serialization import decode, encode


class DataLoaderOrder(PassOrder):
    """The sample indices of each global batch of a pass, drawn from the loader's own samplers.

    Samplers draw from torch's generator as in plain Keras; all ranks use the chief's state of it. Without a
    `shuffling`, torch's generator is seeded from `seed` and the pass. A sampler with its own generator uses that, and
    yields the same order as in plain Keras; processes that continue a pass receive the state of that generator
    (`randomness`).

    Attributes:
        is_by_sample: Whether a batch is a list of sample indices; False if the dataset returns whole batches.
        batches: The loader's sampler of batches.
    """

    def __init__(self, request: InputRequest):
        super().__init__()
        self._loader = loader = request.x
        self.is_by_sample = loader.batch_sampler is not None
        self.batches = loader.batch_sampler if self.is_by_sample else loader.sampler
        self._shuffling = request.shuffling
        self._seed = request.seed
        self._is_pass_an_epoch = request.steps_per_epoch is None
        self._opens_as_keras = request.opens_as_keras
        self._pass_start_state: tuple[bool, list[Any]] = True, []  # of the running pass: `_is_first`, the generators
        self._rest: Iterator[Any] | None = None  # batches of the running pass that are yet to be drawn
        self._rest_state: Any = None  # torch's, after the drawn ones, without a `shuffling`
        self._worker_seed = request.seed  # of the running pass
        self._is_first = True  # whether the next pass is the first
        # The next pass, which Keras opens when one ends; the states of the program's generators before opening, and
        # torch's after it.
        self._opened_pass: tuple[Iterator[Any], list[Any], Any] | None = None
        self._is_exhausted = False  # whether the samplers of the running pass yielded fewer batches than their length

    def batches_of_pass(self, key: int, stop: int | None = None) -> list[Any]:
        """The indices of the global batches of a pass, at least of those before `stop`; None for all.

        A generator of the program draws only for batches that are read or prefetched by workers: a pass may end there.
        """
        drawn: list[Any] = self.get(key, self._begin_pass)
        loader, count = self._loader, len(self.batches)
        if stop is not None and _generators_of(self._loader):
            count = min(count, stop + loader.num_workers * (loader.prefetch_factor or 0))
        if len(drawn) < count and not self._is_exhausted:
            drawn += self._draw(key, count - len(drawn), ends_pass=count == len(self.batches))
        return drawn

    def peek(self, *, restart: bool) -> Any:
        """The indices of the first batch of a pass.

        Args:
            restart: Whether the pass counts as read: the generators then are not restored to their states.
        """
        states = _states_of(self._loader)
        with _torch_state_restored(unless=restart), self._seeded(0):
            first = self._first_batch()
        if not restart:
            for generator, state in zip(_generators_of(self._loader), states, strict=True):
                generator.set_state(state)
        return first

    def reset(self) -> None:
        self._opened_pass = None

    def end_pass(self, next_key: int) -> None:
        if self._draws_as_keras and data_adapters.opens_extra_iterator("torch"):
            states = _states_of(self._loader)
            with self._seeded(next_key):
                opened = self._open()
                if not self._is_pass_an_epoch:
                    self._opened_pass = opened, states, torch.get_rng_state()
                elif self._loader.num_workers:
                    next(opened)  # its workers request batches at once

    def randomness(self, key: int | None) -> bytes:
        is_first, states = self._pass_start_state if self.is_current(key) else (self._is_first, self._next_states())
        return encode([is_first, [state.numpy() for state in states]]) if states else b""

    def restore_randomness(self, randomness: bytes) -> bool:
        is_first, states = decode(randomness) if randomness else (self._is_first, [])
        generators = _generators_of(self._loader)
        if len(states) != len(generators):
            return False
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(torch.from_numpy(state.copy()))
        self.invalidate()
        self._is_first, self._opened_pass = is_first, None
        return True

    def worker_generator(self, start: int, rank: int) -> Any:
        """A generator to seed the workers of a loader that begins with batch `start` of the running pass. A loader may
        be opened again in the middle of a pass, so this must not draw from torch's generator or the program's, which
        the sampler shares.

        Args:
            rank: The rank whose samples the workers load; 0 if all ranks load the same.
        """
        seeds = np.random.SeedSequence([self._worker_seed, start, rank]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(seeds[0] >> np.uint64(1)))

    @property
    def _uses_program_generator(self) -> bool:
        return self._loader.generator is not None or self._shuffling is not None

    @property
    def _draws_as_keras(self) -> bool:
        """Whether orders depend on generators of the program, which then must advance as in plain Keras."""
        return self._shuffling is not None or (self._opens_as_keras and bool(_generators_of(self._loader)))

    def _next_states(self) -> list[Any]:
        """The states of the program's generators before the next pass."""
        return _states_of(self._loader) if self._opened_pass is None else self._opened_pass[1]

    def _begin_pass(self, key: int) -> list[Any]:
        self._pass_start_state = self._is_first, self._next_states()
        if self._is_first and self._draws_as_keras and data_adapters.loaders_are_read_by_tf_data():
            with self._seeded(key):
                self._first_batch()
        self._is_first = False
        self._rest, self._is_exhausted = None, False
        return []

    @property
    def _counts_batches(self) -> bool:
        """Whether counting batches finds the end of a pass, as in Keras; a loop over the loader, workers and `tf.data`
        request one more batch."""
        return self._opens_as_keras and not self._loader.num_workers and not data_adapters.loaders_are_read_by_tf_data()

    def _draw(self, key: int, count: int, *, ends_pass: bool) -> list[Any]:
        """Draw the next batches of the running pass."""
        with self._drawing(key):
            if self._rest is None:
                self._rest = self._open()
            drawn = list(itertools.islice(self._rest, count))
            self._is_exhausted = len(drawn) < count
            if ends_pass and not self._counts_batches:
                next(self._rest, None)  # requested to find the end; samplers may draw
        return [list(batch) for batch in drawn] if self.is_by_sample else drawn

    @contextlib.contextmanager
    def _drawing(self, key: int) -> Iterator[None]:
        """Context in which torch's generator has the state from which samplers must draw."""
        if self._shuffling is not None:
            # The state instead of the order: 5 KB, independent of the number of samples. A whole number of int64.
            own = torch.get_rng_state().numpy().view(np.int64)
            chiefs = np.array(self._shuffling.from_chief(own))
            # All ranks draw, so that the program's next numbers stay equal, unless it gave this rank another state.
            with _torch_state_restored(unless=np.array_equal(own, chiefs)):
                torch.set_rng_state(torch.from_numpy(chiefs.view(np.uint8)))
                yield
            return
        with self._seeded(key):
            if self._rest is not None:
                torch.set_rng_state(self._rest_state)
            elif self._opened_pass is not None:
                torch.set_rng_state(self._opened_pass[2])
            elif not self._uses_program_generator:
                self._worker_seed = _seed_of(self._seed, key)
            yield
            self._rest_state = torch.get_rng_state()

    @contextlib.contextmanager
    def _seeded(self, key: int) -> Iterator[None]:
        """Context in which torch's generator is seeded for this pass; with a `shuffling`, it is the program's, and it
        stays advanced afterwards."""
        if self._shuffling is not None:
            yield
            return
        with _torch_state_restored():
            torch.default_generator.manual_seed(_seed_of(self._seed, key))
            yield

    def _open(self) -> Iterator[Any]:
        """Open the next pass like a DataLoader, and return its batches: a sampler that shuffles when its iterator is
        created draws first, then the workers' seed is drawn, then samplers draw batch by batch."""
        opened, self._opened_pass = self._opened_pass, None
        if opened is not None:
            return opened[0]
        batches: Iterator[Any] = iter(self.batches)
        self._draw_worker_seed()
        return batches

    def _draw_worker_seed(self) -> None:
        """Draw the workers' seed, as each pass over a plain DataLoader does."""
        if self._uses_program_generator:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            self._worker_seed = int(drawn.item())

    def _first_batch(self) -> Any:
        """The indices of the first batch of a pass that is not continued."""
        return next(self._open())


def _generators_of(loader: Any) -> list[Any]:
    """The generators that the program created for a loader and its samplers, as far as they are accessible."""
    holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found = [generator for holder in holders if (generator := getattr(holder, "generator", None)) is not None]
    return list({id(generator): generator for generator in found}.values())


def _states_of(loader: Any) -> list[Any]:
    """The states of the program's generators."""
    return [generator.get_state() for generator in _generators_of(loader)]


def _seed_of(seed: int, key: int) -> int:
    """A seed for the pass of this key."""
    return int(np.random.SeedSequence([seed, key]).generate_state(1)[0])


@contextlib.contextmanager
def _torch_state_restored(*, unless: bool = False) -> Iterator[None]:
    """Context that restores the state of torch's global generator at its end, except with `unless`."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        if not unless:
            torch.set_rng_state(state)
