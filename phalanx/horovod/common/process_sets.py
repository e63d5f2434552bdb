"""Process sets: subsets of the job's ranks with separate collectives. Names and semantics are Horovod's."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

from phalanx.errors import ConfigurationError
from phalanx.horovod.controller import Controller
from phalanx.horovod.horovod_job import current_job


class ProcessSet:
    """A subset of the job's ranks. Register it with `hvd.init(process_sets=...)` or `add_process_set` before use.

    Args:
        ranks: One or more distinct ranks.

    Attributes:
        process_set_id: Number of the process set; None if it is not registered.
        ranks: The members' ranks in the job, in ascending order.
    """

    def __init__(self, ranks: Iterable[int]):
        self.process_set_id: int | None = None
        try:
            self.ranks: list[int] = sorted(map(operator.index, ranks))
        except TypeError as error:
            raise ConfigurationError(f"a process set is made of ranks, which are integers: {error}.") from error
        if len(set(self.ranks)) != len(self.ranks):
            raise ConfigurationError(f"a process set has each rank once; it got {self.ranks}.")

    def size(self) -> int:
        """Return the number of members. Raises ValueError if not registered, as do the methods below."""
        self.check_registered()
        return len(self.ranks)

    def rank(self) -> int:
        """Return this process's number among the members. Raises ValueError if it is not a member."""
        self.check_registered()
        own = current_job().membership.rank
        if own not in self.ranks:
            raise ValueError(f"rank {own} is no member of {self}.")
        return self.ranks.index(own)

    def included(self) -> bool:
        """Return whether this process is a member."""
        self.check_registered()
        return current_job().membership.rank in self.ranks

    def index_of(self, rank: int, what: str) -> int:
        """Return the number of a rank of the job among the members.

        Args:
            rank: Rank in the job.
            what: Name of the argument that holds it, for the error.

        Raises: ConfigurationError if it is not a member.
        """
        if rank not in self.ranks:
            raise ConfigurationError(f"{what} is {rank}, which is no rank of {self}.")
        return self.ranks.index(rank)

    @property
    def controller(self) -> Controller:
        """The controller that runs the collectives. Raises ConfigurationError if this process is not a member."""
        job = current_job()
        controller = job.controllers.get(self.check_registered())
        if controller is None:
            raise ConfigurationError(
                f"rank {job.membership.rank} is no member of {self}, so it cannot take part in its collectives."
            )
        return controller

    def check_registered(self) -> int:
        """Return the number of the process set. Raises ConfigurationError if it is not registered."""
        current_job()  # raises before `init`
        if self.process_set_id is None or _registered.get(self.process_set_id) != self:
            raise ConfigurationError(f"{self} is not registered; call hvd.add_process_set on all ranks first.")
        return self.process_set_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (self.process_set_id, self.ranks) == (
            other.process_set_id,
            other.ranks,
        )

    def __hash__(self) -> int:
        return id(self)  # not the hash of what `__eq__` compares, which changes when the set is registered

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _Global(ProcessSet):
    """All ranks, which are known after joining the job."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0


global_process_set: ProcessSet = _Global()
"""All ranks of the job."""

_registered: dict[int, ProcessSet] = {0: global_process_set}
_numbers = itertools.count(1)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; all ranks of the job must call this.

    Args:
        process_set: A process set, or its ranks; equal on all ranks.

    Returns: the process set, ready for use.

    Raises:
        ConfigurationError: it is already registered, is empty, or has a rank that is not in the job.
        HorovodInternalError: the arguments differ between ranks.
    """
    (added,) = add_process_sets([process_set])
    return added


def add_process_sets(process_sets: Iterable[ProcessSet | Sequence[int]]) -> list[ProcessSet]:
    """Register several process sets, see `add_process_set`; after a ConfigurationError, none of them is registered."""
    wanted = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]
    job, known = current_job(), list(_registered.values())
    for process_set in wanted:
        _check_addable(process_set, known, job.membership.world_size)
        known.append(process_set)
    for process_set in wanted:
        # Counted on all ranks, even for sets that fail, so that the next one has the same number everywhere.
        number = next(_numbers)
        job.add_process_set(number, process_set.ranks)
        process_set.process_set_id = number
        _registered[number] = process_set
    return wanted


def _check_addable(process_set: ProcessSet, known: Sequence[ProcessSet], world_size: int) -> None:
    twin = next((one for one in known if one.ranks == process_set.ranks), None)
    if process_set.process_set_id is not None or twin is not None:
        raise ConfigurationError(f"{twin or process_set} is registered already; a process set of these ranks exists.")
    wrong = [rank for rank in process_set.ranks if not 0 <= rank < world_size]
    if wrong or not process_set.ranks:
        raise ConfigurationError(
            f"a process set needs ranks of the job, 0 to {world_size - 1}; it got {process_set.ranks}."
        )


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; all ranks of the job must call this.

    Args:
        process_set: A registered process set.

    Returns: False for the global process set, which is kept, and for a process set that is not registered.
    """
    number = process_set.process_set_id
    if not number or _registered.get(number) is not process_set:
        return False
    current_job().remove_process_set(number)
    del _registered[number]
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of all registered process sets, by number."""
    current_job()
    return {number: list(process_set.ranks) for number, process_set in _registered.items()}


def reset_for_job(world_size: int) -> None:
    """Initialize the global process set, after the job has been joined."""
    global _numbers
    global_process_set.ranks = list(range(world_size))
    _numbers = itertools.count(1)


def unregister_all() -> None:
    """Unregister all process sets except the global one, before leaving the job."""
    for process_set in _registered.values():
        if process_set is not global_process_set:
            process_set.process_set_id = None
    _registered.clear()
    _registered[0] = global_process_set
    global_process_set.ranks = []
