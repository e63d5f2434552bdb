"""The functions that are scheduled and not finished, their results, and the error of one that failed.

Pure bookkeeping over a `FunctionAssignment`: no thread, link or clock. The owner holds a lock during each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.coordinator.function_assignment import MAX_LOST_WORKERS, FunctionAssignment
from phalanx.coordinator.remote_values import RemoteValue
from phalanx.errors import PeerLostError


@dataclass
class ScheduledCall:
    """A function to be run on a worker.

    Attributes:
        digest: Digest of the pickled function.
        function: The pickled function.
        arguments: The pickled arguments.
        needs: Results of other functions that the arguments refer to.
        stored_objects: Number, and function that pickles it, of each large value that the arguments refer to.
        kept_alive: Objects that must stay alive until the function has run.
        result: Receives the result, or the error.
    """

    digest: bytes
    function: bytes
    arguments: bytes
    needs: Sequence[RemoteValue]
    stored_objects: dict[int, Callable[[], bytes]]
    kept_alive: Sequence[Any]
    result: RemoteValue


class ScheduledCalls:
    """Unfinished calls by number, and the first failure that no caller has seen yet."""

    def __init__(self) -> None:
        self.assignment = FunctionAssignment()
        self._calls: dict[int, ScheduledCall] = {}  # calls that the queue has not finished
        self._failure: BaseException | None = None  # while it is set, the queue accepts no calls

    def __getitem__(self, number: int) -> ScheduledCall:
        return self._calls[number]

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def add(self, call: ScheduledCall) -> None:
        number = call.result.number
        self._calls[number] = call
        self.assignment.add(number, [need.number for need in call.needs if not need.is_finished])

    def finish(self, worker: int, incarnation: str, number: int) -> ScheduledCall | None:
        """The call that a worker has answered; None if the answer no longer counts."""
        if not self.assignment.finish(worker, incarnation, number):
            return None
        return self._calls.pop(number)

    def fail(self, call: ScheduledCall, error: BaseException) -> None:
        """Fail a call, and cancel all that are waiting."""
        call.result.fail(error)
        if self._failure is None:
            self._failure = error
        self._cancel(self.assignment.fail())

    def fail_all(self, error: BaseException) -> None:
        """Fail all calls: each result raises the error, and so does the next `raise_failure`."""
        # Running calls keep their results; the failure is raised once they are answered.
        for number in self.assignment.fail():
            self._calls.pop(number).result.fail(error)
        self._failure = error

    def give_up(self, numbers: Iterable[int], worker: str) -> None:
        """Give up these calls of a lost worker, which do not run again."""
        for number in numbers:
            if self.assignment.is_failing:
                self._cancel([number])
                continue
            error = PeerLostError(
                f"Gave up on a function: {MAX_LOST_WORKERS} workers were lost while they ran it, {worker} last. Look "
                f"at the end of their output for the cause.",
                rank=-1,
                task=worker,
                host="",
            )
            self.fail(self._calls.pop(number), error)

    def raise_failure(self) -> None:
        """Raise the error of the call that failed first, once; the queue then accepts calls again."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self.assignment.clear_failure()
            raise failure

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._calls.pop(number).result.cancel()
