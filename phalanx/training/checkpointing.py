"""Checkpoints of a running `fit`: restored before its first step, written between two steps."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint.background_save import State
from phalanx.checkpoint.checkpoint_callback import write_ledger
from phalanx.data.sample_ledger import SampleLedger
from phalanx.engines.random_state import random_state
from phalanx.errors import ConfigurationError, PreemptedError
from phalanx.keras_compat.variables.host_values import host_copy
from phalanx.monitoring import timeline
from phalanx.runtime import telemetry
from phalanx.runtime.exit_codes import sendable
from phalanx.training.fit_position import FitRecorder, restart_epoch
from phalanx.training.fit_resumption import FIT_STATE_KEY, FitResumption, FitSnapshot, variables_beyond_weights
from phalanx.training.fit_state import ReplicaFitState
from phalanx.training.replica_model import ReplicaModel
from phalanx.training.steps.stepper import RetryOnMembershipChange
from phalanx.transport.serialization import encode


class FitCheckpointing:
    """Restoring and writing of a `fit`'s checkpoints. All ranks call the methods; the writer determines whether they
    write together or only the chief writes."""

    def __init__(
        self,
        replica_model: ReplicaModel,
        state: ReplicaFitState,
        recorder: FitRecorder,
        resumption: FitResumption,
        retry: RetryOnMembershipChange,
    ) -> None:
        self._model = replica_model
        self._replica = replica_model.replica
        self._state = state
        self._recorder = recorder
        self._resumption = resumption
        self._retry = retry
        # Number of epochs in the readable ledger when it was last written, by the writer thread.
        self._epochs_in_ledger = 0
        # Steps, and seconds of the monotonic clock, at the last save. All ranks record them, so that a new chief has
        # them; only the chief decides by them.
        self._last_save_step = 0
        self._last_save_time = time.monotonic()
        self._is_postponed = False  # on the chief: a save was due while another was being written

    @property
    def has_checkpoint(self) -> bool:
        """On the chief, whether there is a checkpoint to resume from."""
        return self._resumption.has_checkpoint

    def restore(self) -> FitSnapshot | None:
        """Continue from the newest checkpoint and return it; None if there is none.

        Raises: ConfigurationError if the checkpoint is of another model, or of other data.
        """
        state, fresh = self._state, random_state()
        snapshot = self._retry(self._resumption.restore)
        if snapshot is None:
            return None
        self._resumption.check(snapshot, state.source.samples, state.source.num_batches)
        state.stepper.load_combined(snapshot.pooled)
        restart = (lambda: restart_epoch(self._model, state)) if snapshot.step else None
        self._recorder.restore(snapshot, restart, fresh)
        return snapshot

    def start(self) -> None:
        """Prepare for the first step: start the intervals, and clear the notices of warm-up steps."""
        self._record_save()
        self._resumption.notice.is_preempted = self._resumption.notice.is_save_due = False

    def announce(self, *, steps: int = 0) -> None:
        """Set the notice that the next merge sends to all ranks: whether to save after this many more steps."""
        # Clocks and writers differ between ranks, so one rank decides and the merge tells all: `_snapshot` below has
        # collectives, which no rank may enter alone.
        is_due = self._replica.is_chief and self._is_due(self._recorder.applied + steps)
        self._resumption.notice.request_save(is_due and not self._resumption.writer.busy)

    def save_if_due(self, *, ends_epoch: bool = False) -> None:
        """Between two steps, save in the background or stop, if it is time to.

        Raises: PreemptedError if the job was preempted.
        """
        # Between two exchanges of local SGD, each rank has its own weights, and no rank's are the job's.
        if not self._state.stepper.is_merged:
            return
        notice, checkpoint = self._resumption.notice, self._resumption.checkpoint
        self._resumption.writer.check()
        if notice.is_preempted:
            self._stop()
        saves_each_epoch = checkpoint.every_steps is None and checkpoint.every_seconds is None
        if notice.is_save_due or (ends_epoch and saves_each_epoch):
            snapshot = self._retry(self._snapshot)
            notice.is_save_due = False
            self._record_save()
            writer = self._resumption.writer
            # If all write together, no rank may decide for itself.
            if writer.is_collective or (self._replica.is_chief and not writer.busy):
                timeline.current.enter("checkpoint")
                writer.begin(*self._writer_arguments(snapshot))
                timeline.current.leave()
            else:
                self._is_postponed = self._replica.is_chief

    def finish(self) -> None:
        """Save the final state after training is over."""
        # Before `finalize_variable_values` and `on_train_end`: with more `epochs`, the next start continues from these
        # weights, not from averaged or restored ones.
        snapshot = self._retry(lambda: self._snapshot(is_over=True))
        writer = self._resumption.writer
        if writer.is_collective or self._replica.is_chief:
            writer.wait()  # one writer at a time: names are swept below
            if self._replica.is_chief:
                self._resumption.directory.remove_partial_files()  # an earlier chief may have been killed while writing
            writer.write(*self._writer_arguments(snapshot))

    def _stop(self) -> None:
        """Save the preempted job; no rank exits before that is done."""

        def save() -> Any:
            snapshot, path, writer = self._snapshot(), None, self._resumption.writer
            if writer.is_collective or self._replica.is_chief:
                # Before the broadcast: a rank that has received the path may exit, and so end the job.
                path = writer.write(*self._writer_arguments(snapshot))
            resumes = self._describe_resumption(path) if self._replica.is_chief else ""
            return self._replica.broadcast_from_chief(sendable(resumes))

        resumes = self._retry(save)
        raise PreemptedError(f"The job was preempted after {self._recorder.applied} steps. {resumes}")

    def _describe_resumption(self, path: Any) -> str:
        """As the chief, describe where a restarted job resumes; `path` is None if its state could not be saved."""
        if path is not None:
            return f"It resumes from {path} when it is started again."
        # Not raised: the other ranks wait for this answer.
        try:
            former = self._resumption.newest()
        except (ConfigurationError, OSError) as error:
            return f"Its last state could NOT be saved, nor can those before be read: {error}"
        place = "the beginning" if former is None else former.path
        return f"Its last state could NOT be saved: started again, it resumes from {place}."

    def _record_save(self) -> None:
        self._last_save_step, self._last_save_time = self._recorder.applied, time.monotonic()
        self._is_postponed = False
        telemetry.current.is_save_requested = False

    def _is_due(self, applied: int) -> bool:
        steps, seconds = self._resumption.checkpoint.every_steps, self._resumption.checkpoint.every_seconds
        by_steps = steps is not None and applied // steps > self._last_save_step // steps
        return (
            telemetry.current.is_save_requested
            or self._is_postponed
            or by_steps
            or (seconds is not None and time.monotonic() - self._last_save_time >= seconds)
        )

    def _snapshot(self, *, is_over: bool = False) -> FitSnapshot:
        # `combined_state` has the only collectives of a checkpoint. `_writer_arguments` has none: a chief may call
        # it alone.
        pooled = dict(self._state.stepper.combined_state())
        source = self._state.source
        return FitSnapshot(
            **vars(self._recorder.position()),
            samples=source.samples,
            batches=source.num_batches,
            is_over=is_over,
            stopped=bool(self._model.model.stop_training),
            seed=self._resumption.seed(),
            pooled=pooled,
            random_states=[random_state()],
            streams=self._replica.random_streams.position,
        )

    def _writer_arguments(self, snapshot: FitSnapshot) -> tuple[Any, int, State]:
        """Return the writer's arguments: the model with its newest values, its step, and a function that does the
        remaining work in any thread, from copies of everything that changes with the next step."""
        model, ledger = self._model.model, self._recorder.ledger
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        variables = variables_beyond_weights(model)
        # Copies, made now: on JAX the next step donates the arrays, on PyTorch it writes into them.
        snapshot.variables = [host_copy(variable) for variable in variables]
        ledger_copy = None if ledger is None else ledger.snapshot()

        def finish() -> Mapping[str, Any]:
            if ledger_copy is not None:
                snapshot.ledger = ledger_copy.encoded()
                self._write_ledger(ledger_copy)
            return {FIT_STATE_KEY: base64.b64encode(encode(vars(snapshot))).decode()}

        return model, snapshot.applied, finish

    def _write_ledger(self, ledger: SampleLedger) -> None:
        if len(ledger.epochs) == self._epochs_in_ledger:
            return
        with contextlib.suppress(OSError), self._resumption.directory.claim.writing():
            write_ledger(self._resumption.ledger_path, ledger.as_dict())  # if this fails, so does the checkpoint
            self._epochs_in_ledger = len(ledger.epochs)
