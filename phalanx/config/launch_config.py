"""The settings of a launch in one value: command-line options and the variables that the launcher reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import environment_variables as names
from phalanx.config.environment import process_environment
from phalanx.config.parsing import parse_number


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Settings of the launcher.

    Attributes:
        grace_s: Seconds that the survivors of a failed worker have to exit.
        evaluator_grace_s: Seconds that an evaluator has after the training.
        preemption_grace_s: Seconds that a job has to write its checkpoint after a request to stop.
        discovery_interval_s: Seconds between two runs of a host discovery script.
        discovery_timeout_s: Time limit in seconds for one run of a host discovery script.
        backend: Value of KERAS_BACKEND for the workers; None leaves it unchanged.
        log_dir: Directory for the log of each task and the failure report; None writes no files.
        start_timeout_s: Seconds until all workers must have started; None for the default.
        devices_per_worker: GPUs of each worker, or CPU devices of JAX if there are no GPUs; None for one GPU.
        restarts: Maximum restarts of each killed task.
        max_restarts: Maximum restarts of the whole job after a failure.
        preemption_signal: Name of a signal that, like SIGTERM, requests a checkpoint and exit.
        verbose: Whether to report the start and exit of each worker.
    """

    grace_s: float = names.DEFAULT_GRACE_S
    evaluator_grace_s: float = names.DEFAULT_EVALUATOR_GRACE_S
    preemption_grace_s: float = names.DEFAULT_PREEMPTION_GRACE_S
    discovery_interval_s: float = names.DEFAULT_DISCOVERY_INTERVAL_S
    discovery_timeout_s: float = names.DEFAULT_DISCOVERY_TIMEOUT_S
    backend: str | None = None
    log_dir: Path | None = None
    start_timeout_s: float | None = None
    devices_per_worker: int | None = None
    restarts: int = 0
    max_restarts: int = 0
    preemption_signal: str | None = None
    verbose: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **options: Any) -> LaunchConfig:
        """Read settings from the environment, and take the other fields from `options`.

        Args:
            environ: Values by name; defaults to the process's environment.
            **options: Values of the other fields.

        Raises: ConfigurationError naming a variable, its value and a valid example.
        """
        values = process_environment() if environ is None else environ

        def seconds(name: str, default: float) -> float:
            return parse_number(values, name, default, unit="seconds")

        return cls(
            grace_s=seconds(names.GRACE, names.DEFAULT_GRACE_S),
            evaluator_grace_s=seconds(names.EVALUATOR_GRACE, names.DEFAULT_EVALUATOR_GRACE_S),
            preemption_grace_s=seconds(names.PREEMPTION_GRACE, names.DEFAULT_PREEMPTION_GRACE_S),
            discovery_interval_s=seconds(names.DISCOVERY_INTERVAL, names.DEFAULT_DISCOVERY_INTERVAL_S),
            discovery_timeout_s=seconds(names.DISCOVERY_TIMEOUT, names.DEFAULT_DISCOVERY_TIMEOUT_S),
            **options,
        )
