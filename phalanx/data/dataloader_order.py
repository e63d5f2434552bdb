"""Which samples form the global batches of each pass over a map-style DataLoader, in Keras's order on every rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from phalanx.data.input_request import InputRequest
from phalanx.data.shuffling import Shuffling
from phalanx.data.source import PassOrder
from phalanx.keras_compat import data_adapters
from phalanx.transport.serialization import decode, encode


class DataLoaderOrder:
    """The sample indices of each global batch of a pass, from the loader's own samplers (`SampleOrders`).

    Samplers draw from torch's generator as in plain Keras, on all ranks from the state that it has on the chief.
    Without a `shuffling`, torch's generator is seeded for this from `seed` and the pass. A sampler with a generator of
    its own uses that, and gives the order that the plain DataLoader gives; ranks that join later receive that
    generator's state (`randomness`).

    Attributes:
        is_by_sample: whether a batch is a list of sample indices; False if the dataset makes whole batches.
        batches: the loader's own sampler of batches.
    """

    def __init__(self, request: InputRequest):
        self._loader = loader = request.x
        self.is_by_sample = loader.batch_sampler is not None
        self.batches = loader.batch_sampler if self.is_by_sample else loader.sampler
        self._shuffling = request.shuffling
        self._seed = request.seed
        self._is_pass_an_epoch = request.steps_per_epoch is None
        self._kept = PassOrder()
        self._states_before: list[Any] = []  # of the program's generators, when the running pass began
        self._worker_seed = request.seed  # of the running pass
        self._is_first = True  # the next pass
        self._opened: Iterator[Any] | None = None  # the next pass, which Keras opens when one ends

    def of_pass(self, key: int) -> list[Any]:
        """The indices of each global batch of a pass."""
        batches: list[Any] = self._kept.get(key, self._draw_pass)
        return batches

    def forget(self) -> None:
        self._kept.forget()

    def peek(self, *, restart: bool) -> Any:
        """The indices of the first batch of a pass.

        Args:
            restart: whether the pass counts as read: the generators then do not return to their states.
        """
        generators = self._program_generators()
        states = [generator.get_state() for generator in generators]
        with _torch_state_restored(unless=restart and self._shuffling is not None):
            if self._shuffling is None:
                _seed_torch(self._seed, 0)
            first = self._glance()
        if not restart:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return first

    def end_pass(self) -> None:
        """A pass has ended: draw what Keras draws then."""
        if self._shuffling is not None and data_adapters.opens_one_more_pass("torch"):
            opened = self._open()
            if not self._is_pass_an_epoch:
                self._opened = opened
            elif self._loader.num_workers:
                next(opened)  # its workers ask for batches at once

    def randomness(self, key: int | None) -> bytes:
        states = self._states_before
        if not self._kept.is_of(key):
            states = [generator.get_state() for generator in self._program_generators()]
        return encode([state.numpy() for state in states]) if states else b""

    def continue_with(self, randomness: bytes) -> bool:
        states: Any = decode(randomness) if randomness else []
        generators = self._program_generators()
        if len(states) != len(generators):
            return False
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(torch.from_numpy(state.copy()))
        self.forget()
        return True

    def worker_generator(self, rank: int) -> Any:
        """A generator that seeds this rank's workers, unlike those of other ranks; None for torch's own. Nothing more
        may be drawn from the program's generator, which the sampler shares."""
        if not self._uses_program_generator:
            return None
        return torch.Generator().manual_seed((self._worker_seed + rank) % (1 << 63))

    @property
    def _uses_program_generator(self) -> bool:
        return self._loader.generator is not None or self._shuffling is not None

    def _program_generators(self) -> list[Any]:
        """Those that the program created, as far as they can be seen: of the loader and of its samplers."""
        loader = self._loader
        holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        found = [generator for holder in holders if (generator := getattr(holder, "generator", None)) is not None]
        return list({id(generator): generator for generator in found}.values())

    def _draw_pass(self, key: int) -> list[Any]:
        self._states_before = [each.get_state() for each in self._program_generators()]
        if self._is_first and self._shuffling is not None and data_adapters.loaders_are_read_by_tf_data():
            self._glance()
        self._is_first = False
        if self._shuffling is not None:
            batches = self._draw_as_the_chief(self._shuffling)
        else:
            with _torch_state_restored():
                _seed_torch(self._seed, key)
                batches = self._all_batches(self._open())
        return [list(batch) for batch in batches] if self.is_by_sample else batches

    def _draw_as_the_chief(self, shuffling: Shuffling) -> list[Any]:
        # The state instead of the order: 5 KB, however many samples there are. It is a whole number of int64.
        own = torch.get_rng_state().numpy().view(np.int64)
        chiefs = np.array(shuffling.from_chief(own))
        # Both draw, so that what the program draws next is the same, unless it has given this rank another state.
        with _torch_state_restored(unless=np.array_equal(own, chiefs)):
            torch.set_rng_state(torch.from_numpy(chiefs.view(np.uint8)))
            return self._all_batches(self._open())

    def _open(self) -> Iterator[Any]:
        """The batches of the next pass, as a DataLoader opens it: a sampler that shuffles when its iterator is made
        draws first, then the workers' seed is drawn, and then what a sampler draws batch by batch."""
        opened, self._opened = self._opened, None
        if opened is not None:
            return opened
        batches: Iterator[Any] = iter(self.batches)
        self._draw_worker_seed()
        return batches

    def _all_batches(self, batches: Iterator[Any]) -> list[Any]:
        drawn = list(itertools.islice(batches, len(self.batches)))
        if self._loader.num_workers or data_adapters.loaders_are_read_by_tf_data():
            # These ask for one more batch to find the end, as Keras, which counts, does not: samplers may draw then.
            next(batches, None)
        return drawn

    def _draw_worker_seed(self) -> None:
        """Each pass over a plain DataLoader draws its workers' seed."""
        if self._uses_program_generator:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            self._worker_seed = int(drawn.item())

    def _glance(self) -> Any:
        """The indices of the first batch of a pass that is not continued."""
        return next(self._open())


def _seed_torch(seed: int, key: int) -> None:
    torch.default_generator.manual_seed(int(np.random.SeedSequence([seed, key]).generate_state(1)[0]))


@contextlib.contextmanager
def _torch_state_restored(*, unless: bool = False) -> Iterator[None]:
    """A context after which torch's global generator has the state that it had before, except with `unless`."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        if not unless:
            torch.set_rng_state(state)
