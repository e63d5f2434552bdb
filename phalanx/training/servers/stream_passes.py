"""Which pass over a dataset a worker among parameter servers reads, where each pass has another order.

A shuffle of `tf.data` orders its n-th pass by its seed and n. Tickets name batches by number, so all workers must read
the same pass. Each leaves one in every epoch, whatever it has read of it, and a process that is restarted goes through
the epochs that are over without a batch. Only where a `fit` begins a number may differ: in a process that has not run
the former calls of `fit`, and on a chief that was restarted, as the others cannot go back to former passes. So the
chief says how many come before, and one that was restarted continues after those of the former process.
"""

from __future__ import annotations

import numpy as np

from phalanx.data.numbered_batches import NumberedBatches
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

PASSES = "passes over the data"
"""Subject of the chief's message: int64[2], the passes before this `fit`, and the most that were opened."""
FORMER_PASSES = "passes of the former chief"
"""Subject of another: int64[1], the most that a former process of the chief has opened."""


class StreamPasses:
    """The passes of one `fit` on one worker.

    Args:
        source: the data of the `fit`.
        fit: number of this call of `fit`.
    """

    def __init__(self, source: NumberedBatches, worker: ParameterServerWorker, fit: int) -> None:
        self._cursor = source.passes
        self._worker = worker
        self._fit = fit
        self._before = 0

    def begin(self) -> None:
        """All continue after the same pass: the `fit` begins, or the chief has gone back."""
        cursor, worker = self._cursor, self._worker
        if cursor is None:
            return
        if worker.is_chief:
            self._before = max(cursor.passes_before, self._opened_by_former_chief())
            cursor.resume(0, 0, self._before)
            self._send(self._before + cursor.each)  # the others open a pass as soon as they know of this
            return
        received = worker.receive_broadcast(PASSES, self._fit)
        if received is not None:
            cursor.resume(0, 0, int(np.frombuffer(received[0], np.int64)[0]))

    def open(self) -> None:
        """On the chief: an epoch opens, perhaps with another pass."""
        if self._cursor is not None:
            self._send(self._cursor.passes_after)

    def _opened_by_former_chief(self) -> int:
        known = self._worker.last_broadcast(FORMER_PASSES)
        if known is None:  # nothing was sent by this process yet: what the head holds is from a former one
            held = np.frombuffer(self._worker.broadcast_first(PASSES, np.zeros(2, np.int64)), np.int64)
            known = [held[1:]]
            self._worker.broadcast(FORMER_PASSES, known)
        return int(known[0][0])

    def _send(self, newest: int) -> None:
        sent = self._worker.last_broadcast(PASSES)
        # Of all datasets: a chief that is restarted does not know of which one it was.
        newest = newest if sent is None else max(newest, int(sent[0].view(np.int64)[1]))
        self._worker.broadcast(PASSES, [np.array([self._before, newest], np.int64)], self._fit)
