"""Which pass over a dataset a worker among parameter servers reads, where each pass has another order.

A shuffle of `tf.data` orders its n-th pass by its seed and n. Tickets name batches by number, so all workers must read
the same pass. Each leaves one in every epoch, whatever it has read of it, and a process that is restarted goes through
the epochs that are over without a batch. Only where a `fit` begins a number may differ: in a process that has not run
the former calls of `fit`, and on a chief that was restarted, as the others cannot go back to former passes. So the
chief says how many come before, and one that was restarted continues after those of the former process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from phalanx.data.numbered_batches import NumberedBatches
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

PASSES = "passes over the data"
"""Subject of the chief's message: `_Passes` as int64[3]."""


class _Passes(NamedTuple):
    """What the chief says.

    Attributes:
        before: The passes before this `fit`.
        newest: The most that were opened over any dataset, to the end of the running pass: a chief that is restarted
            does not know over which.
        former: The most that a former process of the chief has opened.
    """

    before: int
    newest: int
    former: int

    @classmethod
    def of(cls, content: Any) -> _Passes:
        return cls(*np.frombuffer(content, np.int64).tolist())


class StreamPasses:
    """The passes of one `fit` on one worker.

    Args:
        source: The data of the `fit`.
        fit: Number of this call of `fit`.
    """

    def __init__(self, source: NumberedBatches, worker: ParameterServerWorker, fit: int) -> None:
        self._cursor = source.passes
        self._worker = worker
        self._fit = fit

    def begin(self) -> None:
        """All continue after the same pass: the `fit` begins, or the chief has gone back."""
        cursor, worker = self._cursor, self._worker
        if cursor is None:
            return
        if worker.is_chief:
            said = self._said()
            before = max(cursor.passes_before, said.former)
            cursor.resume(0, 0, before)
            # The others open a pass as soon as they know of this.
            self._say(_Passes(before, max(said.newest, before + cursor.each), said.former))
        elif (received := worker.receive_broadcast(PASSES, self._fit)) is not None:
            cursor.resume(0, 0, _Passes.of(received[0]).before)

    def open(self) -> None:
        """On the chief: an epoch opens, perhaps with another pass."""
        if self._cursor is None:
            return
        said = self._said()
        if said.newest < self._cursor.passes_after:
            self._say(said._replace(newest=self._cursor.passes_after))

    def _said(self) -> _Passes:
        """On the chief: what was said last, by this process or a former one."""
        own = self._worker.last_broadcast(PASSES)
        if own is not None:
            return _Passes.of(own[0])
        held = _Passes.of(self._worker.broadcast_first(PASSES, np.zeros(3, np.int64)))
        return held._replace(former=held.newest)

    def _say(self, passes: _Passes) -> None:
        self._worker.broadcast(PASSES, [np.array(passes, np.int64)], self._fit)
