"""This process's place in the job, as training needs it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from phalanx.cluster.host_identity import host_identity
from phalanx.cluster.membership import Member, Membership
from phalanx.collectives import connect
from phalanx.collectives.communicator import Array, Communicator, ReduceOp
from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.elastic.elastic_communicator import ElasticCommunicator
from phalanx.elastic.elastic_coordinator import KEPT_BYTES
from phalanx.elastic.membership_messages import NOT_KEPT, PastEntry
from phalanx.engines.random_state import random_state
from phalanx.errors import MembershipChangedError, UnsupportedError
from phalanx.training.preemption import PreemptionNotice
from phalanx.transport.serialization import decode, encode

T = TypeVar("T")

MAX_RESULT_BYTES = 2**28
"""What the result of one entry may take that is kept for those who come later: it lies in the launcher's memory."""


class EntryOverError(Exception):
    """The entry at which this candidate stands was finished by the members.

    Attributes:
        result: as they encoded it.
    """

    def __init__(self, result: bytes):
        super().__init__()
        self.result = result


@dataclass
class Entry:
    """One call of a method in which all members take part.

    Attributes:
        number: of this call in the program, from 0; -1 within another one.
        seed: equal on all ranks.
        members: how many ranks there were when it began.
        result: to be set before it ends, for those who come later.
    """

    number: int
    seed: int = 0
    members: int = 0
    result: bytes = b""


@dataclass
class Replica:
    """One replica of the model: a rank and the communicator that joins it to the others.

    Attributes:
        communicator: of the job.
        cross_device_ops: how gradients are merged, where the user chose it.
        notice: travels with the merge of each step, while a `fit` runs that can be told to end.
    """

    communicator: Communicator
    cross_device_ops: CrossDeviceOps | None = None
    notice: PreemptionNotice | None = field(default=None, repr=False)
    _entries: int = 0
    _entry: Entry | None = field(default=None, repr=False)
    _seeds: int = 0
    _last_result: tuple[int, bytes] | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def is_chief(self) -> bool:
        return self.rank == 0 and not self.is_candidate

    @property
    def is_alone(self) -> bool:
        """Whether there is and will be no other replica."""
        return self.world_size == 1 and self.elastic is None

    @property
    def elastic(self) -> ElasticCommunicator | None:
        """The communicator of a job whose members come and go; None in all others."""
        return self.communicator if isinstance(self.communicator, ElasticCommunicator) else None

    @property
    def is_candidate(self) -> bool:
        """Whether this process waits to be let in to a job that runs."""
        elastic = self.elastic
        return elastic is not None and elastic.candidate

    @property
    def generation(self) -> int:
        """The number of the present membership; it changes in elastic jobs only."""
        elastic = self.elastic
        return 0 if elastic is None else elastic.generation

    @property
    def replicas(self) -> int:
        """The number of replicas, for programs: in an elastic job that with which it began, which is the same on all
        members at all times."""
        elastic = self.elastic
        return self.world_size if elastic is None else elastic.replicas

    def all_reduce(
        self,
        arrays: Sequence[Array],
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """The sum over ranks, by the algorithm that the user chose or the communicator's own."""
        if self.cross_device_ops is None:
            return self.communicator.all_reduce(arrays, scale=scale, out=out)
        return self.cross_device_ops.all_reduce(self.communicator, arrays, scale=scale, out=out)

    # Decisions that all ranks must take alike.

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on at least one."""
        merged = self.communicator.all_reduce([np.array([flag], np.uint8)], ReduceOp.MAX)
        return bool(merged[0][0])

    def from_chief(self, value: object) -> object:
        """The chief's value (of JSON's types), on every rank."""
        return msgspec.msgpack.decode(self.communicator.broadcast_bytes(msgspec.msgpack.encode(value)))

    def gather(self, value: int) -> list[int]:
        """Every rank's number, in rank order."""
        return [int(array[0]) for array in self.communicator.all_gather(np.array([value], np.int64))]

    def random_states(self) -> list[list[Array]]:
        """Every rank's `random_state`, in rank order; nothing, and nobody is asked, where there is no such state."""
        own = random_state()
        return [decode(payload) for payload in self.communicator.all_gather_bytes(encode(own))] if own else []

    # Jobs whose members come and go.

    def steadily(self, action: Callable[[], T], adapt: Callable[[], None] | None = None) -> T:
        """Do something that all members do together, and again from its beginning whenever these change.

        Args:
            adapt: called before it is begun again.
        """
        while True:
            try:
                return action()
            except MembershipChangedError:
                if adapt is not None:
                    adapt()

    @contextmanager
    def entry(self, seed: Callable[[], int] | None = None) -> Iterator[Entry]:
        """A call of a method in which all members take part (`fit`, `evaluate`, ...). Calls within it do not count.

        Args:
            seed: where the chief takes the entry's seed from; None: its random state.

        Raises: EntryOverError at once if this is a candidate and the members have finished this call.
        """
        elastic = self.elastic
        if elastic is None:
            yield Entry(-1)
            return
        if self._entry is not None:
            with elastic.closed_to_others():
                yield self._entry
            return
        self._entry = entry = Entry(self._entries)
        self._entries += 1
        self._seeds = 0
        try:
            self._open(entry, elastic, seed or own_seed)
            yield entry
            result = entry.result if len(entry.result) <= MAX_RESULT_BYTES else NOT_KEPT
            self._last_result = (entry.number, result)
            elastic.done(entry.number, result)
        finally:
            self._entry = None

    def _open(self, entry: Entry, elastic: ElasticCommunicator, seed: Callable[[], int]) -> None:
        """Know what all who take part in the entry must know."""
        if self.is_candidate and not elastic.late:
            return  # the job's first one, in which it comes together
        if self.is_candidate:
            answer = elastic.ask_about(entry.number)
            if isinstance(answer, PastEntry):
                raise EntryOverError(_checked(answer.result))
            entry.seed, entry.members = int.from_bytes(answer.note), answer.members
            return
        entry.seed = int(self.steadily(lambda: self.from_chief(seed() if self.is_chief else 0)))  # type: ignore[call-overload]
        entry.members = self.world_size
        if self._last_result is not None:  # a chief that was lost may not have said so
            elastic.done(*self._last_result)
        self.tell_of_the_entry()

    def tell_of_the_entry(self) -> None:
        """The chief, also one that has just become it, tells those who come later about the present entry."""
        elastic, entry = self.elastic, self._entry
        if elastic is not None and entry is not None:
            elastic.began(entry.number, entry.seed.to_bytes(8))

    def take_part(self) -> None:
        """As a candidate: wait until this process is let in to the present entry.

        Raises: EntryOverError if the members have finished it meanwhile.
        """
        elastic, entry = self.elastic, self._entry
        assert elastic is not None
        assert entry is not None
        past = elastic.take_part(entry.number)
        if past is not None:
            raise EntryOverError(_checked(past))

    def recorded(self, make: Callable[[], bytes]) -> bytes:
        """What all members have made together at this point of the program; a candidate is told."""
        try:
            with self.entry() as entry:
                if self.is_candidate:
                    self.take_part()
                entry.result = self.steadily(make)
                return entry.result
        except EntryOverError as over:
            return over.result

    def common_seed(self) -> int:
        """A seed that is equal on all ranks, another one at each call, within an entry of an elastic job: nobody is
        asked."""
        assert self._entry is not None
        self._seeds += 1
        return int(np.random.SeedSequence([self._entry.seed, self._seeds]).generate_state(1)[0] >> 1)

    @property
    def former_members(self) -> int:
        """How many ranks there were when the present entry began, as far as this process knows."""
        return 0 if self._entry is None else self._entry.members


def alone() -> Replica:
    """A replica that is the only one."""
    return Replica(connect(Membership(1, 0, (Member(0, "worker/0", host_identity(), "", os.getpid()),))))


def own_seed() -> int:
    """A seed of 31 bits that follows from the state of Python's `random` (so `keras.utils.set_random_seed` makes it
    reproducible), but takes no number from it: Keras's own draws stay what they are without Phalanx."""
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy.getrandbits(31)


def _checked(result: bytes) -> bytes:
    if result == NOT_KEPT:
        raise UnsupportedError(
            f"This worker came late, and needs the result of a call that is over; it has more than "
            f"{MAX_RESULT_BYTES >> 20} MiB, or all results together more than {KEPT_BYTES >> 20} MiB, which are not "
            f"kept. Call `predict` on less data at a time, or after the training."
        )
    return result
