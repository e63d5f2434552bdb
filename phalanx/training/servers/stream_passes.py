"""The pass over a dataset that a worker reads, if each pass has another order.

A shuffle of `tf.data` orders its n-th pass by its seed and n. Tickets name batches by number, so all workers must read
the same pass. Each worker leaves one pass per epoch, whatever it has read of it, and a restarted process goes through
the finished epochs without a batch. The number can differ only at the beginning of a `fit`: in a process that has not
run the earlier calls of `fit`, and on a restarted chief, as the others cannot go back to earlier passes. So the chief
broadcasts how many passes come before, and a restarted chief continues after those of its previous process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from phalanx.data.numbered_batches import NumberedBatches
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

PASSES = "passes over the data"
"""Subject of the chief's broadcast: `_Passes` as int64[3]."""


class _Passes(NamedTuple):
    """Content of the chief's broadcast.

    Attributes:
        before: Number of passes before this `fit`.
        newest: Largest number of passes opened over any dataset, including the running pass: a restarted chief does not
            know over which.
        previous_newest: Largest number that a previous process of the chief has opened.
    """

    before: int
    newest: int
    previous_newest: int

    @classmethod
    def of(cls, content: Any) -> _Passes:
        return cls(*np.frombuffer(content, np.int64).tolist())


class StreamPasses:
    """The passes of one `fit` on one worker.

    Args:
        source: The data of the `fit`.
        fit: Number of this `fit` call.
    """

    def __init__(self, source: NumberedBatches, worker: ParameterServerWorker, fit: int) -> None:
        self._cursor = source.passes
        self._worker = worker
        self._fit = fit

    def begin(self) -> None:
        """Continue after the same pass on all workers: the `fit` begins, or the chief has gone back."""
        cursor, worker = self._cursor, self._worker
        if cursor is None:
            return
        if worker.is_chief:
            last = self._last_broadcast()
            before = max(cursor.passes_before, last.previous_newest)
            cursor.resume(0, 0, before)
            # The others open a pass as soon as they receive this.
            self._broadcast(_Passes(before, max(last.newest, before + cursor.opened_per_pass), last.previous_newest))
        elif (received := worker.receive_broadcast(PASSES, self._fit)) is not None:
            cursor.resume(0, 0, _Passes.of(received[0]).before)

    def open(self) -> None:
        """On the chief, record that an epoch opens, perhaps with another pass."""
        if self._cursor is None:
            return
        last = self._last_broadcast()
        if last.newest < self._cursor.passes_after:
            self._broadcast(last._replace(newest=self._cursor.passes_after))

    def _last_broadcast(self) -> _Passes:
        """On the chief, the last broadcast, of this process or a previous one."""
        own = self._worker.last_broadcast(PASSES)
        if own is not None:
            return _Passes.of(own[0])
        held = _Passes.of(self._worker.broadcast_once(PASSES, np.zeros(3, np.int64)))
        return held._replace(previous_newest=held.newest)

    def _broadcast(self, passes: _Passes) -> None:
        self._worker.broadcast(PASSES, [np.array(passes, np.int64)], self._fit)
