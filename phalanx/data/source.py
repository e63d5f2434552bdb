"""The interface of a data source, and the source of all data that can only be read in order."""

from __future__ import annotations

import collections
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.arrays.tree import map_leaves
from phalanx.data.batch_split import LocalBatch, full_share, split_share
from phalanx.data.dataset_elements import Array
from phalanx.data.input_request import InputRequest
from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.errors import ConfigurationError

if TYPE_CHECKING:
    from phalanx.data.tf_data_source import IteratorCounter


@dataclass(frozen=True, slots=True)
class SourceTraits:
    """Constant properties of a source.

    Attributes:
        kind: Name of the kind of data, for messages: `NumPy arrays`.
        signature: A line that is equal on all ranks if they were given the same data.
        reason: The reason for `policy`, in one clause.
        policy: Policy by which the data is divided: DATA, FILE, HINT or OFF, never AUTO.
        is_uniform: Whether every rank is known to see equally many batches of the same global sizes.
        is_endless: Whether the data is known to be endless.
        is_compared: Whether shares carry fingerprints that the ranks should compare.
        is_read_by_all_ranks: Whether every rank reads all of the data, and therefore runs the same reading code.
        is_random_access: Whether `read` may start anywhere in a pass, and any number of times.
        draws_as_keras: Whether the source itself draws all random numbers that Keras would draw to open a pass.
        fixed_size: The size of every global batch, if Keras on TensorFlow knows it before it reads one.
        may_end_early: Whether a pass may have fewer batches than `num_batches`, because code of the program decides.
        is_in_memory: Whether inspecting the data has no side effects: reading other data may draw random numbers.
        describe_share: Function of a rank and the world size that returns a phrase for what the rank reads. None: every
            batch, of which it keeps its part.
    """

    kind: str
    signature: str
    reason: str = "it can only be read in order, so every rank reads it and keeps its part"
    policy: AutoShardPolicy = AutoShardPolicy.DATA
    is_uniform: bool = False
    is_endless: bool = False
    is_compared: bool = True
    is_read_by_all_ranks: bool = True
    is_random_access: bool = False
    draws_as_keras: bool = False
    fixed_size: int | None = None
    may_end_early: bool = False
    is_in_memory: bool = False
    describe_share: Callable[[int, int], str] | None = None


class Source(ABC):
    """One input as seen by one rank: yields this rank's share of each global batch.

    Attributes:
        traits: Constant properties of the source.
        order: The orders of its passes.
        cursor: The position in data that can only be read in order; None for sources with random access.
        num_batches: Number of batches in one pass over the data; None if unknown.
        samples: Number of samples in a pass; None if they have no numbers.
    """

    traits: SourceTraits
    cursor: StreamCursor | None = None
    num_batches: int | None = None
    samples: int | None = None

    def __init__(self, request: InputRequest):
        self.order = PassOrder()
        self._rank, self._world_size = request.rank, request.world_size

    @abstractmethod
    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalBatch]:
        """Yield the shares of batches `start` to `stop` of one pass over the data.

        Args:
            key: The epoch in which the pass began. It selects the order of shuffled data.
            start: The first batch; 0 starts a new pass. For any other value, a source without random access continues
                at its current position.
            stop: The batch to stop before; None to read to the end.
        """

    @abstractmethod
    def peek(self, *, restart: bool = False) -> LocalBatch:
        """Return the first share of a pass, which `read` will yield again.

        Args:
            restart: Whether `read` opens the data again, if possible: data with a different order for each pass have
                then used up one order, and drawn its random numbers.

        Raises: StopIteration if there is no data.
        """

    @property
    def sampled_values(self) -> Array:
        """Numbers sampled from the data, shape (n,), float64, by which ranks compare their inputs; empty for data that
        cannot be inspected."""
        return np.zeros(0)

    def rows(self, key: int, batch: int) -> Array | list[Any]:
        """The numbers of the samples of a global batch, in the order of its rows; for `key`, see `read`.

        A list contains what a sampler yields: keys of any type, if the dataset takes keys other than numbers.
        """
        raise NotImplementedError  # without `samples`

    def on_epoch_begin(self) -> None:  # noqa: B027 (most data have no epochs)
        """Handle the start of an epoch."""

    def on_epoch_end(self) -> None:  # noqa: B027 (likewise)
        """Handle the end of an epoch, or that the next one starts a new pass."""

    def reshard(self, rank: int, world_size: int) -> None:
        """Cut the shares that are read from now on for another rank and world size. No `read` may be open."""
        self._rank, self._world_size = rank, world_size


class PassOrder:
    """The orders of the passes of a source. The order of the running pass is kept, because a pass may last several
    epochs."""

    def __init__(self) -> None:
        self._kept: tuple[int, Any] | None = None

    def get(self, key: int, make: Callable[[int], Any]) -> Any:
        """The order of pass `key`, created by `make(key)` when the pass starts."""
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, make(key))
        return self._kept[1]

    def is_current(self, key: int | None) -> bool:
        """Whether pass `key` is the running one."""
        return self._kept is not None and self._kept[0] == key

    def invalidate(self) -> None:
        """Redraw the order of the running pass when it is next needed."""
        self._kept = None

    def reset(self) -> None:
        """Discard what was opened of the next pass. Its random numbers stay drawn."""

    def end_pass(self, next_key: int) -> None:
        """End the running pass: draw what Keras draws then.

        Args:
            next_key: Key of the next pass, if no `reset` comes before it.
        """

    def randomness(self, key: int | None) -> bytes:
        """The states, before a pass, of the program's generators that determine orders; empty if there are none.

        Args:
            key: The pass that is running or about to start; None for the next one.
        """
        del key  # the order follows from the seed, or from the chief
        return b""

    def restore_randomness(self, randomness: bytes) -> bool:
        """Give the next pass the order of a pass of another process, with this `randomness`. Return False, and do
        nothing, if its order depended on other generators."""
        return not randomness


class StreamCursor:
    """The position in data that can only be read in order.

    Args:
        open_pass: Function of a pass's key that returns an iterator over the elements. For data that cannot be read
            twice, it always returns the same iterator.
        is_single_pass: Whether the data cannot be read twice: a pass continues where the last one stopped.
        replayed: Number of elements of such data that are read first, and begin each pass.
        open_first: Variant of `open_pass` for reading only the first element; None to use `open_pass`.

    Attributes:
        pass_counter: Counter of passes, if orders depend on their number; set before the first pass.
        consumed: Number of elements taken from data that cannot be read twice.
        consumed_before: `total` before the running pass.
    """

    def __init__(
        self,
        open_pass: Callable[[int], Iterator[Any]],
        *,
        is_single_pass: bool,
        replayed: int = 0,
        open_first: Callable[[], Iterator[Any]] | None = None,
    ):
        self.consumed = self.consumed_before = 0
        self.pass_counter: IteratorCounter | None = None
        self._open_pass = open_pass
        self._open_first = open_first
        self._is_single_pass = is_single_pass
        self._replayed = replayed
        self._first: list[Any] | None = None  # the elements that begin each pass; None until the first one is opened
        self._running: Iterator[Any] | None = None  # over the rest of the running pass
        self._has_pending = False  # `_running` still has everything that the next `read` must yield
        self._last: list[Any] = []  # the element read last, if any
        self._recorded: list[Any] | None = None  # since `record`; None if nothing is recorded

    @property
    def total(self) -> int:
        """Number of passes opened, if orders depend on it; otherwise, number of elements taken from data that cannot be
        read twice."""
        return self.consumed if self.pass_counter is None else self.pass_counter.count

    @property
    def passes_before(self) -> int:
        """If orders depend on it, the number of passes opened before the one that the next `read` from 0 yields."""
        return self.consumed_before if self._has_pending else self.total

    @property
    def opened_per_pass(self) -> int:
        """Number of passes that a whole pass opens, if orders depend on their number; else 0."""
        return 0 if self.pass_counter is None else self.pass_counter.opened_per_pass

    @property
    def passes_after(self) -> int:
        """Number of passes opened by the end of the running one."""
        return self.consumed_before + self.opened_per_pass

    def leave_pass(self) -> None:
        """End the running pass, even if this process has not read its end, or any of it."""
        if self.pass_counter is not None:
            self.pass_counter.skip_to(self.passes_after)
            if self._has_pending:
                self._running, self._has_pending = None, False

    def read_first(self) -> None:
        """Read the elements that begin each pass over data that cannot be read twice, unless they are known."""
        # All at once, as in Keras, so that a generator that refills its arrays behaves as it does there.
        if self._is_single_pass and self._first is None:
            self._first = list(itertools.islice(self._counted(self._open_pass(0)), self._replayed))

    def begin_pass(self, key: int) -> Iterator[Any]:
        """Open pass `key`, unless the next `read` must continue with elements that were peeked at, put back or skipped
        to. Return the elements that it must yield."""
        if self._running is None or not self._has_pending:
            self._running = self._open(key)
            self._has_pending = True
        return self._running

    def read(self, key: int, start: int, stop: int | None) -> Iterator[Any]:
        """Yield elements `start` to `stop` of pass `key`; see `Source.read`."""
        running = self.begin_pass(key) if self._running is None or start == 0 else self._running
        self._has_pending = False
        for element in running if stop is None else itertools.islice(running, stop - start):
            self._last = [element]
            if self._recorded is not None:
                # Copies: a generator may refill the same arrays. `_last` needs none, because nothing is read after it.
                self._recorded.append(map_leaves(np.copy, element))
            yield element

    def peek(self, *, restart: bool) -> Any:
        """Return the first element of a pass; see `Source.peek`."""
        if not self._has_pending or self._running is None:
            self._running = self._open_first() if restart and self._open_first is not None else self._open(0)
            self._has_pending = True
        first = next(self._running)
        if restart:  # discard this iterator: seeded shuffles count created iterators
            self._running = None
            self._has_pending = False
        else:
            self._running = itertools.chain([first], self._running)
        return first

    def repeat(self) -> None:
        """Make the next `read` yield the last element again."""
        if self._last:
            self._put_back(self._last)

    def resume(self, key: int, count: int, consumed_before: int) -> None:
        """Skip `count` elements of pass `key`, which other processes have read.

        Args:
            consumed_before: The attribute `consumed_before` of the other processes.
        """
        # If they have not begun, read nothing: a generator's random numbers depend on when it is read.
        if not count and not consumed_before:
            return
        if self._is_single_pass:
            self._running = self._resumed(count, consumed_before)
            self._has_pending = True
            return
        if self.pass_counter is not None:
            if consumed_before != self.consumed_before:  # elements peeked at here are in another order
                self._running, self._has_pending = None, False
            self.pass_counter.skip_to(consumed_before)
        if count:
            _skip(self.begin_pass(key), count)

    def _resumed(self, count: int, consumed_before: int) -> Iterator[Any]:
        """Return the rest of a pass over data that cannot be read twice."""
        self.read_first()
        first = self._first or []
        elements = self._counted(self._open_pass(0))
        # `consumed` includes elements peeked at here.
        ahead = consumed_before + max(0, count - len(first)) - self.consumed
        if ahead < 0:
            raise ConfigurationError(
                "The generator has been read further than to where training continues, and cannot go back. Create it "
                "again, and the dataset made of it."
            )
        _skip(elements, ahead)
        self.consumed_before = consumed_before
        return itertools.chain(first[count:], elements)

    def record(self, *, on: bool) -> None:
        """Start or stop keeping the elements of data that cannot be read twice, for `rewind`."""
        self._recorded = [] if on and self._is_single_pass else None

    def rewind(self) -> None:
        """Make a `read` that starts where the recording started yield everything read since `record` again."""
        if self._recorded:
            self._put_back(self._recorded)
            self._recorded = []

    def _open(self, key: int) -> Iterator[Any]:
        elements = self._open_pass(key)
        if not self._is_single_pass:
            self.consumed_before = self.total
            return elements
        self.read_first()
        self.consumed_before = self.consumed
        return itertools.chain(self._first or [], self._counted(elements))

    def _counted(self, elements: Iterator[Any]) -> Iterator[Any]:
        for element in elements:
            self.consumed += 1
            yield element

    def _put_back(self, elements: list[Any]) -> None:
        if self._running is not None:
            self._running = itertools.chain(elements, self._running)
            self._has_pending = True


def _skip(elements: Iterator[Any], count: int) -> None:
    collections.deque(itertools.islice(elements, count), maxlen=0)


class StreamSource(Source):
    """A source that can only be read in order: a generator, a dataset of unknown length.

    Args:
        open_pass: Function of a pass's key that returns an iterator over the elements (structures of NumPy arrays).
        traits: See `SourceTraits`. With a policy other than DATA, the elements belong to this rank alone and are not
            cut.
        request: The request, with the rank that reads and the number of elements that data read once must repeat.
        num_batches: Number of elements in a pass; None if unknown.
        is_single_pass, open_first: See `StreamCursor`.
        copies: See `split_share`.
    """

    cursor: StreamCursor

    def __init__(
        self,
        open_pass: Callable[[int], Iterator[Any]],
        traits: SourceTraits,
        request: InputRequest,
        *,
        num_batches: int | None = None,
        is_single_pass: bool = False,
        open_first: Callable[[], Iterator[Any]] | None = None,
        copies: bool = True,
    ):
        super().__init__(request)
        self.traits = traits
        self.num_batches = num_batches
        self.cursor = StreamCursor(
            open_pass, is_single_pass=is_single_pass, replayed=request.replayed, open_first=open_first
        )
        self._copies = copies
        # Also for a rank's own data (see `make_per_rank_source`): `split_share` copies arrays that may be refilled.
        self._is_cut = traits.policy is AutoShardPolicy.DATA

    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalBatch]:
        return map(self._share, self.cursor.read(key, start, stop))

    def peek(self, *, restart: bool = False) -> LocalBatch:
        return self._share(self.cursor.peek(restart=restart))

    def _share(self, element: Any) -> LocalBatch:
        if self._is_cut:
            return split_share(element, self._rank, self._world_size, self.traits.kind, copies=self._copies)
        return full_share(element, self.traits.kind)
