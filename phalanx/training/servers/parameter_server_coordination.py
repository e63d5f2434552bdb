"""Coordinates a `fit` of workers with parameter servers, by the schedule of the first server, the *head*.

An epoch is one pass over the data by all workers: each batch is trained on once, by the worker that takes its ticket
first. The chief opens the epochs, and its history, logs and checkpoints are the job's. A restarted chief may go back to
an earlier epoch; the others follow it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from phalanx.engines import step_logs
from phalanx.keras_compat import model_state
from phalanx.keras_compat.callback_bases import ChiefCallback
from phalanx.monitoring import timeline
from phalanx.parameter_server.client.parameter_client import HEAD, ParameterServerClient
from phalanx.parameter_server.server_messages import (
    ChiefAlive,
    CollectReports,
    EndFit,
    EpochOver,
    EpochReport,
    FitOver,
    OpenEpoch,
    RequestStop,
    Ticket,
    ValidationLogs,
    Values,
    arrays_of,
)
from phalanx.runtime import progress
from phalanx.training import callback_hooks, chief_state_sync
from phalanx.training.checks import same_program
from phalanx.training.evaluation import evaluate_by_program
from phalanx.training.fit_state import FitState
from phalanx.training.servers import validation_logs
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.remote_model import RemoteModel, count_steps
from phalanx.training.servers.ticket_batches import OrderUnavailableError, TicketBatch, TicketBatches
from phalanx.training.steps.parameter_server_stepper import ParameterServerStepper

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two messages of a chief that validates."""


class ValidationHeartbeat(ChiefCallback):
    """Tells the waiting workers that the chief's validation progresses. As long as it does, they wait for it."""

    def __init__(self, client: ParameterServerClient) -> None:
        super().__init__()
        self._client = client
        self._sent_at = 0.0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() > self._sent_at + HEARTBEAT_INTERVAL_S:
            self._client.request(HEAD, ChiefAlive())
            self._sent_at = time.monotonic()


class FitRejoin:
    """State that a server restarted during a `fit` must receive again.

    Attributes:
        epoch: Running epoch.
        is_opened: Whether it has been opened on this worker.
        steps: Number of batches in it; None if unknown.
        order: Epoch in which the running pass began, and the order of its samples; chief only.
        report: Report of this worker on the last epoch, until the chief is known to have it.
        validation: Results of the last validation; chief only.
        is_stop_requested: Whether this worker has asked the chief to stop.
    """

    def __init__(self, fit: int, worker: ParameterServerWorker, remote_model: RemoteModel) -> None:
        self.epoch = 0
        self.is_opened = False
        self.steps: int | None = None
        self.order: tuple[int, Array | None] = (-1, None)
        self.report: tuple[EpochReport, list[Array]] | None = None
        self.validation: tuple[ValidationLogs, list[Array]] | None = None
        self.is_stop_requested = False
        self._fit = fit
        self._worker = worker
        self._remote_model = remote_model

    def requests(self, server: int) -> list[tuple[Any, Sequence[Array]]]:
        """This worker's position in the schedule, and what the head would have received since."""
        steps = -1 if self.steps is None else self.steps
        pass_began, order = self.order
        has_order = self._worker.is_chief and server == HEAD and order is not None
        rejoin = self._remote_model.merge.rejoin(
            server, self.epoch, steps, pass_began if has_order else -1, is_epoch_opened=self.is_opened
        )
        messages: list[tuple[Any, Sequence[Array]]] = [(rejoin, [order] if has_order and order is not None else [])]
        messages += self._remote_model.variables.requests_to_repeat()
        if server != HEAD:
            return messages
        if self._worker.is_chief:
            messages += self._worker.requests_to_repeat()
        if self.report is not None:
            messages.append(self.report)
        if self.validation is not None:
            messages.append(self.validation)
        if self.is_stop_requested:
            messages.append((RequestStop(self._fit, stop=True), []))
        return messages


class ParameterServerCoordination:
    """Coordinates one `fit` on one worker; see `Coordination`.

    Args:
        fit: Number of this `fit` call.
        evaluate: Keras's `evaluate` method, or a custom one.

    Attributes:
        rejoin: State that a restarted server must receive again.
    """

    steps_per_group = 1

    def __init__(
        self,
        fit: int,
        remote_model: RemoteModel,
        worker: ParameterServerWorker,
        state: FitState,
        batches: TicketBatches,
        evaluate: Any,
    ) -> None:
        self._fit = fit
        self._remote_model = remote_model
        self._worker = worker
        self._state = state
        self._batches = batches
        self._source = batches.source
        self._evaluate = evaluate
        self.rejoin = FitRejoin(fit, worker, remote_model)
        state.stepper = ParameterServerStepper(remote_model, batches)
        self._first_epoch: int | None = None  # None: the chief is in a later `fit`
        self._epoch_end: EpochOver | FitOver | None = None  # why the running epoch has no more steps
        self._epoch = _EpochCount()
        # Whether no further epoch begins: the chief has decided so, or this `fit` has ended elsewhere.
        self._is_stopping = False
        self._is_layer_state_sent = False  # whether the head has the state of the chief's layers

    def begin(self) -> None:
        """See `Coordination.begin`."""
        state, remote_model = self._state, self._remote_model
        state.callbacks.on_train_begin()
        first_epoch = remote_model.model._initial_epoch or state.arguments.initial_epoch
        epoch = remote_model.attach(self._fit, first_epoch, state.callbacks)
        if epoch is None:
            logger.warning("The other workers have finished this fit() and are in a later one; continuing there.")
            remote_model.is_training = False
            self._is_stopping = True
            return
        self._first_epoch = state.epoch = self.rejoin.epoch = epoch
        self._synchronize_state()
        # Last: from here on, a restarted server receives this worker's position in the schedule. Before that, it
        # receives only the variables (`RemoteVariables.begin`).
        self._worker.client.reconnection.rejoin_requests = self.rejoin.requests

    def _synchronize_state(self) -> None:
        """Compare the data with the chief's, and receive the state that servers do not train."""
        worker, model = self._worker, self._remote_model.model
        layer_state = self._remote_model.engine.layer_state()
        if worker.is_chief:
            same_program.send_input(self._source.sharded, worker, self._fit)
            chief_state_sync.send_state(worker, model, self._fit, layer_state)
        else:
            same_program.compare_input_with_chief(self._source.sharded, worker, self._fit)
            chief_state_sync.receive_state(worker, model, self._fit, layer_state)
        self._batches.passes.begin()
        self._is_layer_state_sent = True

    def is_over(self) -> bool:
        """See `Coordination.is_over`."""
        state, epochs = self._state, self._state.arguments.epochs
        if self._is_stopping or self._first_epoch is None:
            return True
        # The chief runs its epochs without asking. The others ask before every epoch except their first, because the
        # chief may end the `fit`, or go back, where they expect the next one.
        while state.epoch >= epochs or (state.epoch > self._first_epoch and not self._worker.is_chief):
            answer = self._await_chief()
            if not self._return_to_epoch(answer):
                return isinstance(answer, FitOver) or (state.epoch >= epochs and not isinstance(answer, Ticket))
        return False

    def _await_chief(self) -> Ticket | EpochOver | FitOver:
        """The chief's next action. It ends a `fit` when its callbacks have finished with the weights, perhaps before
        the last epoch; or it begins an epoch, perhaps one that it had begun before it was restarted."""
        if self._worker.is_chief:
            return FitOver()
        merge = self._remote_model.merge
        answer = merge.next_ticket(self._fit, self._state.epoch)
        if isinstance(answer, Ticket):
            # The first step of the epoch begins with it: an issued ticket must be used or returned.
            merge.tickets.put_back(answer)
        return answer

    def _return_to_epoch(self, answer: Ticket | EpochOver | FitOver | None) -> bool:
        """Go back to the epoch with which a restarted chief continues, if the answer says so."""
        if not isinstance(answer, EpochOver) or answer.resume_epoch < 0:
            return False
        logger.warning("The chief was restarted; continuing with epoch %d.", answer.resume_epoch + 1)
        self._synchronize_state()
        self._source.restart()
        self._state.epoch = answer.resume_epoch
        return True

    def begin_epoch(self) -> bool:
        """See `Coordination.begin_epoch`."""
        epoch, remote_model = self._state.epoch, self._remote_model
        progress.report("pull", epoch=epoch)
        timeline.current.enter("pull", epoch=epoch)
        if not self._worker.is_chief:
            remote_model.pull()
            count_steps(remote_model, self._worker)
        elif epoch == self._first_epoch:  # otherwise it pulled when the last one ended
            remote_model.pull()
            remote_model.variables.record_values(tables=False)
        timeline.current.leave()
        return True

    @contextmanager
    def epoch_batches(self) -> Iterator[None]:
        """See `Coordination.epoch_batches`."""
        source, remote_model = self._source, self._remote_model
        # Before the epoch opens: the others pull when they receive their first ticket, which follows `OpenEpoch`.
        remote_model.send_changes()
        self.rejoin.epoch, self.rejoin.is_opened = self._state.epoch, True
        self._metrics_start = remote_model.engine.metric_rules.values()
        self._epoch, self._epoch_end = _EpochCount(source.sharded.num_batches or 0), None
        try:
            self.rejoin.steps = source.start_epoch(self._state.epoch)
        # The epoch no longer exists. The body runs without a batch, because `next_batch` finds the answer immediately.
        except OrderUnavailableError as reason:
            self._epoch_end = reason.answer
            yield
            return
        if self._worker.is_chief:
            self._open_epoch()
        self._batches.begin()
        model_state.set_mode(remote_model.model, training=True)
        remote_model.engine.begin()
        try:
            yield
            model_state.set_mode(remote_model.model, training=False)
        finally:
            # Even after an exception: the response to an update in flight must be received before the next request.
            try:
                remote_model.merge.flush()
            finally:
                remote_model.leave_steps()
                timeline.current.leave()
            source.end_epoch(self._epoch.length or self._epoch.steps)

    def _open_epoch(self) -> None:
        """As the chief, allow the servers to issue tickets."""
        worker, epoch = self._worker, self._state.epoch
        if self._remote_model.model.stop_training:
            # Set by `on_epoch_begin`. Keras takes a step before it checks; of two, another worker may begin the second.
            self.rejoin.steps = 1
        steps = self.rejoin.steps
        layer_state = self._remote_model.engine.layer_state()
        order, self._batches.drawn_order = self._batches.drawn_order, None
        if order is not None:
            self.rejoin.order = (epoch, order)
        if not self._is_layer_state_sent:
            chief_state_sync.send_layer_state(worker, self._fit, layer_state)
        # Before the epoch opens, so that a worker that rejoins in it finds the state that the epoch began with.
        self._is_layer_state_sent = not layer_state  # it changes in the following steps
        self._batches.passes.open()
        opening = OpenEpoch(self._fit, epoch, -1 if steps is None else steps)
        worker.client.request(HEAD, opening, [] if order is None else [order])

    def next_batch(self) -> TicketBatch | None:
        """See `Coordination.next_batch`."""
        while self._epoch_end is None:
            timeline.current.enter("data")
            ticket = self._batches.next(self._state.epoch)
            if not isinstance(ticket, Ticket):
                if isinstance(ticket, EpochOver) and ticket.steps:
                    # The length was unknown; the head has seen the end of the data.
                    self._epoch.length = ticket.steps
                self._epoch_end = ticket
                break
            if self._epoch.steps == 0 and not self._worker.is_chief:
                self._pull_chief_changes()
            self.rejoin.report = None  # the chief has opened this epoch, so it has the report
            batch = self._batches.batch(ticket)
            timeline.current.leave()
            if batch is not None:
                return batch
        return None

    def _pull_chief_changes(self) -> None:
        """Pull what the chief's callbacks have changed; the chief has sent it and opened the epoch."""
        engine, values = self._remote_model.engine, self._remote_model.merge.pull()
        engine.end()
        self._remote_model.variables.assign(values)
        engine.begin()

    def begin_group(self) -> None:
        """See `Coordination.begin_group`."""
        engine = self._remote_model.engine
        if engine.variables_are_current:  # a callback may have read or changed them
            engine.end()
            if self._state.has_batch_hooks:
                self._remote_model.send_learning_rate()
            engine.begin()

    def train_step(self, batch: TicketBatch) -> TicketBatch:
        """See `Coordination.train_step`."""
        count, epoch = self._epoch, self._state.epoch
        progress.report("gradients", epoch=epoch, step=count.steps)
        timeline.current.enter("forward/backward", epoch=epoch, step=count.steps)
        self._state.stepper.train(batch)
        timeline.current.leave()
        self._worker.client.is_starting = False
        count.samples += batch.size
        count.steps += 1
        return batch

    def end_group(self, step: int) -> bool:
        """See `Coordination.end_group`."""
        if self._worker.is_chief and self._remote_model.model.stop_training and not self._batches.is_ended:
            self.rejoin.steps = self._batches.end_epoch(self._state.epoch).steps
        return False

    def epoch_logs(self) -> dict[str, Any] | None:
        """See `Coordination.epoch_logs`. The chief's logs cover all workers."""
        if self._return_to_epoch(self._epoch_end):
            return None
        remote_model, model, samples = self._remote_model, self._remote_model.model, self._epoch.samples
        remote_model.mark_stale()
        # In synchronous training metrics were merged with every step; otherwise each worker counted its own batches.
        engine = remote_model.engine
        if not self._worker.rules.synchronous:
            self._report_metrics(engine.metric_rules.increments(engine.metric_rules.values(), self._metrics_start))
        if self._worker.is_chief:
            reads = callback_hooks.reads_weights_at_epoch_ends(self._state.callbacks)
            remote_model.pull_after_epoch(tables=reads)
        else:
            count_steps(remote_model, self._worker)
        counted = engine.metric_rules.increments(engine.metric_rules.values(), self._metrics_start)
        silent = step_logs.metrics_without_updates(model, counted)
        # With Keras's own steps, all logs are results.
        has_own = samples and model_state.logs_differ_from_metrics(model, "train_step")
        own = model_state.flat_logs(engine.logs()) if has_own else {}
        chosen = step_logs.choose_logs(own, model.get_metrics_result, silent, engine.origins)
        return model_state.plain_logs(chosen)

    def _report_metrics(self, values: list[Array]) -> None:
        """Report what this worker's metrics have counted; the chief sets its metrics to the sums of all reports."""
        worker, epoch, engine = self._worker, self._state.epoch, self._remote_model.engine
        rules = engine.metric_rules
        weights = tuple(weight.value for weight in rules.weights_over_steps)
        dtypes = tuple(value.dtype.name for value in values)
        report = EpochReport(self._fit, epoch, self._epoch.samples, self._epoch.steps, dtypes, weights)
        worker.client.request(HEAD, report, values)
        self.rejoin.report = (report, values)
        if not worker.is_chief:
            return
        answer, buffers = worker.client.request(HEAD, CollectReports(self._fit, epoch))
        assert isinstance(answer, Values)
        if answer.note:
            logger.warning("Epoch %d: %s.", epoch + 1, answer.note)
        worker.global_step = self._remote_model.merge.tickets.record_step_count(answer)
        merged = [
            value.reshape(variable.shape)
            for variable, value in zip(rules.variables, arrays_of(buffers, answer.dtypes), strict=True)
        ]
        engine.metric_rules.set_values(rules.add_start(merged, self._metrics_start))

    def evaluate(self) -> dict[str, Any] | None:
        """See `Coordination.evaluate`. Only the chief evaluates; the others wait for its logs."""
        worker, merge, epoch = self._worker, self._remote_model.merge, self._state.epoch
        if not worker.is_chief:
            received = validation_logs.receive(merge, self._fit, epoch)
            if isinstance(received, dict):
                return received
            return None if self._return_to_epoch(received) else {}
        self._remote_model.pull_tables()
        logs = evaluate_by_program(self._evaluate, self._state.arguments, self._state.callbacks)
        if worker.workers > 1:
            # Stored before it is sent: if the head is lost meanwhile, its successor gets it with the rejoin.
            self.rejoin.validation = validation_logs.message(merge, self._fit, epoch, logs)
            worker.client.request(HEAD, *self.rejoin.validation)
        return logs

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any] | None:
        """See `Coordination.merge_logs`."""
        # A worker without a step has counted nothing. Keras turns that into 0, the best of all losses.
        return logs if self._epoch.steps or self._worker.is_chief else None

    def end_epoch(self) -> None:
        """See `Coordination.end_epoch`."""
        self._state.epoch += 1
        self._is_stopping = isinstance(self._epoch_end, FitOver)
        if self._worker.is_chief:  # other workers see only a part
            others_stop = self._worker.client.query_head(RequestStop(self._fit, stop=False))
            self._is_stopping |= others_stop or bool(self._remote_model.model.stop_training)

    @contextmanager
    def end(self) -> Iterator[None]:
        """See `Coordination.end`."""
        state, remote_model, worker = self._state, self._remote_model, self._worker
        if self._first_epoch is None:
            yield
            return
        model = remote_model.model
        exchanged = worker.is_chief and remote_model.variables.are_averages_in_weights()
        if not exchanged:
            remote_model.send_changes()
        # After this, the others leave `is_over` and pull the final weights, so the changes above must be sent first.
        if worker.is_chief:
            worker.client.request(HEAD, EndFit(self._fit))
        else:
            count_steps(remote_model, worker)
        remote_model.pull_final()
        if state.arguments.epochs > self._first_epoch:
            if not state.logs and not worker.is_chief:
                text = "%s trained no batch of this fit(), and has no history: the others had taken all of them."
                logger.warning(text, worker.client.identity.task)
            if model.optimizer.use_ema:
                # On the chief too: where a callback has swapped the averages, its own averages differ by rounding.
                remote_model.pull_optimizer()
                if chief_state_sync.are_chiefs_averages_in_weights(worker, self._fit, exchanged):
                    # As in one process: a `fit` that ends early finds the values from `SwapEMAWeights` in the averages.
                    remote_model.variables.reset_averages()
            model.optimizer.finalize_variable_values(model.trainable_weights)
        if worker.workers == 1 or not callback_hooks.may_set_weights_at_train_end(state.callbacks):
            yield
            return
        with chief_state_sync.sharing_final_weights(worker, self._fit, remote_model.variables.variables):
            yield


class _EpochCount:
    """This worker's counts in the running epoch.

    Attributes:
        length: Number of steps of all workers in the epoch; 0 if unknown.
        steps: Number of steps that this worker has taken.
        samples: Number of samples in these steps.
    """

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self.steps = self.samples = 0
