"""One training step of a worker with parameter servers: send gradients, receive new weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.engines.engine import Merge
from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.errors import UnsupportedError
from phalanx.monitoring import timeline
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.client.parameter_client import HEAD
from phalanx.parameter_server.client.placed_variables import PlacedVariables
from phalanx.parameter_server.server_messages import (
    EpochOver,
    FitOver,
    PushGradients,
    Response,
    Ticket,
    Values,
    dtypes_of,
)
from phalanx.runtime import progress
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.sparse_embeddings import EmbeddingRowExchange
from phalanx.training.steps.gradient_merge import MergeBuffers
from phalanx.training.steps.shard_transfer import ShardTransfer
from phalanx.training.steps.step_tickets import StepTickets

Array = np.ndarray[Any, Any]
Clip = Callable[[Sequence[Array]], Sequence[Array]]

NO_EPOCH = -1
"""Epoch and batch of a ticket that was not issued by the schedule."""
SERIAL_BITS = 60


class ParameterServerMerge(Merge):
    """Merge whose update runs on the servers.

    A worker waits for the response to a step's gradients. With n asynchronous workers, the weights then lack about
    n - 1 updates when gradients computed from them arrive.

    If the rules say `overlap`, the worker awaits the response together with the next step's, so that sending, updating
    and receiving overlap with its computation. The weights then also lack this worker's last update, and 2n - 1 updates
    in total. A worker with tables of which only some rows are sent waits in any case: it sends its gradients with the
    numbers of the rows that its next batch needs, and the rows arrive with the response.

    Args:
        worker: This process as a worker.

    Attributes:
        tickets: This worker's view of the schedule.
    """

    updates_weights = is_unfused = once_per_step = True

    def __init__(self, worker: ParameterServerWorker) -> None:
        self._worker = worker
        self._client = worker.client
        self._is_synchronous = worker.rules.synchronous
        self._is_overlapped = False
        self._buffers = MergeBuffers()
        self._transfer: ShardTransfer | None = None
        self._rows: EmbeddingRowExchange | None = None
        self._clip: Clip | None = None
        self._is_outstanding = False
        self.tickets = StepTickets()
        self._after = -1  # at an epoch's end: its last step's serial, since others' parts may still be in flight
        self._last_response_at = 0.0  # when the head last responded, by the monotonic clock

    def set_variables(self, fit: int, placed: PlacedVariables, clip: Clip | None) -> None:
        """Set the variables of the `fit` that begins.

        Args:
            fit: Number of the `fit` call.
            placed: Placement of the variables' shards.
            clip: Clips gradients if no server sees all of them: each worker's gradients in asynchronous training, the
                merged ones in synchronous training.
        """
        compression = self._worker.compression
        self._transfer = ShardTransfer(self._client, placed, None if compression is None else compression.wire_dtype)
        self._rows = EmbeddingRowExchange(self._client, fit, placed) if placed.tables else None
        self._is_overlapped = self._worker.rules.overlap and not placed.tables
        self._clip = clip
        self._is_outstanding = False
        self._after = -1
        self.tickets.begin_fit(fit)

    @property
    def transfer(self) -> ShardTransfer:
        """Transfer of variables to the servers and back."""
        assert self._transfer is not None, "the model is placed before the first step"
        return self._transfer

    @property
    def rows(self) -> EmbeddingRowExchange:
        """Rows of tables that are sent and received; only if there are tables."""
        assert self._rows is not None, "there are tables"
        return self._rows

    def rejoin(
        self, server: int, epoch: int = -1, steps: int = -1, order_epoch: int = -1, *, is_epoch_opened: bool = True
    ) -> messages.Rejoin:
        """Return this worker's position, for a server that recovers in the middle of training."""
        version, step = self.transfer.versions[server], self._worker.global_step
        return self.tickets.rejoin(version, step, epoch, steps, order_epoch, is_epoch_opened=is_epoch_opened)

    # The schedule.

    def next_ticket(self, fit: int, epoch: int) -> Ticket | EpochOver | FitOver:
        """Begin the next step, with a ticket from an earlier response or else a newly requested one."""
        tickets = self.tickets
        if tickets.upcoming() is None:
            self.flush()
        if tickets.upcoming() is None:
            response, _ = self._client.request(HEAD, messages.RequestTicket(fit, epoch, tickets.era))
            assert isinstance(response, Ticket | EpochOver | FitOver)
            if not isinstance(response, Ticket):
                self._end_epoch(response)
                return response
            self._after = -1
            self._last_response_at = time.monotonic()
            tickets.add(response)
            if self._is_overlapped or (self._rows is not None and not self._is_synchronous):
                # The next ticket must be available while gradients are in flight, or to name the rows of the next step.
                spare, _ = self._client.request(HEAD, messages.RequestTicket(fit, epoch, tickets.era, wait=False))
                if isinstance(spare, Ticket):
                    tickets.add(spare)
        return tickets.begin_step()

    def request_from_chief(
        self, request: messages.RequestSampleOrder | messages.RequestValidationLogs
    ) -> Sequence[memoryview] | EpochOver | FitOver:
        """Return what the chief has sent for an epoch, or the reason why there is none."""
        response, buffers = self._client.request(HEAD, request)
        if isinstance(response, EpochOver | FitOver):
            self._end_epoch(response)
            return response
        return buffers

    def _end_epoch(self, response: EpochOver | FitOver) -> None:
        """End the epoch, or begin the new era to which the chief has gone back."""
        self._after = response.newest_serial if isinstance(response, EpochOver) else -1
        if isinstance(response, EpochOver) and response.resume_epoch >= 0:
            self.tickets.begin_era(response.era)

    # Updates.

    def update(self, gradients: Sequence[Array]) -> list[Array]:
        """Update outside of epochs, without a ticket of the schedule; in asynchronous training only.

        Returns: the variables' values; they are not overwritten.
        """
        tickets = self.tickets
        if tickets.current is None or (tickets.current.fit, tickets.current.era) != (tickets.fit, tickets.era):
            number = self._worker.number
            # Distinct from those of an earlier process of this task, whose updates the servers may remember.
            serial = -1 - secrets.randbits(SERIAL_BITS)
            tickets.current = Ticket(tickets.fit, NO_EPOCH, NO_EPOCH, (number,), number, serial, tickets.era)
        progress.enter("push")
        values = self._step(gradients, (), (), 1.0)
        return [value for value in values if value is not None]

    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        flats, views = self._buffers.next(layout)
        # Gradients come first in every engine layout, followed by state, metrics and logs.
        count = sum(weight is MergeWeight.GRADIENT for weight in layout.weights)
        if count:
            self._check_number(count)
        progress.enter("push")
        timeline.current.enter("push and pull")
        merged = self._step(arrays[:count], arrays[count:], layout.weights[count:], share)
        for view, value in zip(views, merged, strict=True):
            if value is None:
                continue  # a table: the rows of the next step are written before it begins
            np.copyto(view, value.reshape(view.shape))
        progress.enter("update")
        timeline.current.enter("apply")
        return flats

    def _check_number(self, gradients: int) -> None:
        """Raises: UnsupportedError unless there is one gradient for each variable."""
        variables = len(self.transfer.placed.variables)
        if gradients != variables:
            raise UnsupportedError(
                f"The model has {gradients} trainable variables now, and had {variables} when fit() began. Create all "
                f"variables before, or call fit() again."
            )

    def all_reduce(self, local: Array, share: float) -> Array:
        layout = StepLayout.of([local], [MergeWeight.ONE])
        return np.array(layout.unpack(self(layout, [local], share))[0])

    def all_gather(self, local: Array, share: float) -> tuple[Array, int]:
        raise UnsupportedError(
            "A loss or layer needs the samples of all workers in every step, and workers of parameter servers send "
            "each other nothing. Use MultiWorkerMirroredStrategy."
        )

    def _step(
        self, gradients: Sequence[Array], extras: Sequence[Array], weights: Sequence[MergeWeight], share: float
    ) -> list[Array | None]:
        if gradients and self._clip is not None:
            gradients = self._clip(self._merged(gradients, share) if self._is_synchronous else gradients)
        if not self._is_synchronous:
            if gradients:
                self.flush()
                self._send(gradients, (), (), 1.0)
                self._is_outstanding = True
                if not self._is_overlapped:
                    self.flush()
            return [*(self.transfer.values if gradients else ()), *extras]
        self._send(gradients, extras, weights, share)
        merged = self._receive()
        return [*(self.transfer.values if gradients else ()), *merged]

    def _merged(self, gradients: Sequence[Array], share: float) -> list[Array]:
        """Return the mean over the workers, computed by the head. When all workers push it, its mean is the same."""
        self._send((), gradients, [MergeWeight.SHARE] * len(gradients), share)
        merged = self._receive()
        return [mean.reshape(own.shape) for mean, own in zip(merged, gradients, strict=True)]

    def _send(
        self, gradients: Sequence[Array], extras: Sequence[Array], weights: Sequence[MergeWeight], share: float
    ) -> None:
        """Send each server the gradients of its shards, and the head everything else."""
        if self._client.num_servers > 1 and time.monotonic() - self._last_response_at > self._client.timeout_s / 2:
            # This process was suspended, or is very slow. Only the head knows whether it was evicted; the other servers
            # would apply its outdated gradients.
            self._client.request(HEAD, messages.QueryJobOver())
        ticket, transfer = self.tickets.current, self.transfer
        assert ticket is not None, "a step begins with a ticket"
        if gradients:
            # The head's responses complete the steps in this order.
            self.tickets.push(ticket.serial)
        rows = self._rows if gradients else None
        sparse = rows.with_rows(gradients) if rows is not None else gradients
        # All buffers are filled before the first message: `finite` must be the same in all, or one server would refuse
        # a step that another applies.
        filled, finite = [], True
        for server in range(self._client.num_servers):
            wanted = rows.wanted(server) if rows is not None else []
            buffers, count = transfer.fill(server, sparse, [*wanted, *extras] if server == HEAD else wanted)
            finite = finite and (not self._worker.rules.refuse_nan or all(map(_is_finite, buffers[:count])))
            filled.append((buffers, bool(wanted)))
        merged = tuple([weight.value for weight in weights])
        for server, (buffers, wants_rows) in enumerate(filled):
            request = PushGradients(
                ticket,
                self.tickets.phase,
                bool(gradients),
                finite,
                share,
                dtypes_of(buffers),
                merged if server == HEAD else (),
                wants_rows=wants_rows,
            )
            self._client.send(server, request, buffers)
        self.tickets.phase += 1

    def _receive(self) -> list[Array]:
        """Receive the servers' responses to the oldest outstanding step; return the merged extras."""
        rows, extras = self.transfer.receive(self._client.receive_all(on_response=self._record_response))
        if any(rows):
            self.rows.receive(rows)
        return extras

    def _record_response(self, server: int, response: Response) -> None:
        """Record that the head has applied the step and may have issued the next ticket.

        If the head is lost before another server responds, its successor must be informed of both.
        """
        if server != HEAD or not isinstance(response, Values):
            return
        self._last_response_at = time.monotonic()
        self.tickets.complete_push()
        if response.ticket is not None:
            self.tickets.add(response.ticket)
        self._worker.global_step = self.tickets.record_step_count(response)

    def flush(self) -> None:
        """Wait until all gradients that were sent are applied."""
        if self._is_outstanding:
            self._is_outstanding = False
            self._receive()

    # Values.

    def pull(self) -> list[Array | None]:
        """Return the variables' newest values; None for tables."""
        self.flush()
        transfer = self.transfer
        requests = [messages.PullValues(self.tickets.fit, version, self._after) for version in transfer.versions]
        responses = self._client.request_all([(request, ()) for request in requests])
        head, _ = responses[HEAD]
        assert isinstance(head, Values)
        # The last steps may have been taken by other workers only.
        self._worker.global_step = self.tickets.record_step_count(head)
        transfer.receive(responses)
        # Copies: received arrays may be overwritten, or aliased by a backend.
        return [None if value is None else np.array(value) for value in transfer.values]


def _is_finite(array: Array) -> bool:
    # Checked on its squares, which BLAS sums in one fast pass; they may overflow even if the array is finite.
    flat = array.reshape(-1)
    if flat.dtype.itemsize > 2 and np.isfinite(np.dot(flat, flat)):
        return True
    return bool(np.isfinite(array).all())
