"""`ManagedSession`: a model that is trained under a supervisor.

All that a session does by itself happens in the thread that trains, at step boundaries: after a batch of `fit`, after
`train_on_batch`, and where a loop of one's own asks `should_stop()`. So what is saved is of one step: a thread beside
the training would read some variables before and some after an update, and on JAX none at all, since a compiled step
consumes them. What other threads want saved waits for the next boundary.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
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
from phalanx.supervisor.looper_threads import LooperThreads
from phalanx.training import model_dispatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionServices:
    """What a session does by itself, on the chief.

    Attributes:
        checkpoints: where it saves; None: nowhere.
        save_every_s: 0: only when it is asked to.
        writer: of event files; None: no summaries.
        summarise_every_s: between two notes of the steps per second.
    """

    checkpoints: CheckpointDirectory | None = None
    save_every_s: float = 0.0
    writer: EventWriter | None = None
    summarise_every_s: float = 0.0


class ManagedSession:
    """A model under a supervisor: what `Supervisor.managed_session` gives.

    Attributes:
        model: that is trained.
        is_chief: whether this process saves.
        restored: the checkpoint that the model started from; None if it started anew, or if another process restored.
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
        self._directory = services.checkpoints
        self._loops = loops
        self._read_step = read_step
        self._thread = threading.get_ident()
        self._fits = 0
        self._epoch = 0
        self._fitting = False
        self._step = 0
        self._saved_at = self._summarised_at = time.monotonic()
        self._summarised_step = 0
        self._lock = threading.Lock()  # protects the two that follow
        self._requests: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    # What the program may ask and do.

    @property
    def global_step(self) -> int:
        """How many steps the model has made, those before it was restored included."""
        if self._reads_at_once:
            self._step = self._read_step()
        elif self._is_ours:
            sync_jax_state(self.model)
            self._step = self._read_step()
        return self._step

    def should_stop(self) -> bool:
        """Whether somebody has asked to stop. In a loop of one's own, ask once for each step: what is due is saved
        then."""
        if self._is_ours and not self._fitting:
            self.boundary()
        return self._loops.should_stop()

    def save(self, save_path: str | os.PathLike[str] | None = None, global_step: int | None = None) -> Path | None:
        """See `Saver.save`."""
        if not self.is_chief:
            return None
        if not self._is_ours:
            path: Path | None = self._at_boundary(lambda: self.save(save_path, global_step))
            return path
        directory = self._directory_of(save_path)
        progress.enter("checkpoint")
        with timeline.current.span(timeline.CHECKPOINTS, "checkpoint"):
            model_dispatch.update_variables(self.model)
            step = self.global_step if global_step is None else int(global_step)
            written = directory.save(self.model, step, {"fits": self._fits, "epoch": self._epoch})
        self._saved_at = time.monotonic()
        logger.info("Saved step %d to %s.", step, written)
        return written

    def restore(self, save_path: str | os.PathLike[str]) -> None:
        """See `Saver.restore`."""
        if self._fitting:
            raise ConfigurationError("restore() in the middle of fit() would be undone by it: call it before.")
        try:
            checkpoint = checkpoint_directory.read(Path(save_path))
        except checkpoint_directory.DamagedCheckpointError as error:
            raise ConfigurationError(f"{error} Give another one, or none to take the newest that is whole.") from error
        checkpoint_directory.load(self.model, checkpoint.path)
        self.restored = checkpoint

    def summarise(self, values: Mapping[str, Any], global_step: int | None = None) -> None:
        """Note numbers for TensorBoard, where this process writes event files."""
        writer = self._services.writer
        if writer is not None:
            writer.scalars(values, self.global_step if global_step is None else int(global_step))

    # What the supervisor does.

    def begin(self, restored: StoredCheckpoint | None) -> None:
        """The model has its first values."""
        self.restored = restored
        self._step = self._summarised_step = self.global_step

    def boundary(self) -> None:
        """Between two steps, in the session's thread: do what is due."""
        self.serve()
        services, now = self._services, time.monotonic()
        if services.save_every_s and now - self._saved_at >= services.save_every_s:
            self._saved_at = now
            try:
                self.save()
            except OSError as error:  # a disk that is full now may not be so later; the last save of all does raise
                logger.warning("%s. Training goes on; the next attempt is in %g s.", error, services.save_every_s)
        if services.summarise_every_s and now - self._summarised_at >= services.summarise_every_s:
            rate = (self._step - self._summarised_step) / (now - self._summarised_at)
            self._summarised_at, self._summarised_step = now, self._step
            self._note({"global_step/sec": rate}, self._step)

    def _note(self, values: Mapping[str, Any], step: int) -> None:
        """Write to the event file what nobody asked for; a disk that is full is no reason to end the training."""
        try:
            self.summarise(values, step)
        except OSError as error:
            logger.warning("No more is written to the event file of this session: %s.", error)
            self._services = replace(self._services, writer=None, summarise_every_s=0.0)

    def serve(self) -> None:
        """Do what other threads have asked for."""
        while self._requests:
            with self._lock:
                future, function = self._requests.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def finish(self) -> None:
        """The program is through without an error: save what it has reached."""
        if self._services.save_every_s:
            self.save()

    def close(self) -> None:
        """Take no more requests; those that wait end with an error. Safe to call twice."""
        with self._lock:
            self._closed = True
            requests, self._requests = self._requests, deque()
        for future, _ in requests:
            future.cancel()

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """Methods that override those of the model while the session is open, by name."""
        model = self.model
        return {"fit": self._around_fit(model.fit), "train_on_batch": self._around_batch(model.train_on_batch)}

    def _around_fit(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(fit).parameters)

        @functools.wraps(fit)
        def accompanied(*args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            callbacks = arguments.get("callbacks") or []
            callbacks = getattr(callbacks, "callbacks", callbacks)  # a CallbackList
            arguments["callbacks"] = [
                _Epochs(self),
                *(callbacks if isinstance(callbacks, Sequence) else [callbacks]),
                _Steps(self),
                _Boundaries(self),
                _Stop(self._loops),
            ]
            self._epoch = self._first_epoch(arguments.get("initial_epoch", 0), arguments.get("epochs", 1))
            arguments["initial_epoch"] = self._epoch
            self._fits += 1
            self._fitting = True
            try:
                return fit(**arguments)
            finally:
                self._fitting = False

        return accompanied

    def _around_batch(self, train_on_batch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_on_batch)
        def accompanied(*args: Any, **kwargs: Any) -> Any:
            result = train_on_batch(*args, **kwargs)
            self.trained(1)
            self.boundary()
            return result

        return accompanied

    def _first_epoch(self, initial: int, epochs: int) -> int:
        """With which epoch a call of `fit` begins: one that the checkpoint is of goes on there, one before it in the
        program has been made."""
        state = {} if self.restored is None else self.restored.state
        fits = int(state.get("fits", 0))
        if self._fits + 1 > fits:
            return initial
        return epochs if self._fits + 1 < fits else max(initial, int(state.get("epoch", 0)))

    # What happens in `fit`.

    def trained(self, steps: int) -> None:
        """After so many batches."""
        self._step = self._read_step() if self._reads_at_once else self._step + steps

    def enter_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def note_epoch(self, logs: Mapping[str, Any]) -> None:
        """At the end of an epoch."""
        if self._services.writer is not None and logs:
            self._note({f"epoch_{name}": value for name, value in logs.items()}, self.global_step)
        self.boundary()

    @property
    def has_directory(self) -> bool:
        """Whether there is a place where it saves by itself."""
        return self._directory is not None

    @property
    def _reads_at_once(self) -> bool:
        """Whether the step may be looked at after every batch: with parameter servers it is a number of this process,
        else a variable, which JAX would have to fetch out of its loop."""
        return model_dispatch.is_server_worker(self.model)

    @property
    def _is_ours(self) -> bool:
        return threading.get_ident() == self._thread

    def _directory_of(self, save_path: str | os.PathLike[str] | None) -> CheckpointDirectory:
        if save_path is not None:
            path = Path(save_path)
            own = self._directory
            if own is not None and own.is_at(path):
                return own
            return CheckpointDirectory(path.parent, basename=path.name)
        if self._directory is None:
            raise ConfigurationError("The supervisor has no logdir: give save() a path, such as 'runs/model.ckpt'.")
        return self._directory

    def _at_boundary(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("The managed session is over: nothing can be saved any more.")
            self._requests.append((future, function))
        bound_s = JobConfig.from_environment().timeout_s
        try:
            return future.result(bound_s)
        except CancelledError:
            raise RuntimeError("The managed session ended before it came to a step boundary.") from None
        except TimeoutError:
            if future.cancel():
                raise TimeoutError(
                    f"No step ended within {bound_s:g} s (PHALANX_TIMEOUT), so nothing could be saved. In a loop of "
                    f"one's own, ask should_stop() once for each step."
                ) from None
            return future.result()  # it is being done


class _Epochs(ChiefCallback):
    """Tells the session of the chief which epoch is to be made next; before the program's callbacks, which may save."""

    def __init__(self, session: ManagedSession) -> None:
        super().__init__()
        self._session = session

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._session.enter_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._session.enter_epoch(epoch + 1)


class _Steps(BatchListener):
    """Counts the steps for other threads, on every worker."""

    def __init__(self, session: ManagedSession) -> None:
        super().__init__()
        self._session = session

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.trained(int(self._session.model.steps_per_execution))


class _Boundaries(ChiefCallback):
    """Tells the session of the chief that a step or an epoch has ended."""

    def __init__(self, session: ManagedSession) -> None:
        super().__init__()
        self._session = session
        self.saves = session.has_directory

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.boundary()
        if self._session.should_stop():
            self.model.stop_training = True  # of `self.model` JAX makes copies: only when it must be

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._session.note_epoch(logs or {})


class _Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends `fit` with the epoch in which a stop was asked for, on any worker."""

    def __init__(self, loops: LooperThreads) -> None:
        super().__init__()
        self._loops = loops

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._loops.should_stop():
            self.model.stop_training = True
            model_dispatch.request_stop(self.model)
