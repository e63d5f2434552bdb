"""The program's handles for remote objects: future results, and values that are separate on each worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from phalanx.errors import UnsupportedError


class OutOfRangeError(EOFError):
    """The data of a worker ended inside a scheduled function (`tf.errors.OutOfRangeError`)."""


class RemoteValue:
    """The result of a scheduled function (`tf.distribute.coordinator.RemoteValue`).

    Pass it to another scheduled function, which then runs after this one and gets the result.

    Args:
        number: Number of the function.
        wait: Returns when the function has finished.
        decode: Builds the result from its pickle, with the backend's tensors if requested.
    """

    def __init__(
        self, number: int, wait: Callable[[RemoteValue], None], decode: Callable[[memoryview, bool], Any]
    ) -> None:
        self.number = number
        self._wait = wait
        self._decode = decode
        # One of them is set once, with the dispatcher's lock held, and then stays.
        self._pickle: memoryview | None = None
        self._error: BaseException | None = None

    def fetch(self) -> Any:
        """The result, with tensors as NumPy arrays; waits for it.

        Raises: the error of the function; concurrent.futures.CancelledError if it was cancelled because another one
            failed: schedule it again.
        """
        return self._decode(self.finished(), False)

    def get(self) -> Any:
        """The result, like `fetch`, with the backend's tensors."""
        return self._decode(self.finished(), True)

    def finished(self) -> memoryview:
        """The result as received; waits for it."""
        self._wait(self)
        if self._error is not None:
            raise self._error
        assert self._pickle is not None, "it is finished"
        return self._pickle

    # For the dispatcher.

    @property
    def is_finished(self) -> bool:
        """Whether `fetch` and `get` would return, or raise, immediately."""
        return self._pickle is not None or self._error is not None

    def succeed(self, pickle: memoryview) -> None:
        """Set the pickled result of the function."""
        self._pickle = pickle

    def fail(self, error: BaseException) -> None:
        """Make `fetch` and `get` raise an error."""
        self._error = error

    def cancel(self) -> None:
        """Make `fetch` and `get` report that another function failed."""
        self._error = CancelledError("The function was cancelled, because another one failed. Schedule it again.")

    def __repr__(self) -> str:
        state = "waited for" if not self.is_finished else "here" if self._error is None else repr(self._error)
        return f"<RemoteValue of function {self.number}: {state}>"


class PerWorkerValues:
    """A value that differs between workers (`tf.distribute.coordinator.PerWorkerValues`).

    A scheduled function that gets it as an argument receives the value of its worker. This process holds no value.

    Args:
        number: Returns a number for this object.
    """

    def __init__(self, number: Callable[[PerWorkerValues], int]) -> None:
        self.number = number(self)


class PerWorkerIterator(PerWorkerValues):
    """Each worker's iterator over its dataset."""

    def __init__(self, number: Callable[[PerWorkerValues], int], dataset: PerWorkerDataset) -> None:
        super().__init__(number)
        self._dataset = dataset  # keeps the dataset alive as long as the iterator

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise UnsupportedError(
            "The iterators are the workers': pass this one to `schedule`, and call next() inside the function."
        )

    get_next = __next__


class PerWorkerDataset(PerWorkerValues):
    """Each worker's dataset; `iter()` of it returns a `PerWorkerValues` of iterators.

    Args:
        iterate: Creates the iterators.
    """

    def __init__(
        self, number: Callable[[PerWorkerValues], int], iterate: Callable[[PerWorkerDataset], PerWorkerIterator]
    ) -> None:
        super().__init__(number)
        self._iterate = iterate

    def __iter__(self) -> PerWorkerIterator:
        return self._iterate(self)
