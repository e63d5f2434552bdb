"""`SidecarEvaluator`: evaluates checkpoints while the job runs, like the former `tf.keras.utils.SidecarEvaluator`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from phalanx.cluster.resolvers.auto_resolver import as_resolver
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.spec import EVALUATOR
from phalanx.config.environment_variables import RENDEZVOUS_TIMEOUT
from phalanx.config.job_config import JobConfig
from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.evaluator import best_checkpoint, completion_marker
from phalanx.evaluator.best_checkpoint import BestCheckpoint
from phalanx.evaluator.checkpoint_watcher import CheckpointWatcher, FoundCheckpoint
from phalanx.evaluator.job_end_detector import JobEndDetector, JobProbe
from phalanx.keras_compat.model_state import inner_optimizer
from phalanx.monitoring.event_writer import EventWriter
from phalanx.runtime import progress
from phalanx.storage.paths import is_url, storage_path
from phalanx.storage.temporary_directory import temporary_directory
from phalanx.training.steps.optimizer_properties import set_step_count

logger = logging.getLogger(__name__)

POLL_S = 0.25
STORE_POLL_S = 5.0
"""Intervals between two listings of the directory; listings of an object store cost money."""
DEFAULT_PATIENCE_S = 3600.0
"""An hour: longer than the usual time between two checkpoints."""
LOGS = "validation"
"""Subdirectory of event files, named as in Keras's `TensorBoard`."""


class SidecarEvaluator:
    """Evaluates each new checkpoint of a training job, in a separate process, until the job is over.

    >>> strategy = phalanx.MultiWorkerMirroredStrategy()  # doctest: +SKIP
    >>> if strategy.cluster_resolver.task_type == "evaluator":  # doctest: +SKIP
    ...     phalanx.SidecarEvaluator(model, (x_test, y_test), "runs/1").start()
    ... else:
    ...     model.fit(x, y, callbacks=[keras.callbacks.ModelCheckpoint("runs/1/{epoch}.weights.h5",
    ...                                                                save_weights_only=True)])

    It starts with the newest checkpoint and then evaluates each later one, in the order of writing. A checkpoint that
    is deleted before its turn is skipped. It reads the files of a `Supervisor`, and those of Keras's `ModelCheckpoint`
    and `BackupAndRestore`: `.weights.h5` and `.keras`.

    Args:
        model: A built and compiled model, the same as in training.
        data: Data for `model.evaluate`: a dataset, or a tuple `(x, y)` or `(x, y, sample_weight)`. It is read once for
            each checkpoint.
        checkpoint_dir: Directory in which the chief saves.
        steps: Number of batches in each evaluation; None for all.
        max_evaluations: Number of evaluations after which to stop; None to stop with the job.
        callbacks: Keras callbacks for `evaluate`; `model.optimizer.iterations` is the step of the checkpoint.
        log_dir: Directory for event files; `evaluation_<metric>_vs_iterations` is in its subdirectory `validation`.
        monitor: The metric that selects the best checkpoint, kept as `best_evaluation.*` in `checkpoint_dir`; None
            keeps none.
        mode: "min", "max" or "auto".
        batch_size: See `model.evaluate`.
        verbose: See `model.evaluate`.
        cluster_resolver: Source of the cluster and this task; None for the default of strategies.
        patience_s: Seconds without a new checkpoint after which the job counts as over, if no port shows whether it
            continues (one worker started manually, no cluster).

    Attributes:
        evaluations: Number of evaluations so far.
        best: The value of `monitor` of the best checkpoint; None if there is none.

    Raises: ConfigurationError if an argument is invalid, or the package for `log_dir` is not installed.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Any = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        monitor: str | None = "loss",
        mode: str = "auto",
        batch_size: int | None = None,
        verbose: Any = 2,
        cluster_resolver: ClusterResolver | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
    ):
        if max_evaluations is not None and max_evaluations < 1:
            raise ConfigurationError(f"max_evaluations is {max_evaluations}; write a number from 1 up, or None.")
        if patience_s <= 0:
            raise ConfigurationError(f"patience_s is {patience_s}; write a number of seconds above 0.")
        if not getattr(model, "compiled", False) or not model.built:
            raise ConfigurationError(
                "The evaluator's model must be built (keras.Input(shape), or model.build(shape)) and compiled with a "
                "loss or metrics, as in training."
            )
        self._model = model
        self._data = data
        self._directory = storage_path(checkpoint_dir, "checkpoint_dir")
        if self._directory.exists() and not self._directory.is_dir():
            raise ConfigurationError(
                f"checkpoint_dir is {str(self._directory)!r}, which is a file, and not a directory."
            )
        self._poll_s = STORE_POLL_S if is_url(checkpoint_dir) else POLL_S
        self._steps = steps
        self._max_evaluations = max_evaluations
        self._callbacks = callbacks
        self._batch_size = batch_size
        self._verbose = verbose
        self._patience_s = patience_s
        resolver = as_resolver(cluster_resolver)
        self._spec, self._task = resolver.cluster_spec(), resolver.task()
        if self._spec and self._task is not None and self._task.type != EVALUATOR:
            raise ConfigurationError(
                f"This process is {self._task}, a training task: as an evaluator, it would wait for its own end. "
                f"Start it as a task of type 'evaluator' (`phalanx run --evaluator`, or task.type in TF_CONFIG)."
            )
        self._writer = None if log_dir is None else EventWriter(storage_path(log_dir, "log_dir") / LOGS)
        self._best = None if monitor is None else BestCheckpoint(self._directory, model, monitor, mode)
        self.evaluations = 0

    @property
    def best(self) -> float | None:
        """The best value of `monitor` so far; None without a monitor or before the first evaluation."""
        return None if self._best is None else self._best.value

    def start(self) -> None:
        """Evaluate until the job is over, or `max_evaluations` times.

        Raises:
            RendezvousError: neither the job nor a checkpoint appeared in time.
            ConfigurationError: the checkpoints belong to another model, or the metric `monitor` does not exist.
            OSError: the best checkpoint cannot be written.
        """
        config = JobConfig.from_environment()
        end = JobEndDetector(config, self._patience_s, time.monotonic())
        probe = JobProbe(self._spec, self._task, config, time.monotonic)
        over = False
        with temporary_directory() as copies:
            watch = CheckpointWatcher(self._directory, copies, ignored=best_checkpoint.NAME)
            try:
                while self.evaluations != self._max_evaluations:
                    found = watch.next()
                    if found is not None:
                        end.record_checkpoint(time.monotonic())
                        self._evaluate(found, watch)
                        continue
                    # The last files of a finished job may still be incomplete or too recent.
                    if over and not watch.pending:
                        break
                    progress.report("waits for a checkpoint")
                    over = over or end.is_over(
                        probe.probe(), time.monotonic(), has_marker=completion_marker.has_marker(self._directory)
                    )
                    time.sleep(self._poll_s)
            finally:
                if self._best is not None:
                    self._best.close()
                if self._writer is not None:
                    self._writer.close()
        if self.evaluations == 0:
            self._explain(end, probe, config)
        logger.info("Evaluated %d checkpoints of %s.", self.evaluations, self._directory)

    def _explain(self, end: JobEndDetector, probe: JobProbe, config: JobConfig) -> None:
        """Explain why there was nothing to evaluate: raise an error if the job never appeared, else warn."""
        hint = f" ({probe.last_error})" if probe.last_error else ""
        if end.has_seen_nothing and not completion_marker.has_marker(self._directory):
            raise RendezvousError(
                f"Neither the chief of the job nor a checkpoint in {self._directory} came within "
                f"{config.rendezvous_timeout_s:g} s ({RENDEZVOUS_TIMEOUT}){hint}. Is the training started, with the "
                f"same directory on the same file system?"
            )
        logger.warning(
            "The job ended, and there was no complete checkpoint in %s%s. Save there with a Supervisor or "
            "ModelCheckpoint.",
            self._directory,
            hint,
        )

    def _evaluate(self, found: FoundCheckpoint, watch: CheckpointWatcher) -> None:
        model, optimizer = self._model, self._model.optimizer
        progress.report("evaluate", step=found.step)
        try:
            # Evaluation does not use the optimizer's state, and the evaluator's optimizer may be a different one.
            model.load_weights(found.weights, objects_to_skip=[optimizer] if optimizer is not None else None)
        except (ValueError, KeyError, OSError) as error:
            # Keras may have closed the file before the whole model was written, and reopens it later.
            if watch.retry_later(found):
                time.sleep(self._poll_s)
                return
            raise ConfigurationError(
                f"The checkpoint {self._directory / found.name} is of another model: {error} Build the same model in "
                f"the evaluator as in training."
            ) from error
        if optimizer is not None:
            set_step_count(optimizer, found.step * (inner_optimizer(optimizer).gradient_accumulation_steps or 1))
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._data)
        logs: Mapping[str, Any] = model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=self._batch_size,
            steps=self._steps,
            callbacks=self._callbacks,
            verbose=self._verbose,
            return_dict=True,
        )
        numbers = {name: np.asarray(value, np.float64).tolist() for name, value in logs.items()}
        self.evaluations += 1
        logger.info("Step %d (%s): %s", found.step, found.name, numbers)
        if self._writer is not None:
            self._writer.scalars(
                {f"evaluation_{name}_vs_iterations": value for name, value in numbers.items()}, found.step
            )
        if self._best is not None:
            self._best.update(found, numbers)
