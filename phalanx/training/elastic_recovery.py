"""Recovery in elastic jobs: members leave and join while `fit` runs.

A loss raises `MembershipChangedError` on all members at the same collective. The current batch is divided again among
the remaining members and the step is repeated, as are collective decisions. Processes that join receive the state that
all have at this step, and continue with the others. Ranks are renumbered without gaps, and the process that becomes
rank 0 acts as chief from then on.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from phalanx.checkpoint.callback_state import restore_states
from phalanx.data import local_range
from phalanx.elastic.elastic_group import ElasticGroup
from phalanx.engines.random_state import random_state
from phalanx.errors import MembershipChangedError, PeerLostError
from phalanx.keras_compat.callback_bases import flatten_callbacks
from phalanx.runtime import progress
from phalanx.training import callback_list, chief_callbacks, saver_claims, state_sync
from phalanx.training.checks.program_probes import check_chiefs_findings
from phalanx.training.checks.same_model import check_chiefs_model, structure_of
from phalanx.training.checks.same_program import check_chiefs_program, describe_program
from phalanx.training.fit_position import FitPosition, FitRecorder
from phalanx.training.fit_state import ReplicaFitState
from phalanx.training.joint_batches import JointBatch, read_part
from phalanx.training.replica_model import ReplicaModel
from phalanx.transport.serialization import decode, encode

T = TypeVar("T")


class ElasticRecovery:
    """Recovery that keeps one `fit` consistent on all members of an elastic job.

    Attributes:
        ends_epoch: Whether a chief may be in the middle of ending an epoch.
    """

    def __init__(
        self,
        replica_model: ReplicaModel,
        elastic: ElasticGroup,
        state: ReplicaFitState,
        recorder: FitRecorder,
    ) -> None:
        self._model = replica_model
        self._replica = replica_model.replica
        self._elastic = elastic
        self._state = state
        self._recorder = recorder
        self.ends_epoch = False
        # Whether this process has started what only a chief does.
        self._acts_as_chief = self._replica.is_chief
        # The membership for which inputs are divided, as opposed to the current one: a callback's own collective may
        # have met a change of which this object was not notified.
        self._generation = self._replica.generation
        self._compiled: dict[int, set[int]] = {}  # by world size, the global batch sizes whose parts were compiled

    # Membership changes.

    def retry(self, action: Callable[[], T]) -> T:
        """Run a collective action of all members, and restart it whenever the membership changes."""
        return self._replica.retry(action, self.adapt)

    def adapt_if_changed(self) -> None:
        """Adapt if a callback has met a membership change, for example in its own evaluation."""
        if self._generation != self._replica.generation:
            self.adapt()

    def next_batch(self) -> JointBatch | None:
        """Return the next batch of the epoch, divided among the current members."""
        assert self._state.batches is not None
        self.adapt_if_changed()
        return self.retry(self._state.batches.next)

    def train_step(self, batch: JointBatch, *, last: bool | None, boundary: bool) -> JointBatch:
        """Take one step, repeated until it succeeds on all members; return the batch as finally divided.

        Args:
            last: See `Stepper.train`.
            boundary: Whether members may join before this step.
        """
        stepper, batches = self._state.stepper, self._state.batches
        assert batches is not None
        while True:
            if not batches.is_current(batch):  # a callback or a collective decision has met a change
                again = self.next_batch()
                assert again is not None, "a batch that was read can be read again"
                batch = again
            # If not every step is merged, members join in `merge_notice` instead
            # (`ReplicaCoordination._sync_between_steps`).
            self._elastic.join_points.at_boundary = boundary and stepper.merges_every_step
            try:
                # The merge succeeds on all members or on none, and a step that raises leaves the state unchanged
                # (`Engine`). So it can be repeated with the same weights, divided among the remaining members.
                stepper.train(batch, last=last)
            except MembershipChangedError:
                self.adapt()
            else:
                self._precompile_for_member_loss(batch)
                return batch

    def share_chief_callbacks(self) -> None:
        """After each epoch, send the state of the chief's own callbacks to all ranks, because each may become chief."""
        # Always a collective: ranks may have been passed different callbacks (`if rank == 0: ...`).
        waiting = chief_callbacks.chief_only_callbacks(self._state.arguments.callbacks)
        own = self._states_of(waiting)
        chiefs: Any = self.retry(lambda: self._replica.broadcast_from_chief(own))
        if not self._replica.is_chief:
            restore_states(waiting, chiefs)

    def _states_of(self, chosen: Sequence[Any]) -> list[tuple[str, bytes]]:
        """Return the states of the chosen callbacks among those passed to `fit`."""
        callbacks = flatten_callbacks(self._state.arguments.callbacks)
        states = zip(callbacks, self._recorder.callback_states(), strict=True)
        return [state for callback, state in states if callback in chosen]

    def adapt(self) -> None:
        """Adapt to a new membership: divide the data again, become chief if this is rank 0, admit new members."""
        replica, elastic, state = self._replica, self._elastic, self._state
        self._generation = replica.generation
        self._reshard_inputs()
        if state.progress_bar is not None:
            state.progress_bar.replicas = replica.world_size
        # A process that joins from here on needs the entry, which a lost chief may not have published.
        if replica.is_chief and not self._acts_as_chief:
            self._acts_as_chief = True
            replica.announce_entry()
            if state.callbacks is not None:  # otherwise they are built for a chief
                self._become_chief()
        # Only inside an epoch, where all members are at the same step, which is where new members enter. The engine
        # must end so that the state is in the variables from which it is sent.
        if elastic.newcomers and state.batches is not None:
            self._model.engine.end()
            try:
                self._admit()
                changed = False
            except MembershipChangedError:
                changed = True
            self._model.engine.begin()
            if changed:  # a member, perhaps a new one, was lost while the state was sent
                self.adapt()

    def _reshard_inputs(self) -> None:
        """Divide further input among the current members."""
        part = read_part(self._replica)
        if self._state.batches is not None:
            self._state.batches.reshard()
        else:
            self._state.source.reshard(*part)
        if self._state.validation is not None:
            self._state.validation.reshard(*part)

    def _become_chief(self) -> None:
        """Start what only a chief does: progress, files."""
        state = self._state
        waiting = chief_callbacks.chief_only_callbacks(state.arguments.callbacks)
        former, learnt = state.callbacks, self._states_of(waiting)
        # These were running on this rank already, and continue.
        kept = [callback for callback in former.callbacks if callback not in waiting]
        build_fit_callbacks(self._model, state, [*kept, *waiting])
        callback_list.transfer_list_state(former, state.callbacks)
        new = [callback for callback in state.callbacks.callbacks if callback not in kept]
        callback_list.start_mid_epoch(new, state.epoch, restore=lambda: restore_states(waiting, learnt))
        if self.ends_epoch:  # how far the former chief got is unknown
            for callback in new:
                callback.on_epoch_end(state.epoch, state.logs)

    # Joining.

    def _admit(self) -> None:
        """Send the common state to joining processes. They leave again if their program is not the chief's."""
        state, payload = self._state, b""
        if self._replica.is_chief:
            position = self._recorder.position()
            position.ledger = b"" if self._recorder.ledger is None else self._recorder.ledger.encoded()
            flags = [
                state.has_batch_listeners,
                state.has_validation_batch_listeners,
                state.stop_requested,
                state.chief_adds_logs,
            ]
            payload = encode([vars(position), flags, self._describe_program()])
        self._replica.communicator.broadcast_bytes(payload)
        state.stepper.admit()

    def join(self) -> None:
        """As a candidate, wait to be admitted, and adopt the others' state.

        Raises: EntryFinishedError if the others have finished this `fit` in the meantime.
        """
        state, replica, fresh = self._state, self._replica, random_state()
        self._warm_up()
        # Once this process is admitted, the members wait for it. Hence it compiles first.
        replica.join_entry()
        content, flags = self._receive_state()
        self._elastic.needs_state = False
        self._generation = replica.generation
        self._model.mark_synchronized()
        position = FitPosition(**content)
        self._reshard_inputs()
        state.has_batch_listeners, state.has_validation_batch_listeners, state.stop_requested, state.chief_adds_logs = (
            flags
        )

        # The received state includes what callbacks do to the model when training or the epoch begins. They must still
        # run these hooks, because most create their attributes there.
        with state_sync.preserved_state(self._model.model), chief_callbacks.on_this_rank_only():
            state.callbacks.on_train_begin()
            state.callbacks.on_epoch_begin(position.epoch)
        self._recorder.restore(position, lambda: None, fresh)

    def _receive_state(self) -> tuple[Any, Any]:
        replica = self._replica
        while True:
            try:
                # The chief sends the state. A candidate that becomes rank 0 has outlived all processes that had it.
                if replica.rank == 0:
                    raise PeerLostError(
                        "All members that had the job's state were lost.", rank=0, task="chief", host=""
                    )
                content, flags, program = decode(replica.communicator.broadcast_bytes(b""))
                self._check_program(program)
                self._state.stepper.admit()
                return content, flags
            except MembershipChangedError:
                continue

    def _describe_program(self) -> list[Any]:
        """What a joining process must have in common with the members, and the findings about it."""
        model, inputs = self._model.model, [self._state.source, self._state.validation]
        given = [each for each in inputs if each is not None]
        # The variables whose values it receives.
        variables = [*state_sync.variables_of(model), *model.metrics_variables]
        described = describe_program(model, self._state.arguments, given)
        return [structure_of(variables), described, self._model.probes.findings.by_subject]

    def _check_program(self, chiefs: list[Any]) -> None:
        """Raises: DisagreementError on this process only; the members continue without it."""
        chiefs_structure, chiefs_program, chiefs_findings = chiefs
        structure, program, findings = self._describe_program()
        check_chiefs_program(chiefs_program, program)
        check_chiefs_model(chiefs_structure, structure)
        check_chiefs_findings(chiefs_findings, findings)

    # Compilation ahead of time.

    def _warm_up(self) -> None:
        """Compile the step before others wait for it. The resulting state is overwritten."""
        elastic, replica, engine = self._elastic, self._replica, self._model.engine
        if not elastic.joined_late or replica.micro_batches:
            return
        batch = self._state.source.peek()
        world_size = replica.present_entry.members + 1
        low, high = local_range(batch.global_size or batch.size, world_size - 1, world_size)
        part = _resized(batch.data, max(1, high - low))
        progress.report("compilation")
        self._model.merge.set_batch_size(batch.global_size)
        engine.begin()
        engine.train(part, 1.0 / replica.world_size)
        engine.end()
        # The trial has left residuals of arbitrary samples in the merge.
        self._model.merge.reset_compression()

    def _precompile_for_member_loss(self, batch: JointBatch) -> None:
        """Compile steps, in a thread and once per size, for the parts that this rank would have if a member were lost,
        so that the others need not wait then."""
        world_size = self._replica.world_size - 1
        if world_size == 0 or batch.micro_batches or batch.global_size in self._compiled.get(world_size, ()):
            return
        self._compiled.setdefault(world_size, set()).add(batch.global_size)
        ranges = [local_range(batch.global_size, rank, world_size) for rank in range(world_size)]
        sizes = {stop - start for start, stop in ranges} - {0, batch.size}
        engine = self._model.engine
        work = [engine.compile_ahead(_resized(batch.data, size), size / batch.global_size) for size in sorted(sizes)]
        if any(work):
            compile_in_background([part for part in work if part is not None])


def build_fit_callbacks(replica_model: ReplicaModel, state: ReplicaFitState, callbacks: Any) -> None:
    """Build the callbacks that this rank runs in a `fit`."""
    arguments = state.arguments
    built = replica_model.build_callbacks(
        callbacks, arguments.verbose, epochs=arguments.epochs, steps=state.source.num_batches, add_history=True
    )
    chief_callbacks.announce_hooks(built, state.exit_stack)
    state.use_callbacks(built)
    saver_claims.claim_paths(built, state.exit_stack, lambda: replica_model.replica.generation)


def _resized(data: Any, size: int) -> Any:
    """Resize a batch to `size` arbitrary samples."""

    def resize(array: Any) -> Any:
        return None if array is None else np.take(array, np.arange(size) % len(array), axis=0)

    return keras.tree.map_structure(resize, data)


def compile_in_background(work: Sequence[Callable[[], None]]) -> None:
    """Do this work in a thread. When the program exits, the thread finishes its current part and skips the rest: the
    interpreter would stop it inside native code, which aborts the process."""
    is_exiting = threading.Event()

    def compile_all() -> None:
        for part in work:
            if not is_exiting.is_set():
                part()
        atexit.unregister(exit_thread)

    def exit_thread() -> None:
        is_exiting.set()
        thread.join()

    thread = threading.Thread(target=compile_all, name="phalanx-compilation", daemon=True)
    atexit.register(exit_thread)
    thread.start()
