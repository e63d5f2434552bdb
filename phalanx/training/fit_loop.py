"""One call of `fit` on one of several replicas.

In a job whose members come and go, a loss shows as `MembershipChangedError`, on all members at the same collective.
Then the batch at hand is cut anew for those who are left and the step is repeated; what was decided together is decided
again. Processes that come in are given the state that all have at this step, and go on with the others. Ranks close up,
and who becomes rank 0 takes over what a chief does.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import msgspec
import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils.python_utils import pythonify_logs

from phalanx.checkpoint import backup_and_restore, callback_state
from phalanx.checkpoint.fit_resumption import FitResumption, FitSnapshot
from phalanx.data import ShardedInput, accepts_batch_size, local_range
from phalanx.data.sample_ledger import SampleLedger
from phalanx.errors import MembershipChangedError, PeerLostError
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training import callback_list as callback_lists
from phalanx.training import state_sync
from phalanx.training.consistency import check_same_configuration
from phalanx.training.custom_step_check import CustomStepCheck
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.joint_batches import JointBatch, JointBatches, compare_inputs, compare_samples
from phalanx.training.replica import own_seed
from phalanx.training.steps.stepper import EveryStep
from phalanx.transport.serialization import decode, encode, is_serializable

if TYPE_CHECKING:
    from phalanx.training.replica_trainer import ReplicaTrainer

T = TypeVar("T")


class FitPosition(msgspec.Struct):
    """Where a running `fit` stands, for a process that takes part from there on.

    Attributes:
        epoch, step: the next step.
        place: of the running epoch in the data, see `ShardedInput.place`.
        epochs, history: what `History` has noted so far (`plain`).
        logs: of the last epoch that is over (`plain`).
        callbacks: what the chief's callbacks have learnt since it began (`memories.Memories`).
        watched: whether anybody's callbacks see single batches, of the training and of evaluations.
        stops: whether the training ends after the first step of this epoch.
        chief_logs_more: whether callbacks of the chief's may add to the logs of epochs.
        ledger: see `Ledger.encoded`.
        applied: steps in all epochs so far, where the training is saved.
        randomness: see `ShardedInput.randomness`; of the data, and of those for validation.
        validated: of these, see `ShardedInput.taken`.
    """

    epoch: int
    step: int
    place: tuple[int, int]
    epochs: list[int]
    history: bytes
    logs: bytes
    callbacks: list[tuple[str, bytes]]
    ledger: bytes
    watched: tuple[bool, bool] = (False, False)
    stops: bool = False
    chief_logs_more: bool = False
    applied: int = 0
    randomness: tuple[bytes, bytes] = (b"", b"")
    validated: int = 0


class FitLoop:
    """Trains the model of a `ReplicaTrainer` once, as `keras.Model.fit` does.

    Args:
        trainer: with its model and replica.
        call: of `fit`.
        resumption: where it is saved while it runs.
    """

    def __init__(self, trainer: ReplicaTrainer, call: FitArguments, resumption: FitResumption | None = None):
        self._trainer = trainer
        self._model = trainer.model
        self._replica = trainer.replica
        self._call = call
        self._resumption = resumption
        self._elastic = self._replica.elastic
        self._was_chief = self._replica.is_chief
        self._generation = self._replica.generation
        self._callbacks: Any = None
        self._validation: ShardedInput | None = None
        self._epoch = 0
        self._walk: JointBatches | None = None
        self._logs: dict[str, Any] = {}
        self._ledger: SampleLedger | None = None
        self._prepared: dict[int, set[int]] = {}  # world sizes, and global batches of which the parts were prepared
        self._memories: callback_state.CallbackStates | None = None
        self._memories_of_chief: callback_state.CallbackStates | None = None  # of callbacks that only a chief runs
        self._ends_epoch = False  # while the chief may be busy with the end of an epoch
        self._trained = False  # whether this process has made a step
        self._stops = False  # whether callbacks ended the training before the first step of the epoch

    def run(self) -> Any:
        """Train; returns the `History`.

        Raises: EntryOverError if this is a candidate and the others have finished meanwhile.
        """
        call, model, replica = self._call, self._model, self._replica
        self._source, self._validation = self._inputs()
        self._engine = self._trainer.prepare(self._source, "fit")
        saves = callback_lists.needs_whole_optimizer(call.callbacks)  # perhaps on the chief alone
        repeats = self._resumption is not None or self._steadily(lambda: replica.any(saves))
        self._stepper = self._trainer.make_stepper(self._engine, repeats=repeats)
        # A step of the model's own may update weights otherwise than through the engine, unseen.
        overridden = type(model).train_step is not keras.Model.train_step
        self._unchecked = overridden and self._stepper.every_step and not replica.is_alone
        self._keep_up()
        self._steadily(lambda: compare_samples(self._source, replica))
        self._trainer.announce(self._source, call.verbose)
        self._watched, self._watched_test = (
            self._steadily(lambda phase=phase: replica.any(callback_lists.watches_batches(call.callbacks, phase)))  # type: ignore[misc]
            for phase in ("train", "test")
        )
        own = callback_lists.change_logs_on_the_chief(call.callbacks)
        self._chief_logs_more = self._steadily(lambda: replica.any(own))
        self._make_callbacks()
        if isinstance(self._stepper, EveryStep) and not repeats and self._elastic is None:
            self._stepper = self._trainer.faster_stepper(self._engine, self._callbacks) or self._stepper
        model.stop_training = False
        if self._elastic is not None:
            self._source.read_directly()
        over = False
        if self._elastic is not None or self._resumption is not None:
            self._ledger = SampleLedger.of(self._source)
            self._memories = callback_state.CallbackStates(call.callbacks)
            self._memories_of_chief = callback_state.CallbackStates(callback_lists.only_for_chiefs(call.callbacks))
        if replica.is_candidate:
            self._join()
        else:
            if self._resumption is not None and self._resumption.goes_on:
                callback_state.append_to_files(call.callbacks)
            self._callbacks.on_train_begin()
            over = self._restore()
        while self._epoch < call.epochs and not over:
            over = self._run_epoch()
        self._stepper.end(self._steadily)
        if self._resumption is not None:
            self._resumption.finish(self._steadily(lambda: self._noted(is_over=True)), self._ledger)
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and call.epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        self._callbacks.on_train_end(logs=self._logs)
        return model.history

    # Before the first step.

    def _inputs(self) -> tuple[ShardedInput, ShardedInput | None]:
        call, trainer = self._call, self._trainer
        source = self._source = trainer.shard(
            call.x,
            call.y,
            call.sample_weight,
            call.batch_size,
            call.steps_per_epoch,
            shuffle=call.shuffle,
            class_weight=call.class_weight,
            seed=self._seed(),
        )
        # After what every method does first, so that ranks which call different ones are told so; and before the
        # validation's data, which one of them may lack.
        self._steadily(lambda: check_same_configuration(self._model, call, self._replica))
        if call.validation_data is None:
            return source, None
        x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(call.validation_data)
        batch_size = call.validation_batch_size
        if batch_size is None and accepts_batch_size(x):
            batch_size = call.batch_size
        validation = self._validation = trainer.shard(x, y, weight, batch_size, call.validation_steps)
        self._steadily(lambda: compare_inputs(validation, self._replica, "fit"))
        self._steadily(lambda: compare_samples(validation, self._replica))
        return source, validation

    def _seed(self) -> int | None:
        """Of the orders of the samples, where they must be had again by a process that goes on in the middle."""
        if self._elastic is not None:
            return None  # the entry's
        if self._resumption is not None:
            seed: int = self._resumption.common_seed()
            return seed
        if backup_and_restore.keeps_steps(self._call.callbacks):
            chiefs: Any = self._replica.from_chief(own_seed())
            return int(chiefs)
        return None

    def _begin(self) -> None:
        """All start alike, from the chief's state."""
        call, first = self._call, self._model._initial_epoch or self._call.initial_epoch
        own = [first, backup_and_restore.step_of_backup(call.callbacks) if self._replica.is_chief else 0]
        told: Any = self._steadily(lambda: self._replica.from_chief(own))  # a backup may just have been restored
        self._epoch, step = told
        progress.report("initial values")
        self._steadily(self._synchronise)
        self._trainer.has_synchronised()
        place = self._source.place_of(self._epoch, call.initial_epoch) if step else None
        if place is not None:
            if step == self._source.batches_from(place):
                self._epoch += 1
                self._source.go_between(self._source.place_of(self._epoch, call.initial_epoch) or (0, 0))
            else:
                self._model.reset_metrics()
                self._begin_epoch_again()
                self._enter(place, step)

    def _restore(self) -> bool:
        """Go on where a checkpoint says, or begin; whether nothing is left to train."""
        resumption = self._resumption
        if resumption is None:
            self._begin()
            return False
        progress.report("initial values")
        noted = self._steadily(resumption.restore)
        if noted is None:
            self._begin()
            return False
        self._trainer.has_synchronised()
        resumption.check(noted, self._source.samples, self._source.num_batches)
        self._stepper.load_pooled(noted.pooled)
        self._go_on(noted)
        return resumption.is_over(noted, self._call.epochs)

    def _go_on(self, noted: FitSnapshot) -> None:
        self._epoch, self._logs = noted.epoch, dict(noted.logs)
        if self._ledger is not None and noted.ledger:
            self._ledger.load(noted.ledger)
        if self._validation is not None:
            self._validation.catch_up(noted.validated)
        history = self._model.history
        history.epoch, history.history = list(noted.epochs), dict(noted.history)
        if noted.step == 0:
            self._source.go_between(noted.place, noted.randomness)
        else:
            self._begin_epoch_again()
            self._enter(noted.place, noted.step, noted.randomness)
        callback_state.remember_all(self._call.callbacks, noted.callbacks)

    def _begin_epoch_again(self) -> None:
        """For callbacks that were not there, or did not live to see its end. What they do to weights and learning rate
        was done when the epoch began."""
        with state_sync.unchanged(self._model):
            self._callbacks.on_epoch_begin(self._epoch)

    def _enter(self, place: tuple[int, int], step: int, randomness: bytes = b"") -> None:
        """Begin in the middle of an epoch. What callbacks changed when it began is contained in the model's state."""
        self._source.go_to(place, step, randomness)
        self._engine.begin()
        self._walk = JointBatches(self._source, self._epoch, self._replica, done=step)

    def _noted(self, *, is_over: bool = False) -> FitSnapshot:
        """Where the training stands, between two steps or two epochs; called on all ranks."""
        pooled = dict(self._stepper.pooled())
        walk, source, history = self._walk, self._source, self._model.history
        return FitSnapshot(
            epoch=self._epoch,
            step=0 if walk is None else walk.done,
            place=source.next_place if walk is None else source.place,
            randomness=source.next_randomness if walk is None else source.randomness,
            samples=source.samples,
            batches=source.num_batches,
            epochs=list(history.epoch),
            history={name: [_plain(value) for value in values] for name, values in history.history.items()},
            logs={name: _plain(value) for name, value in self._logs.items()},
            callbacks=self._what_callbacks_learnt(),
            is_over=is_over,
            stopped=bool(self._model.stop_training),
            pooled=pooled,
            random_states=self._replica.random_states(),
            validated=0 if self._validation is None else self._validation.taken,
        )

    def _what_callbacks_learnt(self) -> list[tuple[str, bytes]]:
        assert self._memories is not None, "it is made where a `fit` can be entered in the middle"
        return self._memories.of(self._call.callbacks)

    def _may_save(self, *, ends_epoch: bool = False) -> None:
        """Between two steps: save, or stop, if it is time to."""
        resumption = self._resumption
        if resumption is None or not self._stepper.together:
            return
        if resumption.notice.given:
            resumption.stop(self._noted, self._ledger, self._steadily)
        if resumption.wants_to_save(ends_epoch=ends_epoch):
            resumption.save(self._steadily(self._noted), self._ledger)

    def _synchronise(self) -> None:
        state_sync.synchronise(self._model, self._replica)
        self._trainer.merge.synchronise()

    def release_callbacks(self) -> None:
        """The callbacks are the program's own again."""
        if self._callbacks is not None:
            callback_lists.unmark(self._callbacks)

    def _make_callbacks(self, keep: list[Any] | None = None) -> None:
        call = self._call
        self._callbacks = self._trainer.callbacks(
            call.callbacks if keep is None else keep,
            call.verbose,
            call.epochs,
            self._source.num_batches,
            history=True,
        )
        callback_lists.mark(self._callbacks)
        self._listened = callback_lists.listens_to_batches(self._callbacks, "train")
        self._was_chief = self._replica.is_chief

    # An epoch.

    def _run_epoch(self) -> bool:
        """Train and validate for one epoch, or for what is left of it, and count it; whether training is to stop."""
        model, replica, epoch = self._model, self._replica, self._epoch
        trained = self._train_epoch()
        if trained:
            # A process that went on after the last step of an epoch knows what the metrics have counted.
            self._logs = pythonify_logs(self._stepper.logs() if self._trained else model.get_metrics_result())
        else:
            self._logs = {}
        if self._validation is not None and model._should_eval(epoch, self._call.validation_freq):
            logs = self._trainer.evaluate_jointly(
                self._validation, self._callbacks, watched=self._watched_test, adapt=self._adapt
            )
            self._logs |= {f"val_{name}": value for name, value in logs.items()}
        if self._ledger is not None:
            self._ledger.end_epoch(epoch)
        timeline.current.enter("callbacks", epoch=epoch)
        self._callbacks.on_epoch_end(epoch, self._logs)
        timeline.current.leave()
        if self._chief_logs_more:
            self._take_over_the_chiefs_history()
        self._ends_epoch = True
        model.stop_training = self._steadily(lambda: replica.any(model.stop_training))
        self._ends_epoch = False
        if self._elastic is not None:
            self._share_what_the_chief_remembers()
        self._epoch += 1
        self._may_save(ends_epoch=True)
        return bool(model.stop_training)

    def _take_over_the_chiefs_history(self) -> None:
        """A callback that only the chief runs may have added to the logs of an epoch that is over."""
        history = self._model.history.history
        own = encode({name: [len(values), _plain(values[-1])] for name, values in history.items()})
        chiefs = self._steadily(lambda: self._replica.communicator.broadcast_bytes(own))
        for name, (count, newest) in decode(chiefs).items():
            history.setdefault(name, [])[count - 1 :] = [newest]

    def _train_epoch(self) -> bool:
        """The steps of one epoch; whether there was any."""
        model, engine, epoch = self._model, self._engine, self._epoch
        walk = self._walk
        entering = walk is not None
        if walk is None:  # else this process came in in the middle of it
            self._keep_up()
            model.reset_metrics()
            self._callbacks.on_epoch_begin(epoch)
            self._trainer.agree_on_learning_rate(self._adapt)
            self._stops = self._steadily(lambda: self._replica.any(model.stop_training))
            engine.begin()
            walk = self._walk = JointBatches(self._source, epoch, self._replica)
        self._stepper.begin(watched=self._watched, entering=entering)
        self._let_in()
        # Into steps of all, others come where these are merged, and agreed on before; else before all that.
        entering = entering and self._stepper.every_step
        size, opened = model.steps_per_execution, -1
        try:
            while (batch := self._next(walk)) is not None:
                step = walk.done
                if step % size == 0 and step != opened:
                    self._open_group(step, entering=entering)
                    opened, entering = step, False
                if not walk.holds(batch):  # the members have changed meanwhile
                    continue
                engine.expect(self._source.form)  # what was evaluated meanwhile may have been others
                progress.report("gradients", epoch=epoch, step=step)
                if self._resumption is not None and self._stepper.every_step:
                    self._resumption.wish(steps=1)
                timeline.current.enter("forward/backward", epoch=epoch, step=step)
                if self._elastic is None:
                    check = CustomStepCheck(model) if self._unchecked else None
                    self._stepper.train(batch, last=self._is_last(step))
                    if check is not None:
                        self._unchecked = self._engine.in_variables and not check.compare(self._replica)
                else:
                    batch = self._train_repeatedly(batch, boundary=step % size == 0)
                    self._prepare_for_a_loss(batch)
                timeline.current.leave()
                self._enter_in_ledger(step, batch)
                walk.done = step + 1
                self._trained = True
                self._trainer.count(self._callbacks, batch)
                if self._resumption is not None:
                    self._resumption.step_done()
                self._release(self._stepper.meet(self._steadily))
                if walk.done % size == 0:
                    if self._close_group(step):
                        break
                    self._may_save()
                    if not self._is_last(step):
                        self._let_in()
            else:
                if walk.done % size:  # Keras, too, names the last step of a whole group
                    self._close_group(walk.done - walk.done % size + size - 1)
            self._release(self._stepper.finish(self._steadily))
        finally:
            walk.close()
            self._walk = None
            engine.end()
            timeline.current.leave()
        return walk.done > 0

    def _next(self, walk: JointBatches) -> JointBatch | None:
        if self._elastic is None:
            return walk.next()
        self._keep_up()
        return self._steadily(walk.next)

    def _is_last(self, step: int) -> bool | None:
        """Whether a step is its epoch's last; None where that is not known."""
        return None if self._source.num_batches is None else step + 1 >= self._source.num_batches

    def _open_group(self, step: int, *, entering: bool) -> None:
        """Before the first of `steps_per_execution` steps. Who enters here finds that the others have agreed."""
        if self._listened:
            timeline.current.enter("callbacks")
            self._callbacks.on_train_batch_begin(step)
            timeline.current.leave()
        if not (self._watched and self._stepper.together) or entering:
            return
        if self._steadily(lambda: self._replica.any(self._engine.in_variables)):
            self._engine.end()
            self._trainer.agree_on_learning_rate(self._adapt)
            self._engine.begin()

    def _close_group(self, step: int) -> bool:
        """After the last of them; whether training is to stop."""
        model = self._model
        if self._listened:
            timeline.current.enter("callbacks")
            self._callbacks.on_train_batch_end(step, self._stepper.logs())
            timeline.current.leave()
        if not self._stepper.together:
            return False
        if self._stops or (self._watched and self._steadily(lambda: self._replica.any(model.stop_training))):
            model.stop_training = True
            return True
        return False

    def _enter_in_ledger(self, step: int, batch: JointBatch) -> None:
        if self._ledger is None:
            return
        if self._stepper.every_step:
            self._ledger.note(self._source, step, batch.sizes)
        else:
            tasks = [member.task for member in self._replica.communicator.membership.members]
            self._ledger.hold(self._source, step, batch.sizes, tasks)

    def _release(self, tasks: Sequence[str]) -> None:
        if self._ledger is not None and tasks:
            self._ledger.release(tasks)

    # Members come and go.

    def _let_in(self) -> None:
        """Where steps are not merged, what their merge is for besides: others may come in, and all are told whether to
        save or to end."""
        if self._stepper.every_step or not self._stepper.together:
            return
        if self._elastic is None and self._resumption is None:
            return

        def meet() -> None:
            if self._resumption is not None:
                self._resumption.wish()
            if self._elastic is not None:
                self._elastic.at_boundary = True
            self._trainer.merge.meet()

        self._steadily(meet)
        self._may_save()

    def _steadily(self, action: Callable[[], T]) -> T:
        return self._replica.steadily(action, self._adapt)

    def _train_repeatedly(self, batch: JointBatch, *, boundary: bool) -> JointBatch:
        """One step, until it has happened on all members; returns the batch as it was cut in the end."""
        elastic, walk = self._elastic, self._walk
        assert elastic is not None
        assert walk is not None
        while True:
            elastic.at_boundary = boundary and self._stepper.every_step
            try:
                self._stepper.train(batch, last=self._is_last(walk.done))
                return batch
            except MembershipChangedError:
                self._adapt()
                again = self._next(walk)
                assert again is not None, "a batch that was read can be read again"
                batch = again

    def _prepare_for_a_loss(self, batch: JointBatch) -> None:
        """Compile steps for the parts that this rank would have if a member were lost, so that the others do not wait
        then. In a thread, and once for each size."""
        world_size = self._replica.world_size - 1
        if world_size == 0 or batch.global_size in self._prepared.get(world_size, ()):
            return
        self._prepared.setdefault(world_size, set()).add(batch.global_size)
        ranges = [local_range(batch.global_size, rank, world_size) for rank in range(world_size)]
        sizes = {stop - start for start, stop in ranges} - {0, batch.size}
        work = [self._engine.warm(_resized(batch.data, size), size / batch.global_size) for size in sorted(sizes)]
        if any(work):
            _compile_beside([part for part in work if part is not None])

    def _keep_up(self) -> None:
        """A callback may have met the change of members, in an evaluation of its own."""
        if self._generation != self._replica.generation:
            self._adapt()

    def _adapt(self) -> None:
        """The job has other members: cut the data for them, do a chief's work if that is who we are, let others in."""
        replica, elastic = self._replica, self._elastic
        assert elastic is not None
        self._generation = replica.generation
        self._regroup_inputs()
        if replica.is_chief and not self._was_chief:
            replica.tell_of_the_entry()
            if self._callbacks is not None:  # else they are made for a chief
                self._become_chief()
        if elastic.newcomers and self._walk is not None:
            self._engine.end()
            try:
                self._welcome(self._walk)
                changed = False
            except MembershipChangedError:
                changed = True
            self._engine.begin()
            if changed:
                self._adapt()

    def _regroup_inputs(self) -> None:
        """Cut what is read from here on for the present members."""
        rank, world_size = self._replica.rank, self._replica.world_size
        if self._walk is not None:
            self._walk.regroup()
        else:
            self._source.regroup(rank, world_size)
        if self._validation is not None:
            self._validation.regroup(rank, world_size)

    def _welcome(self, walk: JointBatches) -> None:
        """Give those who came in the state of all others."""
        payload = b""
        if self._replica.is_chief:
            history = self._model.history
            payload = msgspec.msgpack.encode(
                FitPosition(
                    epoch=self._epoch,
                    step=walk.done,
                    place=self._source.place,
                    randomness=(
                        self._source.randomness,
                        b"" if self._validation is None else self._validation.randomness,
                    ),
                    epochs=list(history.epoch),
                    history=encode(history.history),
                    logs=encode(self._logs),
                    callbacks=self._what_callbacks_learnt(),
                    watched=(self._watched, self._watched_test),
                    stops=self._stops,
                    chief_logs_more=self._chief_logs_more,
                    ledger=b"" if self._ledger is None else self._ledger.encoded(),
                    applied=0 if self._resumption is None else self._resumption.applied,
                    validated=0 if self._validation is None else self._validation.taken,
                )
            )
        self._replica.communicator.broadcast_bytes(payload)
        self._stepper.welcome()

    def _join(self) -> None:
        """As a candidate: wait to be let in, and take over the state that the others have."""
        replica, elastic = self._replica, self._elastic
        assert elastic is not None
        self._warm_up()
        replica.take_part()
        while True:
            try:
                if replica.rank == 0:
                    raise PeerLostError(
                        "All members that had the state of the job were lost.", rank=0, task="chief", host=""
                    )
                payload = replica.communicator.broadcast_bytes(b"")
                self._stepper.welcome()
                break
            except MembershipChangedError:
                continue
        elastic.welcomed()
        self._generation = replica.generation
        self._trainer.has_synchronised()
        position = msgspec.msgpack.decode(payload, type=FitPosition)
        self._epoch, self._logs = position.epoch, decode(position.logs)
        self._regroup_inputs()
        if self._ledger is not None:
            self._ledger.load(position.ledger)
        if self._resumption is not None:
            self._resumption.count_from(position.applied)
        with state_sync.unchanged(self._model), callback_lists.alone():
            self._callbacks.on_train_begin()
            self._callbacks.on_epoch_begin(self._epoch)
        history = self._model.history
        history.epoch, history.history = list(position.epochs), decode(position.history)
        self._watched, self._watched_test = position.watched
        self._stops, self._chief_logs_more = position.stops, position.chief_logs_more
        if self._validation is not None:
            self._validation.continue_with(position.randomness[1])
            self._validation.catch_up(position.validated)
        self._enter(position.place, position.step, position.randomness[0])
        callback_state.remember_all(self._call.callbacks, position.callbacks)

    def _warm_up(self) -> None:
        """Compile what a step needs, before others wait for it. The state that comes of it is overwritten."""
        elastic, replica = self._elastic, self._replica
        assert elastic is not None
        if not elastic.late:
            return
        batch = self._source.peek()
        world_size = replica.former_members + 1
        low, high = local_range(batch.global_size or batch.size, world_size - 1, world_size)
        part = _resized(batch.data, max(1, high - low))
        progress.report("compilation")
        self._engine.begin()
        self._engine.train(part, 1.0 / replica.world_size)
        self._engine.end()
        self._trainer.merge.load({})  # what a compression has kept of it

    def _become_chief(self) -> None:
        """Begin what only a chief does: progress, files."""
        waiting = callback_lists.only_for_chiefs(self._call.callbacks)
        former = self._callbacks
        kept = [c for c in former.callbacks if c not in waiting]
        self._make_callbacks([*kept, *waiting])
        callback_lists.succeed(self._callbacks, former)
        new = [c for c in self._callbacks.callbacks if c not in kept]
        callback_lists.take_over(new, self._epoch)
        if self._ends_epoch:  # nobody knows what the former chief still did
            for callback in new:
                callback.on_epoch_end(self._epoch, self._logs)

    def _share_what_the_chief_remembers(self) -> None:
        """After each epoch all ranks know what the chief's own callbacks do, should one become chief."""
        # Ranks may have been given different callbacks (`if rank == 0: ...`), so this is done in any case.
        waiting = callback_lists.only_for_chiefs(self._call.callbacks)
        assert self._memories_of_chief is not None, "in a job whose members come and go"
        own = self._memories_of_chief.of(waiting)
        self._what_callbacks_learnt()  # what is another now may not be so when it is asked for
        chiefs: Any = self._steadily(lambda: self._replica.from_chief(own))
        if not self._replica.is_chief:
            callback_state.remember_all(waiting, chiefs)


def _resized(data: Any, size: int) -> Any:
    """A batch of another size, with whatever samples."""

    def resize(array: Any) -> Any:
        return None if array is None else np.take(array, np.arange(size) % len(array), axis=0)

    return keras.tree.map_structure(resize, data)


def _compile_beside(work: Sequence[Callable[[], None]]) -> None:
    """Do this work in a thread, which ends with the part that it is at when the program ends: the interpreter would
    take it down in the middle of native code, which aborts the process."""
    over = threading.Event()

    def compile_all() -> None:
        for part in work:
            if not over.is_set():
                part()
        atexit.unregister(end)

    def end() -> None:
        over.set()
        thread.join()

    thread = threading.Thread(target=compile_all, name="phalanx-compilation", daemon=True)
    atexit.register(end)
    thread.start()


def _plain(value: Any) -> Any:
    return value if is_serializable(value) else np.array(keras.ops.convert_to_numpy(value))
