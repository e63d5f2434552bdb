"""The best of the evaluated checkpoints, kept in a separate file."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from phalanx.checkpoint.step_names import KERAS_SUFFIX, WEIGHTS_SUFFIX
from phalanx.errors import ConfigurationError
from phalanx.evaluator.checkpoint_watcher import FoundCheckpoint
from phalanx.keras_compat.keras_internals import MonitorCallback
from phalanx.runtime.write_claim import WriteClaim
from phalanx.storage.files import copy_file, write_file
from phalanx.storage.paths import StoragePath

logger = logging.getLogger(__name__)

NAME = "best_evaluation"
"""Prefix of the file names."""


class BestCheckpoint:
    """Keeps the best checkpoint as `best_evaluation.weights.h5` (or `.keras`, the format of the training), next to a
    `.json` file with its step and metrics, which a restarted evaluator reads.

    Args:
        monitor: The metric that decides; the prefix `val_` is ignored.
        mode: "min", "max", or "auto" to use Keras's direction for the metric.
    """

    def __init__(self, directory: StoragePath, model: Any, monitor: str, mode: str = "auto"):
        if mode not in ("auto", "min", "max"):
            raise ConfigurationError(f"mode is {mode!r}; write 'min', 'max' or 'auto'.")
        self._directory = directory
        self._claim = WriteClaim(directory, NAME)
        self._monitor = monitor.removeprefix("val_")
        self._rule = MonitorCallback(monitor=self._monitor, mode=mode)
        self._rule.set_model(model)
        self.value: float | None = None
        self.path: StoragePath | None = None
        self._restore()

    def update(self, found: FoundCheckpoint, logs: Mapping[str, Any]) -> bool:
        """Keep a checkpoint if it is better than all before, and return whether it is.

        Args:
            logs: Metrics by name: numbers, or lists for metrics with several values.

        Raises:
            ConfigurationError: the metric does not exist, is not a scalar, or has no known direction; or another job
                keeps its best checkpoint here.
            SupersededError: a later evaluator of this job keeps its best checkpoint here.
            OSError: the checkpoint cannot be written.
        """
        if self._monitor not in logs:
            raise ConfigurationError(
                f"monitor is {self._monitor!r}, and the evaluation has {', '.join(logs) or 'no metrics'}. Name one of "
                f"them, or pass monitor=None to keep no best checkpoint."
            )
        value = logs[self._monitor]
        if isinstance(value, list):
            raise ConfigurationError(
                f"monitor is {self._monitor!r}, which has {np.size(value)} values: none of them says alone which "
                f"checkpoint is the best. Name another metric, or give this one an average (`average='macro'`)."
            )
        if self._rule.monitor_op is None:
            try:
                self._rule._set_monitor_op()
            except ValueError as error:
                raise ConfigurationError(
                    f"Whether more or less of {self._monitor!r} is better is not known: pass mode='min' or 'max'."
                ) from error
        if math.isnan(value) or not bool(self._rule._is_improvement(value, self.value)):
            return False
        path, other = self._paths(found.name)
        with self._claim.writing():
            # The checkpoint first: a process killed in between leaves a checkpoint that is better than the recorded
            # metrics. In the reverse order, a worse one would count as the best.
            copy_file(found.copy, path)
            self._write_metadata(
                {"monitor": self._monitor, "checkpoint": found.name, "step": found.step, "metrics": dict(logs)}
            )
            other.unlink(missing_ok=True)
        self.value, self.path = value, path
        logger.info("Step %d is the best so far: %s is %g.", found.step, self._monitor, value)
        return True

    def close(self) -> None:
        """Release the directory to other processes; the next `update` claims it again. Safe to call twice."""
        self._claim.release()

    def _paths(self, checkpoint: str) -> tuple[StoragePath, StoragePath]:
        """Return the path for a checkpoint of this name, and the path for one of the other format."""
        suffixes = (WEIGHTS_SUFFIX, KERAS_SUFFIX)
        ours, other = suffixes[::-1] if checkpoint.endswith(KERAS_SUFFIX) else suffixes
        return self._directory / f"{NAME}{ours}", self._directory / f"{NAME}{other}"

    def _write_metadata(self, content: Mapping[str, Any]) -> None:
        write_file(self._directory / f"{NAME}.json", json.dumps(content, indent=1).encode())

    def _restore(self) -> None:
        """Restore the best result of an earlier evaluator."""
        path = self._directory / f"{NAME}.json"
        try:
            content = json.loads(path.read_bytes())
            known = content.get("monitor") == self._monitor and self._monitor in content["metrics"]
            value = float(content["metrics"][self._monitor]) if known else None
            kept, _ = self._paths(content["checkpoint"])
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s is damaged, so the best result so far is unknown (%s).", path, error)
            return
        if value is not None and kept.exists():
            self.value, self.path = value, kept
