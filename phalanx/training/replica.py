"""This process as one replica of a job: its rank, joint decisions, and calls that late joiners replay."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from phalanx.cluster.membership import Member, Membership
from phalanx.cluster.membership_messages import NOT_KEPT, EntryBegan, EntryFinished, PastEntry
from phalanx.collectives import connect
from phalanx.collectives.communicator import Array, Communicator, ReduceOp
from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.collectives.host.recording_algorithm import RecordingAlgorithm
from phalanx.elastic.elastic_communicator import ElasticCommunicator
from phalanx.elastic.elastic_group import ElasticGroup
from phalanx.elastic.entry_results import KEPT_BYTES
from phalanx.errors import MembershipChangedError, UnsupportedError
from phalanx.runtime.host_identity import host_identity
from phalanx.training.preemption import PreemptionNotice
from phalanx.training.program_effects.per_rank_random_numbers import PerRankRandomStreams
from phalanx.transport.decoding import decode_message

T = TypeVar("T")

MAX_RESULT_BYTES = 2**28
"""What the result of one entry may take that is kept for processes that join later: it is in the launcher's memory."""
SEED_BYTES = 8


class EntryOverError(Exception):
    """The members have finished the entry that this candidate has come to.

    Attributes:
        result, state: of the entry, encoded by the members; see `Entry`.
    """

    def __init__(self, past: PastEntry):
        super().__init__()
        self.result, self.state = _checked(past.result), past.state


class ReplicaCalls(Protocol):
    """How the other replicas come to call what this process calls, where they run no program of their own."""

    def calling(self, model: Any, method: str, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Around a call of a model's method: the other replicas call it too.

        Raises: besides what the method raises, the error of another replica of which that is the consequence.
        """


@dataclass
class Entry:
    """One call of a method in which all members take part (`fit`, `evaluate`, ...).

    A process that joins an elastic job runs the same script from its beginning. It gets the results of the entries that
    are over, until it comes to the one in which the members are.

    Attributes:
        number: of this call in the program, from 0; -1 in jobs of fixed size.
        seed: equal on all ranks.
        members: number of ranks when it began.
        result: encoded; set it before the entry ends.
        state: what it has left to the program besides, encoded; set it before the entry ends.
        findings: what the members have found out about the program, encoded; empty as long as they have not.
        depth: how many entries have begun within it.
    """

    number: int
    seed: int = 0
    members: int = 0
    result: bytes = b""
    state: bytes = b""
    findings: bytes = b""
    depth: int = 0

    @property
    def note(self) -> bytes:
        """What a process that joins must know of it."""
        return self.seed.to_bytes(SEED_BYTES) + self.findings

    def query(self, elastic: ElasticGroup) -> None:
        """As a candidate: learn what the members know of it, once it has begun.

        Raises: EntryOverError if they have finished it.
        """
        answer = elastic.node.query_entry(self.number)
        if isinstance(answer, PastEntry):
            raise EntryOverError(answer)
        self.seed, self.findings = int.from_bytes(answer.note[:SEED_BYTES]), answer.note[SEED_BYTES:]
        self.members = answer.members


@dataclass
class Replica:
    """One replica of the model: a rank and the communicator that joins it to the others.

    Attributes:
        communicator: collectives between all ranks of the job.
        cross_device_ops: how gradients are merged, if the user chose it; None: by the communicator.
        notice: travels with the merge of each step, while a `fit` runs that saves itself when the job is preempted.
        process: the id of the process that takes part.
        calling_thread: the thread in which a method of a model runs now.
        calls: takes calls of a model's methods to the other replicas; None: they run the same program.
        has_copies: whether the replicas have copies of the chief's models, which Keras names differently.
        micro_batches: into how many micro-batches each global batch is cut, so that the number of ranks shows in no bit
            (`CommunicationOptions.deterministic`); None: each rank computes its part at once.
        mesh_parts: into how many equal parts the mesh divides each global batch, where one compiled program spans the
            devices of all ranks; None: each rank has a program of its own.
        recording: what is merged, where `phalanx plan` examines the program and no other rank exists; else None.
        random_streams: the random numbers that it draws apart from the others.
    """

    communicator: Communicator
    cross_device_ops: CrossDeviceOps | None = None
    notice: PreemptionNotice | None = field(default=None, repr=False)
    process: int = field(default_factory=os.getpid, repr=False)
    calling_thread: int | None = field(default=None, repr=False)
    calls: ReplicaCalls | None = field(default=None, repr=False)
    has_copies: bool = False
    micro_batches: int | None = None
    mesh_parts: int | None = None
    recording: RecordingAlgorithm | None = field(default=None, repr=False)
    random_streams: PerRankRandomStreams = field(default_factory=PerRankRandomStreams, repr=False)
    _entries: int = 0  # number of entries so far: the same script gives the same numbers on every process
    _entry: Entry | None = field(default=None, repr=False)
    # How many seeds the present entry has given out; all ranks ask in the same order.
    _seeds: int = 0
    # Of the entry before: repeated when the next one begins, in case the chief was lost after it and before its report.
    _last_finished: EntryFinished | None = field(default=None, repr=False)

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
        """Whether there is no other replica, now or later."""
        return self.world_size == 1 and self.elastic is None

    @property
    def elastic(self) -> ElasticGroup | None:
        """This process's part in an elastic job; None in other jobs."""
        return self.communicator.group if isinstance(self.communicator, ElasticCommunicator) else None

    @property
    def is_candidate(self) -> bool:
        """Whether this process waits to be admitted to a running job."""
        elastic = self.elastic
        return elastic is not None and elastic.is_candidate

    @property
    def generation(self) -> int:
        """The number of the present membership; it changes in elastic jobs only."""
        elastic = self.elastic
        return 0 if elastic is None else elastic.generation

    @property
    def initial_world_size(self) -> int:
        """The number of replicas that programs see: in an elastic job the one at its start, which all members agree on
        at all times."""
        elastic = self.elastic
        return self.world_size if elastic is None else elastic.initial_world_size

    def all_reduce(
        self,
        arrays: Sequence[Array],
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """The sum over ranks, by `cross_device_ops` or the communicator; see `Communicator.all_reduce`."""
        if self.cross_device_ops is None:
            return self.communicator.all_reduce(arrays, scale=scale, out=out)
        return self.cross_device_ops.all_reduce(self.communicator, arrays, scale=scale, out=out)

    # Decisions that all ranks take alike.

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on at least one."""
        # By the communicator, also where the user has chosen how gradients merge: those operations only sum.
        merged = self.communicator.all_reduce([np.array([flag], np.uint8)], ReduceOp.MAX)
        return bool(merged[0][0])

    def broadcast_from_chief(self, value: Any) -> Any:
        """The chief's value, of JSON's types, on every rank."""
        return decode_message(self.communicator.broadcast_bytes(msgspec.msgpack.encode(value)))

    def gather(self, value: int) -> list[int]:
        """Every rank's number, in rank order."""
        return [int(array[0]) for array in self.communicator.all_gather(np.array([value], np.int64))]

    # Elastic jobs.

    def retry(self, action: Callable[[], T], on_change: Callable[[], None] | None = None) -> T:
        """Do something that all members do together, and again from its beginning whenever the membership changes.

        Args:
            on_change: called before it begins again.
        """
        while True:
            try:
                return action()
            except MembershipChangedError:
                if on_change is not None:
                    on_change()

    @contextmanager
    def entry(self, seed: Callable[[], int] | None = None) -> Iterator[Entry]:
        """Around a call of a method in which all members take part. Calls within it are part of it.

        Args:
            seed: gives the entry's seed on the chief; None: it follows from Python's random state.

        Raises: EntryOverError at once if this is a candidate and the members have finished this call.
        """
        elastic = self.elastic
        if elastic is None:
            yield Entry(-1)
            return
        # Inside an entry, for example `evaluate` in a callback: it is not numbered, since a process that joins does not
        # run it again, and no process may join in its middle.
        if self._entry is not None:
            self._entry.depth += 1
            try:
                with elastic.join_points.closed():
                    yield self._entry
            finally:
                self._entry.depth -= 1
            return
        self._entry = entry = Entry(self._entries)
        self._entries += 1
        self._seeds = 0
        is_finished = False
        try:
            self._open(entry, elastic, seed or seed_from_program)
            yield entry
            # Only if nothing was raised: an entry that failed has no result to hand on, and its job ends.
            result = entry.result if len(entry.result) <= MAX_RESULT_BYTES else NOT_KEPT
            self._last_finished = EntryFinished(entry.number, result)  # without the state, which takes time to send
            elastic.send_as_chief(EntryFinished(entry.number, result, entry.state))
            is_finished = True
        finally:
            self._entry = None
            elastic.leave_entry(entry.number, is_finished=is_finished)

    def _open(self, entry: Entry, elastic: ElasticGroup, seed: Callable[[], int]) -> None:
        """Learn, or on the chief publish, what all who take part in the entry must know."""
        if self.is_candidate and not elastic.is_late:
            return  # the job's first entry, in which its members meet
        if self.is_candidate:
            entry.query(elastic)
            return
        entry.seed = int(self.retry(lambda: self.broadcast_from_chief(seed() if self.is_chief else 0)))
        entry.members = self.world_size
        if self._last_finished is not None:  # a lost chief may not have reported it
            elastic.send_as_chief(self._last_finished)
        self.announce_entry()

    def announce_entry(self) -> None:
        """As the chief, perhaps a new one: publish the present entry for processes that join later."""
        elastic, entry = self.elastic, self._entry
        if elastic is not None and entry is not None:
            elastic.send_as_chief(EntryBegan(entry.number, entry.note))

    def join_entry(self) -> None:
        """As a candidate: wait to be admitted to the present entry.

        Raises: EntryOverError if the members have finished it meanwhile.
        """
        elastic, entry = self.elastic, self._entry
        assert elastic is not None
        assert entry is not None
        past = elastic.join(entry.number)
        if past is not None:
            raise EntryOverError(past)

    def run_recorded(self, make: Callable[[], bytes]) -> bytes:
        """The result of `make`, in which all members take part, as an entry: a candidate gets the members' result."""
        try:
            with self.entry() as entry:
                if self.is_candidate:
                    self.join_entry()
                entry.result = self.retry(make)
                return entry.result
        except EntryOverError as over:
            return over.result

    def common_seed(self) -> int:
        """In an entry of an elastic job, a seed that is equal on all ranks and differs at each call. Sends nothing."""
        assert self._entry is not None
        self._seeds += 1
        return int(np.random.SeedSequence([self._entry.seed, self._seeds]).generate_state(1)[0] >> 1)

    @property
    def present_entry(self) -> Entry:
        """The entry that this process is in. In jobs of fixed size, and outside of all entries, it knows nothing."""
        return self._entry or Entry(-1)


def divides_batches(replica: Replica) -> bool:
    """Whether steps are computed in parts: on several replicas, now or later, or in micro-batches."""
    return (not replica.is_alone and replica.mesh_parts is None) or replica.micro_batches is not None


def alone() -> Replica:
    """The only replica of a job of one process."""
    return Replica(connect(Membership(1, 0, (Member(0, "worker/0", host_identity(), "", os.getpid()),))))


def seed_from_program() -> int:
    """A seed of 31 bits that follows from the state of Python's `random`, so `keras.utils.set_random_seed` makes it
    reproducible. It takes no number from that state: Keras draws the same numbers as without Phalanx."""
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy.getrandbits(31)


def _checked(result: bytes) -> bytes:
    if result == NOT_KEPT:
        raise UnsupportedError(
            f"This worker joined late and needs the result of a call that is over, which was not kept: it has more "
            f"than {MAX_RESULT_BYTES >> 20} MiB, or all results together more than {KEPT_BYTES >> 20} MiB. "
            f"Call `predict` on less data at a time, or after the training."
        )
    return result
