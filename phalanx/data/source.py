"""The contract of a kind of input, and what all inputs that can only be read in order have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from phalanx.data.batch_split import LocalShare, cut, whole
from phalanx.data.sharding_policy import AutoShardPolicy


class Source(Protocol):
    """One input seen from one rank: it yields this rank's share of each global batch.

    Attributes:
        kind: what it is, for messages: `NumPy arrays`.
        policy: how it is divided: DATA, FILE, HINT or OFF, never AUTO.
        reason: why that policy, in one clause.
        num_batches: batches in one pass over the data; None where that is unknown.
        uniform: whether every rank is known to see as many batches, of the same global sizes.
        checked: whether the shares carry fingerprints that the ranks should compare.
        endless: whether it is known never to end.
        reads_ahead: whether it makes its next batch while it is not asked, so that a thread would not pay.
        by_number: whether `read` may begin anywhere in a pass, and any number of times.
        draws: whether it draws all random numbers itself that Keras would draw to open a pass.
        taken: how many batches have been read of data that cannot be read twice; 0 of all others.
        signature: a line that is the same on every rank if the ranks were given the same data.
    """

    @property
    def kind(self) -> str: ...

    @property
    def policy(self) -> AutoShardPolicy: ...

    @property
    def reason(self) -> str: ...

    @property
    def num_batches(self) -> int | None: ...

    @property
    def uniform(self) -> bool: ...

    @property
    def checked(self) -> bool: ...

    @property
    def endless(self) -> bool: ...

    @property
    def reads_ahead(self) -> bool: ...

    @property
    def by_number(self) -> bool: ...

    @property
    def draws(self) -> bool: ...

    @property
    def taken(self) -> int: ...

    @property
    def signature(self) -> str: ...

    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalShare]:
        """The shares of batches start to stop (None: the end) of one pass over the data.

        Args:
            key: names the pass, and so the order of shuffled data: the epoch in which the pass began.
            start: 0 begins a new pass. A source that can only be read in order takes any other value to
                mean "go on".
        """
        ...

    def peek(self, *, restart: bool = False) -> LocalShare:
        """The first share of a pass, which `read` will yield again.

        Args:
            restart: `read` opens the data anew, where it can be: a dataset that draws another order for
                each pass has then used up one.
        """
        ...

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...

    def regroup(self, rank: int, world_size: int) -> None:
        """This rank has another number now, among another number of ranks: the shares that are read from here on are
        cut for these. No `read` is going on."""
        ...

    def repeat(self) -> None:
        """The batch that was read last is to be read again, by a `read` that goes on from it."""
        ...

    def skip(self, key: int, count: int) -> None:
        """Others have read so many batches of the pass `key`; the next `read` goes on from there."""
        ...

    def remember(self, *, on: bool) -> None:
        """Whether what is read from now on may have to be read again (`rewind`), also where it cannot be opened
        twice."""
        ...

    def rewind(self) -> None:
        """What has been read since `remember` comes again, in a `read` that begins where they began."""
        ...

    def shares(self, world_size: int) -> list[str]:
        """What each rank reads: one phrase for each, in rank order."""
        ...


class RandomAccessSource:
    """What sources have in common whose `read` may begin anywhere in a pass."""

    draws = False
    taken = 0

    _rank: int
    _world_size: int
    _kept: tuple[int, Any] | None = None  # the key of a pass, and its order

    @property
    def checked(self) -> bool:
        return self._world_size > 1

    def forget_order(self) -> None:
        """Make that of the running pass anew when it is wanted."""
        self._kept = None

    def _order_of(self, key: int, make: Callable[[int], Any]) -> Any:
        """The order of a pass; kept, because a pass may last for several epochs."""
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, make(key))
        return self._kept[1]

    def regroup(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def repeat(self) -> None:
        pass

    def skip(self, key: int, count: int) -> None:
        pass

    def remember(self, *, on: bool) -> None:
        pass

    def rewind(self) -> None:
        pass


def same_stream(kind: str, world_size: int) -> list[str]:
    """What each rank reads under DATA where it must read everything to find its part."""
    if world_size == 1:
        return [f"reads every batch of the {kind}"]
    return [
        f"reads every batch of the {kind} and keeps its part {rank + 1} of {world_size}" for rank in range(world_size)
    ]


class StreamSource:
    """A source that can only be read in order: a generator, a dataset of unknown length.

    Args:
        open_pass: given a pass's key, an iterator over the elements (structures of NumPy arrays). It may be
            the same iterator each time, for data that cannot be read twice.
        once: the data cannot be read twice.
        per_rank: the elements are already this rank's own and are not cut.
    """

    by_number = False

    def __init__(
        self,
        open_pass: Callable[[int], Iterator[Any]],
        *,
        kind: str,
        rank: int,
        world_size: int,
        num_batches: int | None = None,
        uniform: bool = False,
        endless: bool = False,
        once: bool = False,
        per_rank: bool = False,
        reads_ahead: bool = False,
        policy: AutoShardPolicy = AutoShardPolicy.DATA,
        reason: str = "",
        draws: bool = False,
        signature: str | None = None,
        shares: list[str] | None = None,
    ):
        self.kind = kind
        self.policy = policy
        self.reason = reason or "it can only be read in order, so every rank reads it and keeps its part"
        self.num_batches = num_batches
        self.uniform = uniform
        self.endless = endless
        self.reads_ahead = reads_ahead
        self.draws = draws
        self.signature = kind if signature is None else signature
        self._open_pass = open_pass
        self._once = once
        self._rank = rank
        self._world_size = world_size
        self._per_rank = per_rank
        self._shares = shares
        self._running: Iterator[Any] | None = None
        self._last: list[Any] = []
        self._untouched = False  # `_running` was opened by `peek` and still has all elements
        self.taken = 0
        self._remembered: list[Any] | None = None

    @property
    def checked(self) -> bool:
        return not self._per_rank and self._world_size > 1

    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalShare]:
        running = self._running
        if running is None or (start == 0 and not self._untouched):
            running = self._running = self._open_pass(key)
        self._untouched = False
        limited = running if stop is None else itertools.islice(running, stop - start)
        for element in limited:
            self._last = [element]
            if self._once:
                self.taken += 1
                if self._remembered is not None:
                    self._remembered.append(element)
            yield self._share(element)

    def peek(self, *, restart: bool = False) -> LocalShare:
        if not self._untouched or self._running is None:
            running = self._open_pass(0)
            first = list(itertools.islice(running, 1))
            self._running = itertools.chain(first, running)
            self._untouched = True
        first = list(itertools.islice(self._running, 1))
        if not first:
            raise StopIteration
        if restart and not self._once:
            self._running = None
            self._untouched = False
        else:
            self._running = itertools.chain(first, self._running)
        return self._share(first[0])

    def on_epoch_begin(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        pass

    def regroup(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def repeat(self) -> None:
        if self._running is not None and self._last:
            self._running = itertools.chain(self._last, self._running)
            self._untouched = True

    def skip(self, key: int, count: int) -> None:
        if self._running is None or not self._untouched:
            self._running = self._open_pass(key)
        self._untouched = True
        for _ in itertools.islice(self._running, count):
            self.taken += self._once

    def remember(self, *, on: bool) -> None:
        self._remembered = [] if on and self._once else None

    def rewind(self) -> None:
        if self._remembered and self._running is not None:
            self._running = itertools.chain(self._remembered, self._running)
            self._untouched = True
            self.taken -= len(self._remembered)
            self._remembered = []

    def shares(self, world_size: int) -> list[str]:
        return same_stream(self.kind, world_size) if self._shares is None else self._shares

    def _share(self, element: Any) -> LocalShare:
        if self._per_rank:
            return whole(element, self.kind)
        return cut(element, self._rank, self._world_size, self.kind)
