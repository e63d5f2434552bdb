"""The orders of shuffled samples among parameter servers: the chief draws them, the others get them from servers."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.data import ShardedInput
from phalanx.parameter_server.server_messages import EpochOver, FitOver
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.steps.parameter_server_step import ParameterServerMerge

Array = np.ndarray[Any, Any]


class OrderUnavailableError(Exception):
    """The chief shuffles for no such epoch: it has gone back, or has ended the `fit`.

    Attributes:
        answer: what the servers say instead.
    """

    def __init__(self, answer: EpochOver | FitOver) -> None:
        super().__init__()
        self.answer = answer


class SampleOrders:
    """Agrees on the order of the samples in each pass over the data of one `fit`.

    Attributes:
        source: of the data; set once it was made with this.
        drawn: on the chief, the order that it has drawn for the epoch that begins, until the servers have it.
    """

    def __init__(self, fit: int, worker: ParameterServerWorker, merge: ParameterServerMerge) -> None:
        self.source: ShardedInput | None = None
        self.drawn: Array | None = None
        self._fit = fit
        self._worker = worker
        self._merge = merge

    def agree(self, own: Array) -> Array:
        """The chief's order of the pass that begins.

        Args:
            own: the order that this process has drawn.

        Raises: OrderUnavailableError if there is none.
        """
        if self._worker.is_chief:
            self.drawn = own
            return own
        assert self.source is not None, "orders are wanted when an epoch begins"
        answer = self._merge.request_sample_order(self._fit, self.source.pass_began)
        if isinstance(answer, EpochOver | FitOver):
            raise OrderUnavailableError(answer)
        return answer
