"""The batches of one worker, named by the tickets of the servers' schedule.

The chief draws the orders of shuffled samples; the others get them from the servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.batch_split import split_share
from phalanx.data.numbered_batches import BatchNotAvailableError, NumberedBatches
from phalanx.parameter_server.client.parameter_client import HEAD
from phalanx.parameter_server.server_messages import EndEpoch, EpochOver, FitOver, NoBatch, RequestSampleOrder, Ticket
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.stream_passes import StreamPasses
from phalanx.training.steps.parameter_server_step import ParameterServerMerge

Array = np.ndarray[Any, Any]


class OrderUnavailableError(Exception):
    """The chief has no sample order for this epoch: it has gone back, or has ended the `fit`.

    Attributes:
        answer: The servers' response instead of an order.
    """

    def __init__(self, answer: EpochOver | FitOver) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True, slots=True)
class TicketBatch:
    """This worker's part of a ticket's batch; see `TrainingBatch`."""

    data: tuple[Any, Any, Any]
    size: int
    global_size: int
    ticket: Ticket

    @property
    def step(self) -> int:
        return self.ticket.batch

    @property
    def share(self) -> float:
        return self.size / (self.global_size or 1)


class TicketBatches:
    """Requests tickets, epoch after epoch, and cuts their batches.

    Attributes:
        source: Data, by the number of the batch.
        passes: Passes over the data; see `StreamPasses`.
        drawn_order: Order that the chief has drawn for the starting epoch, until the servers have it; chief only.
        is_ended: Whether the chief has ended the running epoch.
    """

    source: NumberedBatches
    passes: StreamPasses

    def __init__(self, fit: int, worker: ParameterServerWorker, merge: ParameterServerMerge) -> None:
        self.drawn_order: Array | None = None
        self.is_ended = False
        self._fit = fit
        self._worker = worker
        self._client = worker.client
        self._merge = merge
        self._prefetched: dict[int, TicketBatch] = {}  # batches of later steps, by serial of the ticket

    def set_source(self, source: NumberedBatches) -> None:
        """Set the data, which was created with `agree_on_order`."""
        self.source, self.passes = source, StreamPasses(source, self._worker, self._fit)

    def agree_on_order(self, drawn: Array) -> Array:
        """The chief's sample order for the pass that begins.

        Args:
            drawn: The order that this process has drawn.

        Raises: OrderUnavailableError if there is none.
        """
        # `_open_epoch` sends it when the epoch is opened.
        if self._worker.is_chief:
            self.drawn_order = drawn
            return drawn
        request = RequestSampleOrder(self._fit, self.source.pass_key, self._merge.tickets.era)
        answer = self._merge.request_from_chief(request)
        if isinstance(answer, EpochOver | FitOver):
            raise OrderUnavailableError(answer)
        return np.frombuffer(answer[0], np.int64)

    def begin(self) -> None:
        """Begin an epoch."""
        self.is_ended = False
        self._prefetched.clear()

    def next(self, epoch: int) -> Ticket | EpochOver | FitOver:
        """The ticket of the next step, or the reason why there is none."""
        while True:
            ticket = self._merge.next_ticket(self._fit, epoch)
            if not isinstance(ticket, Ticket) or not (self.is_ended and len(ticket.members) == 1):
                return ticket
            # A step of several members may already be in progress on the others; this one is not.
            self._report_missing(ticket, is_end_of_data=True)

    def batch(self, ticket: Ticket) -> TicketBatch | None:
        """This worker's part of the ticket's batch; if there is none, reports it to the servers and returns None."""
        return self._prefetched.pop(ticket.serial, None) or self._read(ticket)

    def upcoming(self) -> TicketBatch | None:
        """The batch of the following step, if its ticket is available."""
        ticket = self._merge.tickets.upcoming()
        if ticket is None:
            return None
        batch = self._read(ticket)
        if batch is None:
            self._merge.tickets.drop_upcoming()
        else:
            self._prefetched[ticket.serial] = batch
        return batch

    def end_epoch(self, epoch: int) -> EpochOver:
        """As the chief, whose callbacks stop the training, prevent workers from beginning another step of the epoch."""
        self._merge.flush()
        answer, _ = self._client.request(HEAD, EndEpoch(self._fit, epoch))
        assert isinstance(answer, EpochOver)
        self.is_ended = True
        return answer

    def _read(self, ticket: Ticket) -> TicketBatch | None:
        try:
            batch = self.source.batch(ticket.batch)
        except BatchNotAvailableError:
            self._report_missing(ticket, is_end_of_data=False)
            return None
        if batch is None:
            self._report_missing(ticket, is_end_of_data=True)
            return None
        # In synchronous training several workers share a batch: each takes the part at its position among the ticket's
        # members.
        part = split_share(
            batch.data, ticket.members.index(ticket.member), len(ticket.members), "the input", copies=False
        )
        return TicketBatch(part.data, part.size, part.global_size or part.size, ticket)

    def _report_missing(self, ticket: Ticket, *, is_end_of_data: bool) -> None:
        """Return a ticket without a batch, because the data has ended or the stream is past it."""
        self._merge.flush()
        self._client.request(HEAD, NoBatch(ticket, is_end_of_data))
        self._merge.tickets.skip(ticket)
