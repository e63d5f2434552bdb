"""One training step of a worker among parameter servers: gradients go out, new weights come back."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.errors import UnsupportedError
from phalanx.monitoring import timeline
from phalanx.parameter_server.client import HEAD, PlacedVariables
from phalanx.parameter_server.server_messages import (
    EpochOver,
    FitOver,
    PullValues,
    PushGradients,
    QueryJobOver,
    Rejoin,
    RequestSampleOrder,
    RequestTicket,
    Response,
    Ticket,
    Values,
    arrays_of,
    dtypes_of,
)
from phalanx.parameter_server.shard_packing import Kind, kind_of
from phalanx.parameter_server.shard_placement import rows as rows_of
from phalanx.parameter_server.table_rows import TableRows
from phalanx.runtime import progress
from phalanx.training.embedding_row_exchange import EmbeddingRowExchange
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.steps.gradient_merge import MergeBuffers

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

NO_EPOCH = -1
"""Epoch and batch of a ticket that no schedule has given."""
SERIAL_BITS = 60


class ParameterServerMerge:
    """Lets the servers make a step's update (`backends.engine.Merge`).

    In asynchronous training with several workers the answer to a step's gradients is awaited with the next step's, so
    that the way there, the update and the way back take place while this worker computes. It then computes with weights
    that lack its own last update, as they lack some of the others' anyway. A worker that is alone waits, and so trains
    as one process does. So does one that has tables of which single rows travel: with its gradients go the numbers of
    the rows that its next batch needs, and with the answer they come.

    Args:
        trainers: how many workers train; None: all.
    """

    updates = separate = True
    repeats = False
    gather = None

    def __init__(self, worker: ParameterServerWorker, trainers: int | None = None) -> None:
        self._worker = worker
        self._client = worker.client
        self._synchronous = worker.rules.synchronous
        self.exchange = None if self._synchronous else self._exchange
        self._trainers = trainers or worker.workers
        self._overlap = self._spare = False
        self._wire = None if worker.compression is None else worker.compression.wire
        self._buffers = MergeBuffers()
        self._placed: PlacedVariables | None = None
        self._rows: EmbeddingRowExchange | None = None
        self._clip: Callable[[Sequence[Array]], Sequence[Array]] | None = None
        self._values: list[Array | None] = []
        self._kinds: list[tuple[Kind, ...]] = []  # of what each server gets of gradients, those of tables excepted
        # The shards in arrays that are used from step to step, and these: of each server's room, and of what it sends.
        self._views: dict[int, tuple[Sequence[Array], list[Array]]] = {}
        self._came: dict[tuple[int, int], tuple[Sequence[memoryview], list[Array]]] = {}
        self._versions: list[int] = []
        self._outstanding = False
        self._tickets: deque[Ticket] = deque()
        self._phase = 0
        self._fit = -1
        self.era = 0
        self._ticket: Ticket | None = None
        self._held: dict[int, Ticket] = {}  # by serial: those whose step has not been applied, as far as we know
        self._pushed: deque[int] = deque()  # serials of those whose gradients are on their way
        self._finished = -1
        self._after = -1  # where the epoch is over: its last step's serial, others' parts of which may be on their way
        self._handed_out = (-1, 0)  # the epoch, and how many of its batches are known to be handed out
        self._made = (-1, 0)  # the epoch, and how many of its steps this worker has made
        self._heard_at = 0.0  # when the head was heard of last, by the monotonic clock

    def place(
        self, fit: int, placed: PlacedVariables, clip: Callable[[Sequence[Array]], Sequence[Array]] | None
    ) -> None:
        """The variables of the `fit` that begins, and how gradients are clipped where no server sees all of them: each
        worker's own, or, in synchronous training, the merged ones."""
        self._fit = fit
        self._placed = placed
        self._rows = EmbeddingRowExchange(self._client, fit, placed) if placed.tables else None
        asynchronous = not self._worker.rules.synchronous
        self._overlap = asynchronous and self._trainers > 1 and not placed.tables
        self._spare = self._overlap or (asynchronous and bool(placed.tables))
        self._clip = clip
        self._versions = [-1] * self._client.num_servers
        for server, groups in enumerate(placed.groups):
            of_tables = [placed.kind(shard) for shard in placed.tables_of_server[server]]
            self._client.share_memory(server, [*groups.kinds, *of_tables])
        self._kinds = [tuple(map(self._on_wire, groups.kinds)) for groups in placed.groups]
        self._views.clear()
        self._came.clear()
        self._outstanding = False
        self._after = -1
        self._tickets.clear()
        self._held.clear()
        self._pushed.clear()
        self._handed_out = self._made = (-1, 0)

    def rejoin(
        self, server: int, epoch: int = -1, steps: int = -1, order_of: int = -1, *, opened: bool = True
    ) -> Rejoin:
        """What a server must know of this worker when it comes back in the middle of the training."""
        return Rejoin(
            self._fit,
            self.era,
            epoch,
            self._versions[server],
            tuple(self._held.values()),
            self._handed_out[1] if self._handed_out[0] == epoch else 0,
            self._finished,
            self._worker.global_step,
            steps,
            order_of,
            opened,
            self._made[1] if self._made[0] == epoch else 0,
        )

    def abandon(self, ticket: Ticket) -> None:
        """No step will be made for this ticket."""
        self._is_over(self._held.pop(ticket.serial, None))

    def _hold(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)
        self._held[ticket.serial] = ticket
        known = self._handed_out[1] if self._handed_out[0] == ticket.epoch else 0
        self._handed_out = (ticket.epoch, max(known, ticket.batch + 1))

    def next_ticket(self, fit: int, epoch: int) -> Ticket | EpochOver | FitOver:
        """Begin the next step: with a ticket that came with an answer, else with one that is asked for."""
        if not self._tickets:
            self.flush()
        if not self._tickets:
            answer, _ = self._client.request(HEAD, RequestTicket(fit, epoch, self.era))
            assert isinstance(answer, Ticket | EpochOver | FitOver)
            if not isinstance(answer, Ticket):
                self._follow(answer)
                return answer
            self._after = -1
            self._hold(answer)
            if self._spare:
                # A second one: while a step's gradients are on their way, or to say which rows the next step needs, its
                # ticket must be here already.
                spare, _ = self._client.request(HEAD, RequestTicket(fit, epoch, self.era, wait=False))
                if isinstance(spare, Ticket):
                    self._hold(spare)
        self._ticket = self._tickets.popleft()
        self._phase = 0
        self._heard_at = time.monotonic()
        return self._ticket

    def put_back(self, ticket: Ticket) -> None:
        """The next step begins with this ticket, which was taken."""
        self._tickets.appendleft(ticket)

    def request_sample_order(self, fit: int, epoch: int) -> Array | EpochOver | FitOver:
        """The chief's order of the samples in the pass that began with this epoch; else why there is none."""
        answer, buffers = self._client.request(HEAD, RequestSampleOrder(fit, epoch, self.era))
        if isinstance(answer, EpochOver | FitOver):
            self._follow(answer)
            return answer
        return np.frombuffer(buffers[0], np.int64)

    def _follow(self, answer: EpochOver | FitOver) -> None:
        """To the end of an epoch, or into the chief's new era, if it has begun anew."""
        self._after = answer.newest if isinstance(answer, EpochOver) else -1
        if isinstance(answer, EpochOver) and answer.back_to >= 0:
            self.era = answer.era
            self._held.clear()
            self._handed_out = self._made = (-1, 0)

    def update(self, gradients: Sequence[Array]) -> list[Array]:
        """An update outside of epochs, without a ticket of the schedule: in asynchronous training, where nobody waits
        for it. Returns the variables' values, which nobody will overwrite."""
        if self._ticket is None or (self._ticket.fit, self._ticket.era) != (self._fit, self.era):
            number = self._worker.number
            # Unlike those of a former process of this task, whose updates the servers may remember.
            serial = -1 - secrets.randbits(SERIAL_BITS)
            self._ticket = Ticket(self._fit, NO_EPOCH, NO_EPOCH, (number,), number, serial, self.era)
        progress.enter("push")
        values = self._step(gradients, (), (), 1.0)
        return [value for value in values if value is not None]

    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        flats, views = self._buffers.next(layout)
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

    def _exchange(self, gradients: Sequence[Array], metrics: Sequence[Any]) -> list[Array | None]:
        """See `Merge.exchange`: asynchronous training merges nothing but gradients."""
        self._check_number(len(gradients))
        progress.enter("push")
        timeline.current.enter("push and pull")
        return self._step(gradients, (), (), 1.0)

    def _check_number(self, gradients: int) -> None:
        """Raises: UnsupportedError unless there is one for each variable."""
        variables = len(self._require_placed().variables)
        if gradients != variables:
            raise UnsupportedError(
                f"The model has {gradients} trainable variables now, and had {variables} when fit() began. Create all "
                f"variables before, or call fit() again."
            )

    def total(self, own: Array, share: float) -> Array:
        """See `Merge.total`."""
        layout = StepLayout.of([own], [MergeWeight.ONE])
        return np.array(layout.cut(self(layout, [own], share))[0])

    @property
    def rows(self) -> EmbeddingRowExchange:
        """Where there are tables: what comes and goes of them."""
        assert self._rows is not None, "there are tables"
        return self._rows

    def upcoming(self) -> Ticket | None:
        """The ticket of the step after this one, if it is at hand."""
        return self._tickets[0] if self._tickets else None

    def drop_upcoming(self) -> None:
        """That ticket has no batch."""
        self._tickets.popleft()

    def pull_tables(self) -> list[Array]:
        """The tables, whole."""
        self.flush()
        return self.rows.pull_tables()

    def pull(self) -> list[Array | None]:
        """The variables' newest values; None for tables."""
        self.flush()
        answers = self._client.request_all(
            [(PullValues(self._fit, version, self._after), ()) for version in self._versions]
        )
        head, _ = answers[HEAD]
        assert isinstance(head, Values)
        self._worker.global_step = head.step  # others may have made the last steps alone
        self._take(answers)
        # Copies: what came may be overwritten, or be aliased by a backend.
        return [None if value is None else np.array(value) for value in self._values]

    def versions(self) -> list[int]:
        """Of the values that `pull` last brought, on each server that has some."""
        placed = self._require_placed()
        return [version for version, shards in zip(self._versions, placed.dense_of_server, strict=True) if shards]

    @property
    def values(self) -> list[Array | None]:
        """The variables' values as they came last: another list whenever some are new."""
        return self._values

    def flush(self) -> None:
        """Wait until what was sent has been applied."""
        if self._outstanding:
            self._outstanding = False
            self._receive()

    def _step(
        self, gradients: Sequence[Array], extras: Sequence[Array], weights: Sequence[MergeWeight], share: float
    ) -> list[Array | None]:
        assert self._ticket is not None, "a step begins with a ticket"
        if gradients and self._clip is not None:
            gradients = self._clip(self._merged(gradients, share) if self._synchronous else gradients)
        if not self._synchronous:
            if gradients:
                self.flush()
                self._send(gradients, (), (), 1.0)
                self._outstanding = True
                if not self._overlap:
                    self.flush()
            return [*(self._values if gradients else ()), *extras]
        self._send(gradients, extras, weights, share)
        merged = self._receive()
        return [*(self._values if gradients else ()), *merged]

    def _merged(self, gradients: Sequence[Array], share: float) -> list[Array]:
        """The mean over the workers, which the first server forms: pushed by all of them, it is its own mean."""
        self._send((), gradients, [MergeWeight.SHARE] * len(gradients), share)
        merged = self._receive()
        return [mean.reshape(own.shape) for mean, own in zip(merged, gradients, strict=True)]

    def _receive(self) -> list[Array]:
        """The servers' answers to the step that was sent first; returns the merged extras."""
        return self._take(self._client.receive_all(on_response=self._note_answer))

    def _note_answer(self, server: int, answer: Response) -> None:
        """The head has applied the step, and may have given the ticket of the next one. If it is lost before another
        server has answered, its successor must hear of both."""
        if server != HEAD or not isinstance(answer, Values):
            return
        self._heard_at = time.monotonic()
        if self._pushed:
            self._finished = self._pushed.popleft()
            self._is_over(self._held.pop(self._finished, None))
        if answer.ticket is not None:
            self._hold(answer.ticket)
        self._worker.global_step = answer.step

    def _is_over(self, ticket: Ticket | None) -> None:
        """Nothing more is to be done for this ticket of the schedule."""
        if ticket is not None:
            epoch, made = self._made
            self._made = (ticket.epoch, made + 1 if epoch == ticket.epoch else 1)

    def _send(
        self, gradients: Sequence[Array], extras: Sequence[Array], weights: Sequence[MergeWeight], share: float
    ) -> None:
        """To each server its shards' gradients; the rest to the head."""
        if self._client.num_servers > 1 and time.monotonic() - self._heard_at > self._client.timeout_s / 2:
            # This process was stopped, or very slow: the head alone knows whether it was left out, and the others would
            # apply its old gradients.
            self._client.request(HEAD, QueryJobOver())
        assert self._ticket is not None
        if gradients:
            self._pushed.append(self._ticket.serial)
        rows = self._rows if gradients else None
        travelling = rows.of_step(gradients) if rows is not None else gradients
        sent, finite = [], True
        for server in range(self._client.num_servers):
            wanted = rows.wanted(server) if rows is not None else []
            room, count = self._filled(server, travelling, [*wanted, *extras] if server == HEAD else wanted)
            finite = finite and (not self._worker.rules.refuse_nan or all(map(_is_finite, room[:count])))
            sent.append((room, bool(wanted)))
        merged = tuple([weight.value for weight in weights])
        for server, (room, wants) in enumerate(sent):
            question = PushGradients(
                self._ticket,
                self._phase,
                bool(gradients),
                finite,
                share,
                dtypes_of(room),
                merged if server == HEAD else (),
                wants_rows=wants,
            )
            self._client.send(server, question, room)
        self._phase += 1

    def _filled(
        self, server: int, gradients: Sequence[Array | TableRows], more: Sequence[Array]
    ) -> tuple[list[Array], int]:
        """What goes to a server, where it lies until it has been answered: its part of the gradients, then `more`. And
        how many of these arrays are of gradients."""
        placed = self._require_placed()
        parts = placed.cut_tables(gradients, server) if placed.tables and gradients else []
        kinds = self._kinds[server] if gradients else ()
        of_tables = [kind for part in parts for kind in (kind_of(part.numbers), self._on_wire(kind_of(part.values)))]
        room = self._client.send_buffers(server, (*kinds, *of_tables, *map(kind_of, more)))
        if gradients:
            views = self._views.get(server)
            if views is None or views[0] is not room:
                views = self._views[server] = room, placed.groups[server].cut(room[: len(kinds)])
            for view, shard in zip(views[1], placed.dense_of_server[server], strict=True):
                gradient = gradients[shard.variable]
                assert not isinstance(gradient, TableRows), "of a table"
                np.copyto(view, rows_of(gradient, shard), casting="unsafe")
        behind = [*(array for part in parts for array in part), *more]
        for place, array in zip(room[len(kinds) :], behind, strict=True):
            np.copyto(place, array, casting="unsafe")
        return room, len(kinds) + len(of_tables)

    def _on_wire(self, kind: Kind) -> Kind:
        """Of gradients of a kind."""
        shape, dtype = kind
        return kind if self._wire is None or dtype.itemsize <= self._wire.itemsize else (shape, self._wire)

    def _take(self, answers: Sequence[Any]) -> list[Array]:
        """Keep the values that the servers sent; returns the merged extras of the head."""
        placed = self._require_placed()
        parts, rows, extras = [], [], []
        for server, (answer, buffers) in enumerate(answers):
            assert isinstance(answer, Values)
            if answer.note:
                logger.warning("An update of this worker: %s.", answer.note)
            if answer.shards or not placed.dense_of_server[server]:  # else newer ones are still to come
                self._versions[server] = answer.version
            parts.append(self._values_from(server, answer, buffers) if answer.shards else [])
            more = arrays_of(buffers[answer.shards :], answer.dtypes[answer.shards :])
            rows.append(more[: answer.rows])
            extras += more[answer.rows :]
        self._keep(parts)
        if any(rows):
            self.rows.came(rows)
        return extras

    def _values_from(self, server: int, answer: Values, buffers: Sequence[memoryview]) -> list[Array]:
        """The server's shards, tables excepted."""
        known = self._came.get((server, answer.place))
        if known is None or known[0] is not buffers:
            arrays = arrays_of(buffers[: answer.shards], answer.dtypes[: answer.shards])
            known = buffers, self._require_placed().groups[server].cut(arrays)
            if answer.lengths:
                self._came[server, answer.place] = known
        return known[1]

    def _keep(self, parts: list[list[Array]]) -> None:
        placed = self._require_placed()
        if all(len(part) == len(shards) for part, shards in zip(parts, placed.dense_of_server, strict=True)):
            self._values = placed.join(parts)
        elif any(parts):
            old = [placed.cut(self._values, server) for server in range(len(parts))]  # of tables there are none
            self._values = placed.join([part or before for part, before in zip(parts, old, strict=True)])

    def _require_placed(self) -> PlacedVariables:
        assert self._placed is not None, "the model is placed before the first step"
        return self._placed


def _is_finite(array: Array) -> bool:
    # Over its squares, which BLAS sums in one quick pass; they may overflow where the array does not.
    flat = array.reshape(-1)
    if flat.dtype.itemsize > 2 and np.isfinite(np.dot(flat, flat)):
        return True
    return bool(np.isfinite(array).all())
