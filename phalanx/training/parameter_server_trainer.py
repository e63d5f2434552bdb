"""`fit`, `evaluate` and `predict` of a Keras model on one worker among parameter servers.

The walk of one training step: a ticket from the first server -> the batch that it names -> the engine's gradients ->
the servers, where the optimizer runs -> new weights. Arguments and results are those of the Keras methods;
`batch_size` is what one update is made of: in asynchronous training one worker's batch, in synchronous all workers'.

An epoch is one pass over the data by all workers together: each batch is trained on once, by whoever takes it first.
The chief opens the epochs, and its history, logs and checkpoints are the job's; on other workers `fit` returns their
own part of it.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
from keras.src.utils import io_utils
from keras.src.utils.python_utils import pythonify_logs

from phalanx.data import LocalBatch, ShardedInput, shard_input
from phalanx.data.batch_split import cut
from phalanx.data.sharded_input import BatchNotAvailableError
from phalanx.data.shuffling import Shuffling
from phalanx.engines import make_engine
from phalanx.engines.engine import Batch, Engine
from phalanx.errors import DisagreementError, UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.monitoring import timeline
from phalanx.parameter_server.client import HEAD, ParameterServerClient
from phalanx.parameter_server.server_messages import (
    ChiefAlive,
    CollectReports,
    EndEpoch,
    EndFit,
    EpochOver,
    EpochReport,
    FitOver,
    HoldSteps,
    NoBatch,
    OpenEpoch,
    RequestStop,
    Ticket,
    Values,
    arrays_of,
)
from phalanx.runtime import progress
from phalanx.training import callback_list as callback_lists
from phalanx.training import chief_state_sync, joint_batches
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.remote_variables import RemoteVariables, to_host
from phalanx.training.sparse_embeddings import EmbeddingTable, SparseEmbeddings, choose, find_tables
from phalanx.training.steps.parameter_server_step import ParameterServerMerge
from phalanx.training.steps.stepper import count_steps

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_SETS_ITS_WEIGHTS = (keras.layers.SpectralNormalization,)
AGREEMENT_S = 2.0
"""How long the servers may take to apply what is still on its way. One that a lost worker's last update did not reach
never has as many as the others."""
SIGN_S = 1.0
"""Between two signs of life of a chief that validates."""


class _SignsOfLife(callback_lists.ChiefCallback):
    """While the chief validates, the others wait for the next epoch: however long it takes, as long as it goes on."""

    def __init__(self, client: ParameterServerClient) -> None:
        super().__init__()
        self._client = client
        self._told_at = 0.0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() > self._told_at + SIGN_S:
            self._client.request(HEAD, ChiefAlive())
            self._told_at = time.monotonic()


class _NoOrder(Exception):
    """The chief has gone back, or has ended the `fit`: it shuffles for no such epoch."""

    def __init__(self, answer: EpochOver | FitOver) -> None:
        super().__init__()
        self.answer = answer


class ParameterServerTrainer:
    """Trains one compiled Keras model with parameter servers.

    Args:
        plain: Keras's own method of a name, bound to the model.
    """

    def __init__(self, model: Any, worker: ParameterServerWorker, plain: Callable[[str], Callable[..., Any]]) -> None:
        self._model = model
        self._worker = worker
        self._client = worker.client
        self._plain = plain
        self._merge = ParameterServerMerge(worker)
        self._engine: Engine | None = None
        self._source: ShardedInput | None = None
        self._served: RemoteVariables | None = None
        self._sample: Batch | None = None  # the first batch
        self._rows: SparseEmbeddings | None = None
        self._ahead: dict[int, LocalBatch] = {}  # by serial of the ticket: batches of steps to come
        self._stale = self._stale_slots = False  # whether the servers have newer tables, and optimizer state of them
        self._training = False
        self._peeked = False
        self._new_order: Array | None = None
        self._announced = False
        self._apart: list[int] = []  # how far the servers' versions are apart for good, as has been found
        self._tells_state = False  # whether layers may have changed something since the chief last told of it
        # What a head that comes back must hear once more.
        self._epoch = 0
        self._opened = False
        self._steps: int | None = None
        self._order: tuple[int, Array | None] = (-1, None)  # of the chief: the order of the pass that began then
        self._reported: tuple[EpochReport, list[Array]] | None = None
        self._stop_asked_in = -1  # the `fit` for whose end this worker has asked

    # The public methods, as Keras has them.

    def fit(self, **arguments: Any) -> Any:
        """Takes `FitArguments`."""
        model, worker = self._model, self._worker
        if worker.in_function:
            raise UnsupportedError(
                "fit() was called inside a function that a ClusterCoordinator has scheduled. It trains with all "
                "workers at once: call optimizer.apply() there, or fit() in the program itself, on every task."
            )
        model._assert_compile_called("fit")
        call = FitArguments(**arguments)
        fit = worker.next_fit()
        source = shard_input(
            call.x,
            call.y,
            call.sample_weight,
            batch_size=call.batch_size,
            steps_per_epoch=call.steps_per_epoch,
            shuffle=call.shuffle,
            class_weight=call.class_weight,
            rank=0,
            world_size=1,
            shuffling=Shuffling(worker.is_chief, peeked=lambda: self._peeked, told=partial(self._chiefs_order, fit)),
            seed=zlib.crc32(f"{worker.seed} {fit}".encode()),
        )
        self._source = source
        engine = self._prepare(source)
        signs = [_SignsOfLife(self._client)] if worker.workers > 1 and call.validation_data is not None else []
        callbacks = callback_lists.make_list(
            call.callbacks,
            more=signs,
            model=model,
            chief=worker.is_chief,
            replicas=worker.workers,
            verbose=call.verbose,
            epochs=call.epochs,
            steps=source.num_batches,
            history=True,
        )
        self._announce(call.verbose)
        model.stop_training = False
        callbacks.on_train_begin()
        first_epoch = self._attach(fit, model._initial_epoch or call.initial_epoch, callbacks)
        if first_epoch is None:
            logger.warning("The others have finished this fit() already, and are in a later one: going on there.")
            self._training = False
            callbacks.on_train_end()
            return model.history
        logs: dict[str, Any] = {}
        epoch = first_epoch
        while True:
            if epoch >= call.epochs or (epoch > first_epoch and not worker.is_chief):
                answer = self._await_end(fit, epoch)
                if (back_to := self._goes_back(fit, source, answer)) is not None:
                    epoch = back_to
                    continue
                if isinstance(answer, FitOver) or (epoch >= call.epochs and not isinstance(answer, Ticket)):
                    break
            progress.report("pull", epoch=epoch)
            timeline.current.enter("pull", epoch=epoch)
            if not worker.is_chief:
                self._assign(self._merge.pull())
                count_steps(model.optimizer, worker.global_step)
            elif epoch == first_epoch:  # else it has pulled when the last one ended
                self._assign(self._merge.pull())
                self._require_served().record_values(tables=False)
            timeline.current.leave()
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            self._tell_changes()
            samples, answer = self._train_epoch(fit, epoch, source, engine, callbacks)
            if (back_to := self._goes_back(fit, source, answer)) is not None:
                epoch = back_to
                continue
            validates = call.validation_data is not None and model._should_eval(epoch, call.validation_freq)
            self._stale = self._stale_slots = self._rows is not None
            logs = self._finish_epoch(fit, epoch, samples, engine, looks=callback_lists.looks_at_weights(callbacks))
            if validates and worker.is_chief:
                self._pull_tables()
                found = self._validate(call, callbacks)
                logs |= {f"val_{name}": value for name, value in found.items()}
            logs = self._logs_of_all(logs)
            callbacks.on_epoch_end(epoch, logs)
            epoch += 1
            if self._stops_after(answer):
                break
        self._tell_changes()
        if worker.is_chief:
            self._client.request(HEAD, EndFit(fit))
        else:
            count_steps(model.optimizer, worker.global_step)
        self._assign(self._merge.pull())
        if self._stale_slots and worker.is_chief:
            self._pull_optimizer()
        self._pull_tables()
        self._training = False
        if call.epochs > first_epoch:
            if model.optimizer.use_ema and not worker.is_chief:
                self._pull_optimizer()
            model.optimizer.finalize_variable_values(model.trainable_weights)
        self._end_training(fit, callbacks, logs)
        self._client.rejoin_requests = None
        return model.history

    def _end_training(self, fit: int, callbacks: Any, logs: dict[str, Any]) -> None:
        """Let the callbacks have the last word: what the chief's make of the weights is everybody's, and what those of
        the others make of them, by their own part of the logs, nobody's."""
        if self._worker.workers == 1 or not callback_lists.may_set_weights_at_the_end(callbacks):
            callbacks.on_train_end(logs=logs)
            return
        variables = self._require_served().variables
        before = [np.array(to_host(variable)) for variable in variables]
        callbacks.on_train_end(logs=logs)
        changed = {
            number: variable
            for number, (variable, value) in enumerate(zip(variables, before, strict=True))
            if not np.array_equal(to_host(variable), value)
        }
        if self._worker.is_chief:
            chief_state_sync.send_final_weights(self._worker, fit, changed)
            return
        chiefs = chief_state_sync.receive_final_weights(self._worker, fit)
        for number in {*changed, *chiefs}:
            variables[number].assign(chiefs.get(number, before[number]))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's own, on this worker, with the servers' newest weights."""
        with self._refreshed():
            return self._plain("evaluate")(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's own, on this worker, with the servers' newest weights."""
        with self._refreshed():
            return self._plain("predict")(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._refreshed():
            return self._plain("test_on_batch")(*args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._refreshed():
            return self._plain("predict_on_batch")(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "train_on_batch() is not supported with parameter servers: who trains on which batch is decided by the "
            "servers. Use fit(), with a callback for what is to happen between batches."
        )

    # Before the first step.

    def _prepare(self, source: ShardedInput) -> Engine:
        if len(model_state.optimizers(self._model)) > 1:
            raise UnsupportedError(
                "The model has several optimizers; on parameter servers one optimizer trains all variables."
            )
        normalises = next((x for x in self._model._flatten_layers() if isinstance(x, _SETS_ITS_WEIGHTS)), None)
        if normalises is not None:
            raise UnsupportedError(
                f"The layer {normalises.name!r} ({type(normalises).__name__}) sets its own weights when it is called, "
                f"and parameter servers, which have them, do not hear of it. Use MultiWorkerMirroredStrategy."
            )
        if self._engine is None:
            self._engine = make_engine(self._model, self._merge)
        self._peeked = self._engine.builds_from_a_batch
        self._sample = source.peek(restart=self._peeked).data
        self._engine.expect(source.form)
        self._engine.build(self._sample)
        if self._worker.workers > 1 and not self._worker.rules.is_lockstep:
            joint_batches.check_normalization(self._model)
        return self._engine

    def _announce(self, verbose: Any) -> None:
        if self._worker.is_chief and not self._announced and verbose != 0:
            self._announced = True
            io_utils.print_msg(self._worker.describe())

    def _attach(self, fit: int, first_epoch: int, callbacks: Any) -> int | None:
        """Agree with the servers on what is trained; returns the first epoch, which the chief knows. None: the chief is
        in a later `fit`."""
        model, worker = self._model, self._worker
        self._served = served = RemoteVariables(worker, self._merge, model.optimizer, model.trainable_variables)
        found = find_tables(model, served.slots)
        chosen = tuple(table.number for table in self._choose(found, callbacks)) if worker.is_chief else ()
        self._training = True
        self._steps, self._order, self._reported, self._opened = None, (-1, None), None, False
        epoch = served.begin(fit, first_epoch, chosen)
        if epoch is None:
            return None
        self._epoch = epoch
        self._prepare_rows(found, served.tables)
        self._share_state(fit)
        self._client.rejoin_requests = partial(self._rejoin_requests, fit)
        return epoch

    def _share_state(self, fit: int) -> None:
        """The data are the same on all tasks, and what servers do not train is the chief's."""
        assert self._engine is not None
        assert self._source is not None
        compare = joint_batches.tell_of_input if self._worker.is_chief else joint_batches.compare_input_with_chief
        compare(self._source, self._worker, fit)
        share = chief_state_sync.send_state if self._worker.is_chief else chief_state_sync.receive_state
        share(self._worker, self._model, fit, self._engine.layer_state())
        self._tells_state = False

    def _choose(self, found: Sequence[EmbeddingTable], callbacks: Any) -> list[EmbeddingTable]:
        """On the chief: the tables of which single rows are to travel."""
        wanted = self._worker.embedding_rows
        if wanted is not False and found and callback_lists.saves_between_batches(callbacks):
            logger.warning("All rows of embeddings travel, because a callback saves the model between batches.")
            wanted = False
        sample = self._sample
        return choose(found, wanted, lambda tables: SparseEmbeddings(self._model, tables).count(sample))

    def _prepare_rows(self, found: Sequence[EmbeddingTable], numbers: Sequence[int]) -> None:
        """The tables that the chief has chosen, by numbers of variables, are this task's as well."""
        tables = [table for table in found if table.number in numbers]
        for table in tables:
            if table.problem:
                raise DisagreementError(
                    f"On the chief single rows of the table {table} travel; on this task they cannot, because "
                    f"{table.problem}. Every task must build the same model, or pass embedding_rows=False to "
                    f"ParameterServerStrategy."
                )
        assert len(tables) == len(numbers), "the variables have been compared"
        if not (self._rows.serves(tables) if self._rows is not None else not tables):
            self._rows = SparseEmbeddings(self._model, tables) if tables else None
            if self._engine is not None:
                self._engine.retrace()

    def gather(self) -> None:
        """In the middle of `fit`, fetch weights and optimizer state for a callback of the chief that saves them.

        They are of one step: no worker is in the middle of one, and all servers have applied as many.
        """
        if not self._training:
            return
        assert self._engine is not None
        self._leave_steps()
        self._tell_learning_rate()
        with self._between_steps():
            until = time.monotonic() + AGREEMENT_S
            while True:
                self._stale = True
                self._assign(self._merge.pull())
                self._pull_tables()
                versions = [*self._merge.versions(), *self._require_served().pull_optimizer()]
                apart = [version - versions[0] for version in versions]
                if not any(apart) or apart == self._apart:
                    return
                if time.monotonic() > until:
                    self._apart = apart
                    return
                time.sleep(0.001)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """While inside, no worker makes a step. Where all make each step together the chief's own pause is enough."""
        if self._worker.rules.is_lockstep:
            yield
            return
        self._merge.flush()
        answer, _ = self._client.request(HEAD, HoldSteps(True))
        assert isinstance(answer, Values)
        self._worker.global_step = answer.step
        try:
            yield
        finally:
            self._client.request(HEAD, HoldSteps(False))

    def _rejoin_requests(self, fit: int, server: int) -> list[tuple[Any, Sequence[Array]]]:
        """What to tell a server that comes back: where this worker is, and what the head would have been told since."""
        steps = -1 if self._steps is None else self._steps
        pass_began, order = self._order
        order_of = pass_began if self._worker.is_chief and server == HEAD and order is not None else -1
        rejoin = self._merge.rejoin(server, self._epoch, steps, order_of, opened=self._opened)
        told: list[tuple[Any, Sequence[Array]]] = [(rejoin, [] if order_of < 0 or order is None else [order])]
        told += self._require_served().requests_to_repeat()
        if server != HEAD:
            return told
        if self._worker.is_chief:
            told += self._worker.requests_to_repeat()
        if self._reported is not None:
            told.append(self._reported)
        if self._stop_asked_in == fit:
            told.append((RequestStop(fit, stop=True), []))
        return told

    def _await_end(self, fit: int, epoch: int) -> Ticket | EpochOver | FitOver:
        """What the chief does next. It ends a `fit` when its callbacks have had the last word on the weights, perhaps
        before the last epoch; or it begins an epoch, perhaps one that it had begun before it was started again."""
        if self._worker.is_chief:
            return FitOver()
        answer = self._merge.next_ticket(fit, epoch)
        if isinstance(answer, Ticket):
            self._merge.put_back(answer)
        return answer

    def _goes_back(self, fit: int, source: ShardedInput, answer: Any) -> int | None:
        """The epoch with which a chief that was started again goes on, if that is the answer."""
        if not isinstance(answer, EpochOver) or answer.back_to < 0:
            return None
        logger.warning("The chief was started again; going on with epoch %d.", answer.back_to + 1)
        self._share_state(fit)
        source.start_over()
        return answer.back_to

    # An epoch.

    def _train_epoch(
        self, fit: int, epoch: int, source: ShardedInput, engine: Engine, callbacks: Any
    ) -> tuple[int, EpochOver | FitOver]:
        """Take tickets until there are no more. Returns the samples trained on, and the last answer."""
        self._epoch, self._opened = epoch, True
        try:
            self._steps = steps = source.begin(epoch)
        except _NoOrder as reason:
            return 0, reason.answer
        if self._worker.is_chief:
            order = [] if self._new_order is None else [self._new_order]
            if self._new_order is not None:
                self._order = (epoch, self._new_order)
            self._new_order = None
            if self._tells_state:
                chief_state_sync.send_layer_state(self._worker, fit, engine.layer_state())
            self._tells_state = bool(engine.layer_state())
            self._client.request(HEAD, OpenEpoch(fit, epoch, -1 if steps is None else steps), order)
        samples = step = 0
        ended = False
        self._ahead.clear()
        listened = callback_lists.listens_to_batches(callbacks, "train")
        made = source.num_batches or 0
        bar = callback_lists.progress_bar(callbacks)
        engine.begin()
        try:
            while True:
                timeline.current.enter("data")
                ticket = self._merge.next_ticket(fit, epoch)
                if not isinstance(ticket, Ticket):
                    made = ticket.steps if isinstance(ticket, EpochOver) and ticket.steps else made
                    return samples, ticket
                if step == 0 and not self._worker.is_chief:
                    self._take_changes(engine)
                self._reported = None  # the chief has it, since it has opened this epoch
                if ended and len(ticket.members) == 1:  # else others are making the step already
                    self._tell_of_no_batch(ticket, ends=True)
                    continue
                batch = self._ahead.pop(ticket.serial, None) or self._batch(source, ticket)
                timeline.current.leave()
                if batch is None:
                    continue
                if listened:
                    callbacks.on_train_batch_begin(step)
                if engine.in_variables:  # a callback may have looked at them, or changed them
                    engine.end()
                    if listened:
                        self._tell_learning_rate()
                    engine.begin()
                if self._rows is not None:
                    self._load_rows(self._rows, source, ticket, batch, engine)
                progress.report("gradients", epoch=epoch, step=step)
                timeline.current.enter("forward/backward", epoch=epoch, step=step)
                engine.train(batch.data, batch.size / (batch.global_size or 1))
                timeline.current.leave()
                self._client.is_starting = False
                samples += batch.size
                if bar is not None:
                    bar.count(batch.global_size or batch.size)
                if listened:
                    callbacks.on_train_batch_end(ticket.batch, engine.logs())
                step += 1
                if self._worker.is_chief and self._model.stop_training and not ended:
                    self._end_epoch(fit, epoch)
                    ended = True
                if self._stops_within_epoch():
                    made = step
                    return samples, FitOver()
        finally:
            try:
                self._merge.flush()
            finally:
                engine.end()
                timeline.current.leave()
                if self._rows is not None:
                    self._rows.leave()
            source.finish(made or step)

    def _take_changes(self, engine: Engine) -> None:
        """The chief has opened the epoch, and told the servers what its callbacks have changed."""
        values = self._merge.pull()
        engine.end()
        self._assign(values)
        engine.begin()

    def _load_rows(
        self, rows: SparseEmbeddings, source: ShardedInput, ticket: Ticket, batch: LocalBatch, engine: Engine
    ) -> None:
        """Fetch the rows that the batch looks up, and say which those of the next one are, if it is known."""
        exchange = self._merge.rows
        numbers = rows.numbers(batch.data)
        rows.load(engine, numbers, exchange.begin(ticket, numbers))
        upcoming = self._merge.upcoming()
        if upcoming is None:
            return
        following = self._batch(source, upcoming)
        if following is None:
            self._merge.drop_upcoming()
            return
        self._ahead[upcoming.serial] = following
        exchange.prefetch(upcoming, rows.numbers(following.data))

    def _batch(self, source: ShardedInput, ticket: Ticket) -> LocalBatch | None:
        """This worker's part of the batch that the ticket names; None, which the head is told, if there is none."""
        try:
            batch = source.batch(ticket.batch)
        except BatchNotAvailableError:
            self._tell_of_no_batch(ticket, ends=False)
            return None
        if batch is None:
            self._tell_of_no_batch(ticket, ends=True)
            return None
        part = cut(batch.data, ticket.members.index(ticket.member), len(ticket.members), "the input")
        return LocalBatch(part.data, part.size, part.global_size)

    def _end_epoch(self, fit: int, epoch: int) -> None:
        """The chief's callbacks stop the training: nobody begins another step."""
        self._merge.flush()
        answer, _ = self._client.request(HEAD, EndEpoch(fit, epoch))
        assert isinstance(answer, EpochOver)
        self._steps = answer.steps

    def _tell_of_no_batch(self, ticket: Ticket, *, ends: bool) -> None:
        self._merge.flush()
        self._client.request(HEAD, NoBatch(ticket, ends))
        self._merge.abandon(ticket)

    def _finish_epoch(self, fit: int, epoch: int, samples: int, engine: Engine, *, looks: bool) -> dict[str, Any]:
        """The chief merges what all counted, and fetches what it may save; tables only if something `looks` at them."""
        model = self._model
        metrics = model.metrics_variables
        values = [to_host(variable) for variable in metrics]
        if not self._worker.rules.synchronous:
            weights = tuple(weight.value for weight in model_state.metric_weights(model))
            report = EpochReport(fit, epoch, samples, tuple(v.dtype.name for v in values), weights)
            self._client.request(HEAD, report, values)
            self._reported = (report, values)
            if self._worker.is_chief:
                answer, buffers = self._client.request(HEAD, CollectReports(fit, epoch))
                assert isinstance(answer, Values)
                if answer.note:
                    logger.warning("Epoch %d: %s.", epoch + 1, answer.note)
                self._worker.global_step = answer.step
                for variable, value in zip(metrics, arrays_of(buffers, answer.dtypes), strict=True):
                    variable.assign(value.reshape(variable.shape))
        if self._worker.is_chief:
            self._tell_learning_rate()  # set after the last batch, it would be overwritten by what is pulled
            self._assign(self._merge.pull())
            self._pull_optimizer(tables=looks)
            if looks:
                self._pull_tables()
            self._require_served().record_values(tables=looks)
        silent = model_state.silent_metrics(model, [to_host(variable) for variable in metrics])
        own = engine.logs() if samples else {}
        chosen = model_state.choose_logs(own, model.get_metrics_result, silent, engine.origins.results)
        logs = dict(pythonify_logs({**own, **chosen}))
        # A worker that has trained no batch has counted nothing, of which Keras makes 0: the best of all losses.
        return logs if samples or self._worker.is_chief else dict.fromkeys(logs, math.nan)

    def _logs_of_all(self, logs: dict[str, Any]) -> dict[str, Any]:
        """An epoch's logs for callbacks and history; each worker has its own."""
        return logs

    def _stops_within_epoch(self) -> bool:
        """Whether no further step of this epoch is to be made: workers that make steps of their own go on to its
        end."""
        return False

    def _stops_after(self, answer: EpochOver | FitOver) -> bool:
        """Whether there are no more epochs. The chief decides for all: what other workers see is only a part."""
        if not self._worker.is_chief:
            return isinstance(answer, FitOver)
        asked, _ = self._client.request(HEAD, RequestStop(self._worker.last_fit, stop=False))
        return isinstance(answer, FitOver) or isinstance(asked, FitOver) or self._model.stop_training

    def ask_all_to_stop(self) -> None:
        """From any worker: the chief ends the running `fit` with the epoch."""
        self._stop_asked_in = self._worker.last_fit
        self._client.request(HEAD, RequestStop(self._stop_asked_in, stop=True))

    def _validate(self, call: FitArguments, callbacks: Any) -> Mapping[str, Any]:
        """The chief evaluates, as Keras's `fit` does."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(call.validation_data)
        logs: Mapping[str, Any] = self._plain("evaluate")(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=call.validation_batch_size or call.batch_size,
            steps=call.validation_steps,
            callbacks=callbacks,
            return_dict=True,
            verbose=0,
        )
        return logs

    def _chiefs_order(self, fit: int, own: Array) -> Array:
        """Of the pass that begins: this process's own if it is the chief, which tells it to the others then."""
        if self._worker.is_chief:
            self._new_order = own
            return own
        assert self._source is not None, "orders are asked for when an epoch begins"
        answer = self._merge.request_sample_order(fit, self._source.pass_began)
        if isinstance(answer, EpochOver | FitOver):
            raise _NoOrder(answer)
        return answer

    # State.

    def _assign(self, values: Sequence[Array | None]) -> None:
        for variable, value in zip(self._model.trainable_variables, values, strict=True):
            if value is not None:
                variable.assign(value)

    def _leave_steps(self) -> None:
        """The model has its whole tables again, and all variables their values."""
        assert self._engine is not None
        self._engine.end()
        if self._rows is not None:
            self._rows.leave()

    def _pull_optimizer(self, *, tables: bool = True) -> None:
        self._require_served().pull_optimizer(tables=tables)
        self._stale_slots &= not tables

    def _pull_tables(self) -> None:
        """Put the servers' tables into the model, if they are newer than its own."""
        if self._rows is not None and self._stale:
            self._rows.assign(self._merge.pull_tables())
            self._stale = False

    @contextmanager
    def _refreshed(self) -> Iterator[None]:
        """In the middle of `fit`, take the newest weights; after it, the model has the last ones, or other ones on
        purpose."""
        if self._training:
            self._leave_steps()  # perhaps between two batches
            self._stale = self._rows is not None
            self._assign(self._merge.pull())
            self._pull_tables()
        yield

    def _tell_changes(self) -> None:
        """The chief's learning rate and weights, which a callback may have set between two epochs."""
        self._tell_learning_rate()
        if self._worker.is_chief and self._require_served().send_changes():
            self._merge.pull()  # else it would have those of before when its first step is not answered yet

    def _tell_learning_rate(self) -> None:
        """The chief's learning rate, which a callback may have set."""
        if self._worker.is_chief:
            self._require_served().send_learning_rate()

    def _require_served(self) -> RemoteVariables:
        assert self._served is not None, "the model is declared before the first step"
        return self._served
