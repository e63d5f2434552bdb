"""How a job is launched: the options of the command line and the variables that the launcher reads, in one value."""

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
    """The launcher's settings.

    Attributes:
        grace_s: seconds that the survivors of a failed worker have to exit.
        evaluator_grace_s: seconds that an evaluator has after the training.
        preemption_grace_s: seconds that a job has for its checkpoint once it has been told to stop.
        discovery_interval_s: seconds between two runs of a host discovery script.
        discovery_timeout_s: seconds that one run of a host discovery script may take.
        backend: value of KERAS_BACKEND for the workers; None leaves it as it is.
        log_dir: directory for the log of each task and the failure report; None writes no files.
        start_timeout_s: seconds until all workers must have started; None uses the default.
        devices_per_worker: how many GPUs, or CPU devices of JAX where there are none, each worker has; None: one GPU.
        restarts: how often each killed task is restarted.
        max_restarts: how often the whole job is restarted after it has failed.
        preemption_signal: name of a signal that, like SIGTERM, means to save a checkpoint and exit.
        verbose: whether to report the start and exit of each worker.
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
        """The settings in the environment, with fields of this class in `options` for the rest.

        Args:
            environ: values by name; the process's environment if not given.

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
