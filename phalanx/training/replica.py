"""This process as one replica of a job: its rank, collective decisions, and calls that late joiners replay."""

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
from phalanx.cluster.membership_messages import NOT_KEPT, EntryAlreadyFinished, EntryFinished, EntryStarted
from phalanx.collectives import connect
from phalanx.collectives.communicator import Array, Communicator, ReduceOp
from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.collectives.host.recording_algorithm import RecordingAlgorithm
from phalanx.elastic.elastic_communicator import ElasticCommunicator
from phalanx.elastic.elastic_group import ElasticGroup
from phalanx.elastic.entry_log import KEPT_BYTES
from phalanx.errors import MembershipChangedError, UnsupportedError
from phalanx.runtime.host_identity import host_identity
from phalanx.training.preemption import PreemptionNotice
from phalanx.training.program_effects.per_rank_random_numbers import PerRankRandomStreams
from phalanx.transport.decoding import decode_message

T = TypeVar("T")

MAX_RESULT_BYTES = 2**28
"""Maximum size of an entry's result that is kept in the launcher's memory for processes that join later."""
SEED_BYTES = 8


class EntryFinishedError(Exception):
    """Raised if the members have already finished the entry that this candidate has reached.

    Attributes:
        result, state: Result and state of the entry, encoded by the members; see `Entry`.
    """

    def __init__(self, past: EntryAlreadyFinished):
        super().__init__()
        self.result, self.state = _checked(past.result), past.state


class ReplicaCalls(Protocol):
    """Interface that makes replicas without their own program call what this process calls."""

    def calling(self, model: Any, method: str, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context for a call of a model's method, in which the other replicas call it too.

        Raises: in addition to the method's own errors, the error of another replica that caused them.
        """


@dataclass
class Entry:
    """One call of a method in which all members take part (`fit`, `evaluate`, ...).

    A process that joins an elastic job runs the same script from the start. It receives the results of finished entries
    until it reaches the entry that the members are in.

    Attributes:
        number: Number of this call in the program, from 0; -1 in jobs of fixed size.
        seed: Seed, equal on all ranks.
        members: Number of ranks when the entry began.
        result: Encoded result; set it before the entry ends.
        state: Encoded state that the entry leaves to the program in addition to the result; set it before the entry
            ends.
        findings: Encoded findings about the program; empty until the members have them.
        depth: Number of nested entries that are open.
    """

    number: int
    seed: int = 0
    members: int = 0
    result: bytes = b""
    state: bytes = b""
    findings: bytes = b""
    depth: int = 0

    @property
    def announcement(self) -> bytes:
        """Information about the entry for joining processes."""
        return self.seed.to_bytes(SEED_BYTES) + self.findings

    def fetch(self, elastic: ElasticGroup) -> None:
        """As a candidate, fetch what the members have published about the entry, once it has begun.

        Raises: EntryFinishedError if they have finished it.
        """
        answer = elastic.node.query_entry(self.number)
        if isinstance(answer, EntryAlreadyFinished):
            raise EntryFinishedError(answer)
        self.seed, self.findings = int.from_bytes(answer.note[:SEED_BYTES]), answer.note[SEED_BYTES:]
        self.members = answer.members


@dataclass
class Replica:
    """One replica of the model: a rank and the communicator that connects it to the others.

    Attributes:
        communicator: Collectives over all ranks of the job.
        cross_device_ops: Merge of gradients that the user chose; None to use the communicator.
        notice: Preemption notice, merged with each step of a `fit` that saves itself when the job is preempted.
        process: ID of the participating process.
        calling_thread: Thread in which a method of a model is running.
        calls: Forwards calls of a model's methods to the other replicas; None if they run the same program.
        has_copies: Whether the replicas have copies of the chief's models, which Keras names differently.
        micro_batches: Number of micro-batches in each global batch, so that results are bitwise independent of the
            number of ranks (`CommunicationOptions.deterministic`); None if each rank computes its part at once.
        mesh_parts: Number of equal parts into which the mesh divides each global batch, if one compiled program spans
            the devices of all ranks; None if each rank has its own program.
        recording: Records merges while `phalanx plan` examines the program and no other rank exists; otherwise None.
        random_streams: Random numbers that this replica draws independently of the others.
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
    # Number of seeds drawn in the current entry; all ranks draw in the same order.
    _seeds: int = 0
    # The last finished entry; sent again when the next one begins, in case the chief was lost before it reported.
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
        """The elastic group of this process; None if the job is not elastic."""
        return self.communicator.group if isinstance(self.communicator, ElasticCommunicator) else None

    @property
    def is_candidate(self) -> bool:
        """Whether this process waits to be admitted to a running job."""
        elastic = self.elastic
        return elastic is not None and elastic.is_candidate

    @property
    def generation(self) -> int:
        """Number of the current membership; it changes in elastic jobs only."""
        elastic = self.elastic
        return 0 if elastic is None else elastic.generation

    @property
    def initial_world_size(self) -> int:
        """Number of replicas that programs see: in an elastic job the initial one, on which all members agree."""
        elastic = self.elastic
        return self.world_size if elastic is None else elastic.initial_world_size

    def all_reduce(
        self,
        arrays: Sequence[Array],
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Sum over ranks with `cross_device_ops` or the communicator; see `Communicator.all_reduce`."""
        if self.cross_device_ops is None:
            return self.communicator.all_reduce(arrays, scale=scale, out=out)
        return self.cross_device_ops.all_reduce(self.communicator, arrays, scale=scale, out=out)

    # Collective decisions, equal on all ranks.

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on at least one rank."""
        # Uses the communicator even if the user chose how gradients merge: cross-device operations only sum.
        merged = self.communicator.all_reduce([np.array([flag], np.uint8)], ReduceOp.MAX)
        return bool(merged[0][0])

    def broadcast_from_chief(self, value: Any) -> Any:
        """Return the chief's value, of a JSON type, on every rank."""
        return decode_message(self.communicator.broadcast_bytes(msgspec.msgpack.encode(value)))

    def gather(self, value: int) -> list[int]:
        """Return every rank's number, in rank order."""
        return [int(array[0]) for array in self.communicator.all_gather(np.array([value], np.int64))]

    # Elastic jobs.

    def retry(self, action: Callable[[], T], on_change: Callable[[], None] | None = None) -> T:
        """Run a collective action of all members, and restart it whenever the membership changes.

        Args:
            on_change: Called before each restart.
        """
        while True:
            try:
                return action()
            except MembershipChangedError:
                if on_change is not None:
                    on_change()

    @contextmanager
    def entry(self, seed: Callable[[], int] | None = None) -> Iterator[Entry]:
        """Return a context for a call of a method in which all members take part. Nested calls are part of it.

        Args:
            seed: Returns the entry's seed on the chief; None to derive it from Python's random state.

        Raises: EntryFinishedError at once if this is a candidate and the members have finished this call.
        """
        elastic = self.elastic
        if elastic is None:
            yield Entry(-1)
            return
        # A call inside an entry, for example `evaluate` in a callback, is not numbered: a joining process does not run
        # it again, and no process may join in the middle of it.
        if self._entry is not None:
            self._entry.depth += 1
            try:
                with elastic.join_points.blocked():
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
            # Only if nothing was raised: a failed entry has no result, and the job ends.
            result = entry.result if len(entry.result) <= MAX_RESULT_BYTES else NOT_KEPT
            self._last_finished = EntryFinished(entry.number, result)  # without the state, which takes time to send
            elastic.send_as_chief(EntryFinished(entry.number, result, entry.state))
            is_finished = True
        finally:
            self._entry = None
            elastic.leave_entry(entry.number, is_finished=is_finished)

    def _open(self, entry: Entry, elastic: ElasticGroup, seed: Callable[[], int]) -> None:
        """Fetch what all participants of the entry must know, or publish it on the chief."""
        if self.is_candidate and not elastic.joined_late:
            return  # the job's first entry, in which its members meet
        if self.is_candidate:
            entry.fetch(elastic)
            return
        entry.seed = int(self.retry(lambda: self.broadcast_from_chief(seed() if self.is_chief else 0)))
        entry.members = self.world_size
        if self._last_finished is not None:  # the chief may have been lost before it reported
            elastic.send_as_chief(self._last_finished)
        self.announce_entry()

    def announce_entry(self) -> None:
        """As the chief, perhaps a new one, publish the current entry for processes that join later."""
        elastic, entry = self.elastic, self._entry
        if elastic is not None and entry is not None:
            elastic.send_as_chief(EntryStarted(entry.number, entry.announcement))

    def join_entry(self) -> None:
        """As a candidate, wait to be admitted to the current entry.

        Raises: EntryFinishedError if the members have finished it meanwhile.
        """
        elastic, entry = self.elastic, self._entry
        assert elastic is not None
        assert entry is not None
        past = elastic.join(entry.number)
        if past is not None:
            raise EntryFinishedError(past)

    def run_recorded(self, make: Callable[[], bytes]) -> bytes:
        """Run `make` on all members as an entry and return its result; a candidate receives the members' result."""
        try:
            with self.entry() as entry:
                if self.is_candidate:
                    self.join_entry()
                entry.result = self.retry(make)
                return entry.result
        except EntryFinishedError as over:
            return over.result

    def common_seed(self) -> int:
        """Return a seed that is equal on all ranks of an elastic entry and differs at each call. Sends nothing."""
        assert self._entry is not None
        self._seeds += 1
        return int(np.random.SeedSequence([self._entry.seed, self._seeds]).generate_state(1)[0] >> 1)

    @property
    def present_entry(self) -> Entry:
        """Entry that this process is in; an empty one outside of entries and in jobs of fixed size."""
        return self._entry or Entry(-1)


def divides_batches(replica: Replica) -> bool:
    """Return whether steps are computed in parts: on several replicas, now or later, or in micro-batches."""
    return (not replica.is_alone and replica.mesh_parts is None) or replica.micro_batches is not None


def single_replica() -> Replica:
    """Return the only replica of a one-process job."""
    return Replica(connect(Membership(1, 0, (Member(0, "worker/0", host_identity(), "", os.getpid()),))))


def seed_from_program() -> int:
    """Return a 31-bit seed derived from the state of Python's `random`, so `keras.utils.set_random_seed` makes it
    reproducible. The state does not advance: Keras draws the same numbers as without Phalanx."""
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
