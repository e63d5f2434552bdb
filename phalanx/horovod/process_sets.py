"""Process sets: some of the job's ranks, with collectives of their own. Names and meaning are Horovod's."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

from phalanx.errors import ConfigurationError
from phalanx.horovod.controller import Controller
from phalanx.horovod.horovod_job import current


class ProcessSet:
    """Some ranks of the job. It can be used once it is registered: by `hvd.init(process_sets=...)`, `add_process_set`.

    Attributes:
        process_set_id: its number; None if it is not registered.
        ranks: of its members in the job, in ascending order.

    Args:
        ranks: different ones, at least one.
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
        """The number of its members. Raises ValueError if it is not registered, as all that follow."""
        self._number()
        return len(self.ranks)

    def rank(self) -> int:
        """This process's number among the members. Raises ValueError if it is none of them."""
        self._number()
        own = current().membership.rank
        if own not in self.ranks:
            raise ValueError(f"rank {own} is no member of {self}.")
        return self.ranks.index(own)

    def included(self) -> bool:
        """Whether this process is a member."""
        self._number()
        return current().membership.rank in self.ranks

    def position(self, rank: int, what: str) -> int:
        """The number among the members of a rank of the job.

        Raises: ConfigurationError if it is none of them; `what` says what it was given for.
        """
        if rank not in self.ranks:
            raise ConfigurationError(f"{what} is {rank}, which is no rank of {self}.")
        return self.ranks.index(rank)

    @property
    def controller(self) -> Controller:
        """What runs its collectives. Raises ValueError if this process is no member."""
        world = current()
        controller = world.controllers.get(self._number())
        if controller is None:
            raise ValueError(
                f"rank {world.membership.rank} is no member of {self}, so it cannot take part in its collectives."
            )
        return controller

    def _number(self) -> int:
        world = current()
        if self.process_set_id is None:
            raise ValueError(f"{self} is not registered; call hvd.add_process_set on all ranks first.")
        assert world is not None
        return self.process_set_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (self.process_set_id, self.ranks) == (
            other.process_set_id,
            other.ranks,
        )

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _Global(ProcessSet):
    """All ranks; knows them once the job is met."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0


global_process_set: ProcessSet = _Global()
"""All ranks of the job."""

_registered: dict[int, ProcessSet] = {0: global_process_set}
_numbers = itertools.count(1)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; all ranks of the job must call, with the same ranks.

    Returns: the process set, which can be used now.

    Raises:
        ConfigurationError: it is registered already, has no rank, or one that the job has not.
        HorovodInternalError: the ranks of the job named different ones.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    world = current()
    known = next((one for one in _registered.values() if one.ranks == process_set.ranks), None)
    if process_set.process_set_id is not None or known is not None:
        raise ConfigurationError(f"{known or process_set} is registered already; a process set of these ranks exists.")
    wrong = [rank for rank in process_set.ranks if not 0 <= rank < world.membership.world_size]
    if wrong or not process_set.ranks:
        raise ConfigurationError(
            f"a process set needs ranks of the job, 0 to {world.membership.world_size - 1}; it got {process_set.ranks}."
        )
    number = next(_numbers)
    world.add(number, process_set.ranks)
    process_set.process_set_id = number
    _registered[number] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a process set; all ranks of the job must call.

    Returns: False for the global one, which stays, and for one that is not registered.
    """
    number = process_set.process_set_id
    if not number or _registered.get(number) is not process_set:
        return False
    current().remove(number)
    del _registered[number]
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of all process sets that are registered, by number."""
    current()
    return {number: list(process_set.ranks) for number, process_set in _registered.items()}


def begin(world_size: int) -> None:
    """The job has been met."""
    global _numbers
    global_process_set.ranks = list(range(world_size))
    _numbers = itertools.count(1)


def end() -> None:
    """The job is left: no process set but the global one is registered any more."""
    for process_set in _registered.values():
        if process_set is not global_process_set:
            process_set.process_set_id = None
    _registered.clear()
    _registered[0] = global_process_set
    global_process_set.ranks = []
