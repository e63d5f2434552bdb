"""`ManagedSession`: a model that is trained under a supervisor.

A session acts only in the training thread, at step boundaries: after a batch of `fit`, after `train_on_batch`, and when
a custom training loop calls `should_stop()`. A checkpoint therefore belongs to one step. Another thread would read some
variables before an update and some after it, and on JAX none at all, since a compiled step consumes them. Requests from
other threads wait for the next boundary.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from phalanx.checkpoint import checkpoint_directory
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory, StoredCheckpoint
from phalanx.config.job_config import JobConfig
from phalanx.errors import ConfigurationError
from phalanx.keras_compat.callback_bases import BatchListener, ChiefCallback
from phalanx.keras_compat.model_state import sync_jax_state
from phalanx.monitoring import timeline
from phalanx.monitoring.event_writer import EventWriter
from phalanx.runtime import progress
from phalanx.storage.paths import StoragePath, storage_path
from phalanx.supervisor.boundary_requests import BoundaryRequests
from phalanx.supervisor.looper_threads import LooperThreads
from phalanx.training import model_dispatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionServices:
    """The standard services of a session, on the chief.

    Attributes:
        checkpoints: The directory for checkpoints; None saves nothing.
        save_every_s: Seconds between two checkpoints; 0 saves only on request.
        writer: Writes event files; None writes no summaries.
        summarize_every_s: Seconds between two summaries of the steps per second.
    """

    checkpoints: CheckpointDirectory | None = None
    save_every_s: float = 0.0
    writer: EventWriter | None = None
    summarize_every_s: float = 0.0


@dataclass
class FitProgress:
    """Progress of a program through its calls of `fit`, and through the epochs of the current one.

    Attributes:
        calls: Number of calls of `fit` that have begun.
        epoch: The next epoch to train.
        is_running: Whether a `fit` is running.
    """

    calls: int = 0
    epoch: int = 0
    is_running: bool = False

    def begin(self, restored: Mapping[str, Any], initial: int, epochs: int) -> int:
        """Begin a call of `fit` and return its first epoch.

        Args:
            restored: State from the checkpoint that the session started from. A call that finished before that
                checkpoint is skipped; a call that was running continues at its epoch.
        """
        self.calls += 1
        saved_calls = int(restored.get("fits", 0))
        if self.calls > saved_calls:
            self.epoch = initial
        elif self.calls < saved_calls:
            self.epoch = epochs
        else:
            self.epoch = max(initial, int(restored.get("epoch", 0)))
        self.is_running = True
        return self.epoch


class ManagedSession:
    """A model under a supervisor, as `Supervisor.managed_session` yields it.

    Attributes:
        model: The model that is trained.
        is_chief: Whether this process saves.
        restored: The checkpoint that the model started from; None if there was none, or if another process restored it.
        requests: Requests of other threads, for the next step boundary.
        progress: Progress of the program through its calls of `fit`.
        checkpoints: The checkpoint directory, if the session has one. Only the chief writes to it.
    """

    def __init__(
        self,
        model: Any,
        *,
        is_chief: bool,
        services: SessionServices,
        loops: LooperThreads,
        read_step: Callable[[], int],
    ):
        self.model = model
        self.is_chief = is_chief
        self.restored: StoredCheckpoint | None = None
        self._services = services if is_chief else SessionServices()
        self.checkpoints = services.checkpoints
        self._writer = services.writer  # kept for `close` even after it failed; None on all but the chief
        self._loops = loops
        self._read_step = read_step  # reads variables: only in the training thread; see `_reads_at_once`
        self._thread = threading.get_ident()  # the training thread
        self.requests = BoundaryRequests()
        self.progress = FitProgress()
        self._step = 0  # as last read or counted; the value for other threads
        self._saved_at = self._summarized_at = time.monotonic()
        self._summarized_step = 0  # `_step` at the last summary

    # The program's interface.

    @property
    def global_step(self) -> int:
        """Number of steps that the model has trained, including those before it was restored."""
        if self._reads_at_once:
            self._step = self._read_step()
        elif self.is_training_thread:
            sync_jax_state(self.model)
            self._step = self._read_step()
        return self._step

    def should_stop(self) -> bool:
        """Whether a stop was requested. In a custom training loop, call this once per step: it saves a checkpoint if
        one is due."""
        if self.is_training_thread and not self.progress.is_running:
            self.boundary()
        return self._loops.should_stop()

    def save(
        self, save_path: str | os.PathLike[str] | None = None, global_step: int | None = None
    ) -> StoragePath | None:
        """See `Saver.save`."""
        if not self.is_chief:
            return None
        if not self.is_training_thread:
            timeout_s = JobConfig.from_environment().timeout_s
            path: StoragePath | None = self.requests.call(lambda: self.save(save_path, global_step), timeout_s)
            return path
        directory = self._directory_of(save_path)
        progress.enter("checkpoint")
        with timeline.current.span(timeline.CHECKPOINTS, "checkpoint"):
            model_dispatch.update_variables(self.model)
            step = self.global_step if global_step is None else int(global_step)
            try:
                written = directory.save(self.model, step, {"fits": self.progress.calls, "epoch": self.progress.epoch})
            finally:
                if directory is not self.checkpoints:
                    directory.claim.release()
        self._saved_at = time.monotonic()
        logger.info("Saved step %d to %s.", step, written)
        return written

    def restore(self, save_path: str | os.PathLike[str]) -> None:
        """See `Saver.restore`."""
        if self.progress.is_running:
            raise ConfigurationError("restore() in the middle of fit() would be undone by it: call it before.")
        try:
            checkpoint = checkpoint_directory.read(storage_path(save_path, "save_path"))
        except checkpoint_directory.DamagedCheckpointError as error:
            raise ConfigurationError(
                f"{error} Give another one, or none to restore the newest complete one."
            ) from error
        checkpoint_directory.load(self.model, checkpoint.path)
        self.restored = checkpoint

    def summarise(self, values: Mapping[str, Any], global_step: int | None = None) -> None:
        """Write scalars for TensorBoard, if this process writes event files."""
        writer = self._services.writer
        if writer is not None:
            writer.scalars(values, self.global_step if global_step is None else int(global_step))

    # The supervisor's interface.

    def begin(self, restored: StoredCheckpoint | None) -> None:
        """Begin the session: the model has its initial values."""
        self.restored = restored
        self._step = self._summarized_step = self.global_step

    def boundary(self) -> None:
        """Save and summarize what is due. Called in the training thread, between two steps."""
        self.requests.serve()
        services, now = self._services, time.monotonic()
        if services.save_every_s and now - self._saved_at >= services.save_every_s:
            self._saved_at = now  # even if the attempt fails, or the next step would retry
            try:
                self.save()
            except OSError as error:  # the disk may have space later; the last save raises
                logger.warning("%s. Training continues; the next attempt is in %g s.", error, services.save_every_s)
        if services.summarize_every_s and now - self._summarized_at >= services.summarize_every_s:
            rate = (self._step - self._summarized_step) / (now - self._summarized_at)
            self._summarized_at, self._summarized_step = now, self._step
            self._write_automatic_summary({"global_step/sec": rate}, self._step)

    def _write_automatic_summary(self, values: Mapping[str, Any], step: int) -> None:
        """Write a summary that the program did not ask for. A full disk must not end the training."""
        try:
            self.summarise(values, step)
        except OSError as error:
            logger.warning("Nothing more is written to the event file of this session: %s.", error)
            self._services = replace(self._services, writer=None, summarize_every_s=0.0)

    def finish(self) -> None:
        """Save the last step. Called if the program ended without an error."""
        if self._services.save_every_s:
            self.save()

    def close(self) -> None:
        """Refuse further requests, release the directory to other processes, and close the event file. Safe to call
        twice."""
        self.requests.close()
        if self.checkpoints is not None:
            self.checkpoints.claim.release()
        if self._writer is not None:
            self._writer.close()

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """Methods that override those of the model while the session is open, by name."""
        model = self.model
        return {"fit": self._wrap_fit(model.fit), "train_on_batch": self._wrap_train_on_batch(model.train_on_batch)}

    def _wrap_fit(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(fit).parameters)

        @functools.wraps(fit)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            callbacks = arguments.get("callbacks") or []
            callbacks = getattr(callbacks, "callbacks", callbacks)  # a CallbackList
            # The program's callbacks run after `_Epochs`, since they may save with the epoch, and before `_Boundaries`,
            # so that a checkpoint includes their changes.
            arguments["callbacks"] = [
                _Epochs(self),
                *(callbacks if isinstance(callbacks, Sequence) else [callbacks]),
                _Steps(self),
                _Boundaries(self),
                _Stop(self._loops),
            ]
            restored = {} if self.restored is None else self.restored.state
            first = self.progress.begin(restored, arguments.get("initial_epoch", 0), arguments.get("epochs", 1))
            arguments["initial_epoch"] = first
            try:
                return fit(**arguments)
            finally:
                self.progress.is_running = False

        return wrapper

    def _wrap_train_on_batch(self, train_on_batch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_on_batch)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = train_on_batch(*args, **kwargs)
            self.trained(1)
            self.boundary()
            return result

        return wrapper

    # Called by the callbacks of `fit`.

    def trained(self, steps: int) -> None:
        """Count finished steps."""
        # Counted, not read: reading would make JAX wait for the step. `global_step` corrects the count.
        self._step = self._read_step() if self._reads_at_once else self._step + steps

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Write the epoch's summaries and run its boundary."""
        if self._services.writer is not None and logs:
            self._write_automatic_summary({f"epoch_{name}": value for name, value in logs.items()}, self.global_step)
        self.boundary()

    @property
    def _reads_at_once(self) -> bool:
        """Whether reading the step after every batch is cheap. With parameter servers, the step is a number in this
        process; otherwise it is a variable, which JAX would have to fetch from its loop."""
        return model_dispatch.is_server_worker(self.model)

    @property
    def is_training_thread(self) -> bool:
        """Whether the caller runs in the training thread."""
        return threading.get_ident() == self._thread

    def _directory_of(self, save_path: str | os.PathLike[str] | None) -> CheckpointDirectory:
        if save_path is not None:
            path = storage_path(save_path, "save_path")
            own = self.checkpoints
            if own is not None and own.is_at(path):
                return own
            return CheckpointDirectory(path.parent, basename=path.name)
        if self.checkpoints is None:
            raise ConfigurationError("The supervisor has no logdir: give save() a path, such as 'runs/model.ckpt'.")
        return self.checkpoints


class _Epochs(ChiefCallback):
    """Tracks the next epoch on the chief. Runs before the program's callbacks, which may save."""

    def __init__(self, session: ManagedSession) -> None:
        super().__init__()
        self._session = session

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._session.progress.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._session.progress.epoch = epoch + 1


class _Steps(BatchListener):
    """Counts steps on every worker, for other threads."""

    def __init__(self, session: ManagedSession) -> None:
        super().__init__()
        self._session = session

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.trained(int(self._session.model.steps_per_execution))


class _Boundaries(ChiefCallback):
    """Runs the chief's step boundaries."""

    def __init__(self, session: ManagedSession) -> None:
        super().__init__()
        self._session = session
        self.saves = session.checkpoints is not None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.boundary()
        if self._session.should_stop():
            self.model.stop_training = True  # on JAX, touching `self.model` copies its state, so only when needed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._session.end_epoch(logs or {})


class _Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends `fit` with the epoch in which any worker requested a stop."""

    def __init__(self, loops: LooperThreads) -> None:
        super().__init__()
        self._loops = loops

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._loops.should_stop():
            self.model.stop_training = True
            model_dispatch.request_stop(self.model)
