"""Training steps of a worker with parameter servers: the engine's merge sends gradients and receives new weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.training.servers.remote_model import RemoteModel
from phalanx.training.servers.ticket_batches import TicketBatch, TicketBatches


class ParameterServerStepper:
    """Stepper of one worker; see `steps/stepper.py`.

    If embeddings are sent by rows, the rows of the batch are fetched first, unless the last response included them.
    """

    def __init__(self, remote_model: RemoteModel, batches: TicketBatches) -> None:
        self._remote_model = remote_model
        self._engine = remote_model.engine
        self._batches = batches

    def train(self, batch: TicketBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        if self._remote_model.embeddings is not None:
            self._load_rows(batch)
        self._engine.train(batch.data, batch.share)

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        return self._engine.logs()

    def _load_rows(self, batch: TicketBatch) -> None:
        """Fetch the rows that the batch looks up, and announce those of the next one, if it is known."""
        embeddings, exchange = self._remote_model.embeddings, self._remote_model.merge.rows
        assert embeddings is not None
        numbers = embeddings.numbers(batch.data)
        embeddings.load(self._engine, numbers, exchange.begin(batch.ticket, numbers))
        following = self._batches.upcoming()
        if following is not None:
            exchange.prefetch(following.ticket, embeddings.numbers(following.data))
