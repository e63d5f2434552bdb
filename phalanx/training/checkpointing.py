"""Checkpoints of a running `fit`: restored before its first step, written between two steps."""

from __future__ import annotations

from phalanx.training.fit_position import FitRecorder, restart_epoch
from phalanx.training.fit_resumption import FitResumption, FitSnapshot
from phalanx.training.fit_state import ReplicaFitState
from phalanx.training.replica_model import ReplicaModel
from phalanx.training.state_sync import gather_random_states
from phalanx.training.steps.stepper import RetryOnMembershipChange


class FitCheckpointing:
    """Connects a running `fit` with its checkpoints (`FitResumption`). All ranks call its methods.

    Attributes:
        saver: writes them.
    """

    def __init__(
        self,
        replica_model: ReplicaModel,
        state: ReplicaFitState,
        recorder: FitRecorder,
        resumption: FitResumption,
        retry: RetryOnMembershipChange,
    ) -> None:
        self.saver = resumption.saver
        self._resumption = resumption
        self._model = replica_model
        self._state = state
        self._recorder = recorder
        self._retry = retry

    @property
    def has_checkpoint(self) -> bool:
        """On the chief: whether there is one to resume from."""
        return self._resumption.has_checkpoint

    def restore(self) -> FitSnapshot | None:
        """Continue from the newest checkpoint and return it; None if there is none.

        Raises: ConfigurationError if the checkpoint is of other data.
        """
        state = self._state
        snapshot = self._retry(self._resumption.restore)
        if snapshot is None:
            return None
        self._resumption.check(snapshot, state.source.samples, state.source.num_batches)
        state.stepper.load_pooled(snapshot.pooled)
        restart = (lambda: restart_epoch(self._model, state)) if snapshot.position.step else None
        self._recorder.restore(snapshot.position, restart)
        return snapshot

    def save_if_due(self, *, ends_epoch: bool = False) -> None:
        """Between two steps: save, or stop, if it is time to.

        Raises: PreemptedError if the job was told to stop.
        """
        if not self._state.stepper.is_merged:
            return
        if self.saver.notice.is_preempted:
            self.saver.stop(self._snapshot, self._recorder.ledger, self._retry)
        if self.saver.is_save_due(ends_epoch=ends_epoch):
            self.saver.save(self._retry(self._snapshot), self._recorder.ledger)

    def finish(self) -> None:
        """The training is over."""
        self.saver.finish(self._retry(lambda: self._snapshot(is_over=True)), self._recorder.ledger)

    def _snapshot(self, *, is_over: bool = False) -> FitSnapshot:
        pooled = dict(self._state.stepper.pooled())
        source = self._state.source
        return FitSnapshot(
            position=self._recorder.position(),
            samples=source.samples,
            batches=source.num_batches,
            is_over=is_over,
            stopped=bool(self._model.model.stop_training),
            seed=self._resumption.seed(),
            pooled=pooled,
            random_states=gather_random_states(self._model.replica),
        )
