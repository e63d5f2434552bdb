"""Preemption in custom training loops: `tf.distribute.experimental.PreemptionCheckpointHandler`.

Each rank watches for its own notice: a signal, or the result of a function of the program. Before each step, the ranks
agree whether one of them has notice, so all save after the same step, and exit.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import keras

from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.errors import ConfigurationError, DisagreementError, PreemptedError, UnsupportedError
from phalanx.keras_compat.variables.merged_variables import MergedOnRead
from phalanx.strategies.current_job import current_replica
from phalanx.training import state_sync
from phalanx.training.preemption import notified_by_signals
from phalanx.training.replica import Replica, single_replica

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two calls of `termination_watcher_fn`."""
SAVE_MARGIN = 3.0
"""Part of a grace period kept for the last step and for saving, as a multiple of the longest step so far."""
BASENAME = "preemption"
_RUNS = "checkpointed_runs"  # the name in TensorFlow's checkpoints


@dataclass
class TerminationConfig:
    """Announcement of a preemption, and exit of the program (`tf.distribute.experimental.TerminationConfig`).

    Args:
        termination_watcher_fn: Function that a thread calls repeatedly; returns True once the process is about to be
            preempted. None: watch for the signal SIGTERM, or PHALANX_PREEMPTION_SIGNAL.
        exit_fn: Function that every rank calls after the checkpoint is saved. None: exit the program with code 75,
            after which `phalanx run --max-restarts` restarts it.
        grace_period: Seconds between the announcement and the preemption. Training continues for most of them. None
            or 0: save after the current step.
        save_fn: Function that saves the checkpoint instead of the manager's `save`; receives the arguments of
            `save_checkpoint_if_preempted`. For a Keras model, only the chief calls it.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None


class PreemptionCheckpointHandler:
    """Saves a checkpoint for all replicas when one of them is about to be preempted, and ends the program.

        handler = phalanx.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, model, "preempted")
        for step in range(handler.total_run_calls, STEPS):
            handler.run(train_step, batches[step])

    The constructor restores the last saved checkpoint. Create the handler on all replicas, after the model is built,
    and call `run` equally often on each.

    Args:
        cluster_resolver: Ignored; accepted for compatibility with TensorFlow. The process has already joined its job.
        checkpoint_or_checkpoint_manager: A Keras model, on any backend: the chief saves and restores its weights and
            optimizer, and sends them to the other replicas. Or a `tf.train.Checkpoint` or `CheckpointManager`, which
            each replica restores itself, so its directory must be shared.
        checkpoint_dir: Directory of the checkpoint; not for a `CheckpointManager`, which has its own.
        termination_config: Announcement of a preemption, and exit of the program.

    Raises:
        ConfigurationError: an argument does not fit, or the checkpoint is of another model.
        DisagreementError: replicas restored different checkpoints.
        UnsupportedError: the job is elastic, or one program spans several processes.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._replica = current_replica() or single_replica()
        if self._replica.elastic is not None or self._replica.mesh_parts is not None:
            raise UnsupportedError(
                "PreemptionCheckpointHandler is for replicas whose number is fixed. In elastic jobs, members may leave "
                "without it; where one program spans several processes, save with phalanx.ShardedCheckpoint."
            )
        self._config = termination_config or TerminationConfig()
        self._state = _checkpointed_state(checkpoint_or_checkpoint_manager, checkpoint_dir, self._replica)
        self._runs = self._state.restore()  # completed runs, including those before a restart
        # Replicas with separate directories would resume at different steps, each as if it were alone.
        restored = self._replica.gather(self._runs)
        if len(set(restored)) > 1:
            raise DisagreementError(
                f"The replicas restored checkpoints of different numbers of steps: {restored}, by rank. Pass a "
                f"checkpoint_dir that all of them share."
            )
        self._notice = _PreemptionNotice(self._config.grace_period or 0.0)
        self._watches = ExitStack()
        self._watch()

    @property
    def total_run_calls(self) -> int:
        """Number of calls of `run`, including those before the program was restarted."""
        return self._runs

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save and exit if a replica is about to be preempted; else call the function, and return its result.

        Raises: PreemptedError, which ends the program, unless `exit_fn` is given.
        """
        self.save_checkpoint_if_preempted()
        started_at = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._notice.note_duration(time.monotonic() - started_at)
        self._runs += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and exit as `run` does, for custom calls of the function. Call this before each step, on all replicas.

        Args:
            args: Arguments of `save_fn`.
            kwargs: Keyword arguments of `save_fn`.
        """
        # A collective before each step: each rank gets notice at a different time, or not at all.
        if not self._replica.any(self._notice.is_time_to_save()):
            return
        self._watches.close()
        self._state.save(self._runs, self._config.save_fn, args, kwargs)
        self._replica.any(True)  # no replica exits before the checkpoint is written
        if self._config.exit_fn is None:
            raise PreemptedError(
                f"The job was preempted after {self._runs} steps. It resumes when the program is started again."
            )
        self._config.exit_fn()
        self._notice = _PreemptionNotice(self._config.grace_period or 0.0)  # `exit_fn` returned: the program continues
        self._watch()

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Context around training, after which the process no longer watches for a preemption."""
        try:
            yield
        finally:
            self._watches.close()

    def _watch(self) -> None:
        watcher = self._config.termination_watcher_fn
        if watcher is None:
            self._watches.enter_context(notified_by_signals(self._notice.signal))
        else:
            self._watches.enter_context(_polling(watcher, self._notice))


class _PreemptionNotice:
    """Notice that this rank is about to be preempted, and the time to save."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._longest_s = 0.0  # of the steps so far
        self._since: float | None = None  # on the monotonic clock; a single assignment, so no lock is needed

    def signal(self) -> None:
        """Record that this rank got notice. A signal handler may call this."""
        if self._since is None:
            self._since = time.monotonic()

    def note_duration(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._longest_s = max(self._longest_s, seconds)

    def is_time_to_save(self) -> bool:
        """Whether it is time to save."""
        if self._since is None:
            return False
        return time.monotonic() - self._since + SAVE_MARGIN * self._longest_s >= self._grace_s


@contextmanager
def _polling(watcher: Callable[[], bool], notice: _PreemptionNotice) -> Iterator[None]:
    """Context in which a thread calls the program's function repeatedly."""
    stop = threading.Event()

    def watch() -> None:
        failure = ""
        while not stop.wait(POLL_S):
            try:
                is_announced = watcher()
            except Exception as error:  # a server that does not respond for a moment must not end the watch
                if failure != (failure := repr(error)):
                    logger.warning("termination_watcher_fn raised %s. It is called again.", failure)
                continue
            if is_announced:
                notice.signal()
                return

    thread = threading.Thread(target=watch, name="phalanx-termination-watcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()


class _CheckpointedState(Protocol):
    def restore(self) -> int:
        """Restore the saved state, and return its number of steps; 0 if there is none."""
        ...

    def save(self, runs: int, save_fn: Callable[..., Any] | None, args: Any, kwargs: Any) -> None:
        """Save this rank's part of the state."""
        ...


def _checkpointed_state(given: Any, directory: str | os.PathLike[str] | None, replica: Replica) -> _CheckpointedState:
    is_manager = hasattr(given, "latest_checkpoint")
    if not is_manager and not directory:
        raise ConfigurationError("Pass checkpoint_dir, where the checkpoint is saved when the job is preempted.")
    if isinstance(given, keras.Model):
        assert directory is not None
        return _ModelState(given, CheckpointDirectory(directory, basename=BASENAME, keep=1), replica)
    if not is_manager and not hasattr(given, "restore"):
        raise ConfigurationError(
            f"checkpoint_or_checkpoint_manager is {given!r}; pass a Keras model, or a tf.train.Checkpoint or "
            f"CheckpointManager."
        )
    train: Any = importlib.import_module("tensorflow").train
    manager = given if is_manager else train.CheckpointManager(given, str(directory), max_to_keep=1)
    return _TensorFlowState(manager, replica)


class _ModelState:
    """State of a Keras model: the chief reads and writes the files, and sends their content to the others."""

    def __init__(self, model: Any, directory: CheckpointDirectory, replica: Replica) -> None:
        self._model = model
        self._directory = directory
        self._replica = replica

    def restore(self) -> int:
        optimizer = self._model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        found = self._directory.restore(self._model) if self._replica.is_chief else None
        runs: Any = self._replica.broadcast_from_chief(0 if found is None else found.step)
        state_sync.synchronize(self._model, self._replica)
        state_sync.seed_per_rank(self._replica)
        return int(runs)

    def save(self, runs: int, save_fn: Callable[..., Any] | None, args: Any, kwargs: Any) -> None:
        if self._replica.is_chief:
            if save_fn is not None:
                save_fn(*args, **kwargs)
            self._directory.save(self._model, runs)
            self._directory.claim.release()


class _TensorFlowState:
    """State of a `tf.train.CheckpointManager`, which also saves the number of steps. The chief saves; the others take
    part if saving merges variables."""

    def __init__(self, manager: Any, replica: Replica) -> None:
        tf: Any = importlib.import_module("tensorflow")
        self._manager = manager
        self._saved_objects = tf.train.TrackableView(manager.checkpoint).descendants
        self._replica = replica
        self._runs = tf.Variable(0, dtype=tf.int64, trainable=False, name=_RUNS)
        setattr(manager.checkpoint, _RUNS, self._runs)

    def restore(self) -> int:
        path = self._manager.latest_checkpoint
        if path is not None:
            self._manager.checkpoint.restore(path)
        return int(self._runs.numpy())

    def save(self, runs: int, save_fn: Callable[..., Any] | None, args: Any, kwargs: Any) -> None:
        self._runs.assign(runs)
        if self._replica.is_chief:
            Path(self._manager.directory).mkdir(parents=True, exist_ok=True)
            (save_fn or self._manager.save)(*args, **kwargs)
        elif any(isinstance(each, MergedOnRead) for each in self._saved_objects()):
            # Saving such a variable merges it: the chief waits for the others in this collective.
            with TemporaryDirectory() as discarded:
                self._manager.checkpoint.write(str(Path(discarded, _RUNS)))
