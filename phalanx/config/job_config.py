"""The configuration of a task and its job, read from the environment once, checked and frozen.

An empty variable counts as unset, since launchers and shells often leave variables empty. The one exception is the
secret: an empty secret is an error, since the job would silently run unprotected.
"""

from __future__ import annotations

import enum
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.config import environment_variables as names
from phalanx.config.environment import process_environment
from phalanx.config.parsing import (
    parse_integer,
    parse_number,
    parse_optional_number,
    parse_path,
    parse_signal,
    parse_switch,
)
from phalanx.errors import ConfigurationError

MIN_SECRET_CHARACTERS = 16
"""An eavesdropper on a handshake can try secrets offline; 16 random characters withstand that."""


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The three PEM files of mutual TLS; see `phalanx.transport.tls`."""

    certificate: Path
    key: Path
    authority: Path


class Encryption(enum.Enum):
    """Which connections that carry training data (collectives, parameter servers) are encrypted.

    All others, such as those to the launcher or a `ClusterCoordinator`, are always encrypted in a job with a secret.
    """

    ALWAYS = "always"
    REMOTE = "remote"
    """Only connections between hosts."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class TimelineConfig:
    """Where a job records its timeline, and whether it includes the cycles of Horovod's controller."""

    path: Path
    marks_cycles: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveConfig:
    """Settings of collectives beyond `CommunicationOptions`.

    Attributes:
        simulated_mbits: Maximum megabits per second that each task sends, to simulate a slow network.
        stall_warning_s: Seconds until a warning names the ranks that have not arrived; infinite for no warning.
        stall_shutdown_s: Seconds until the job ends because of these ranks; None for the timeout of the job.
        autotune: Whether the first steps search for the fastest collectives.
        autotune_log: File in which rank 0 logs the search.
    """

    simulated_mbits: float | None = None
    stall_warning_s: float = names.DEFAULT_STALL_WARNING_S
    stall_shutdown_s: float | None = None
    autotune: bool = False
    autotune_log: Path | None = None

    @classmethod
    def from_environment(cls, values: Mapping[str, str]) -> CollectiveConfig:
        """Raises: ConfigurationError naming the variable, its value and a valid example."""
        warning_s = parse_number(values, names.STALL_CHECK_TIME, names.DEFAULT_STALL_WARNING_S, unit="seconds")
        return cls(
            simulated_mbits=parse_optional_number(
                values, names.SIMULATED_MBITS, unit="megabits per second", positive=True, example=100
            ),
            # A time of 0 disables the warning as well.
            stall_warning_s=(not parse_switch(values, names.STALL_CHECK_DISABLE) and warning_s) or math.inf,
            stall_shutdown_s=parse_number(values, names.STALL_SHUTDOWN_TIME, 0, unit="seconds") or None,
            autotune=parse_switch(values, names.AUTOTUNE),
            autotune_log=parse_path(values, names.AUTOTUNE_LOG),
        )


@dataclass(frozen=True, slots=True)
class JobConfig:
    """Configuration of one task. `phalanx.config.environment_variables` describes the variable behind each field.

    Attributes:
        has_explicit_job_id: Whether `job_id` is PHALANX_JOB_ID, as set by `phalanx run`, and not a scheduler's ID.
    """

    secret: bytes | None = field(default=None, repr=False)
    job_id: str = ""
    has_explicit_job_id: bool = False
    rendezvous_timeout_s: float = names.DEFAULT_RENDEZVOUS_TIMEOUT_S
    timeout_s: float = names.DEFAULT_TIMEOUT_S
    return_timeout_s: float | None = None
    snapshots: tuple[Path, Path] | None = None
    elastic_coordinator: str | None = None
    host_id: str | None = None
    listen_fd: int | None = None
    tls: TLSFiles | None = None
    encryption: Encryption = Encryption.ALWAYS
    seed: int | None = None
    collectives: CollectiveConfig = CollectiveConfig()
    timeline: TimelineConfig | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> JobConfig:
        """Read the configuration from the environment.

        Args:
            environ: Values by name; defaults to the process's environment.

        Raises: ConfigurationError naming the variable, its value and a valid example.
        """
        values = process_environment() if environ is None else environ

        def seconds(name: str, default: float) -> float:
            return parse_number(values, name, default, unit="seconds", positive=True)

        return cls(
            secret=_secret(values),
            job_id=values.get(names.JOB_ID) or _scheduler_job_id(values),
            has_explicit_job_id=bool(values.get(names.JOB_ID)),
            rendezvous_timeout_s=seconds(names.RENDEZVOUS_TIMEOUT, names.DEFAULT_RENDEZVOUS_TIMEOUT_S),
            timeout_s=seconds(names.TIMEOUT, names.DEFAULT_TIMEOUT_S),
            return_timeout_s=parse_optional_number(
                values,
                names.RETURN_TIMEOUT,
                unit="seconds",
                positive=True,
                example=names.DEFAULT_RETURN_TIMEOUT_S,
            ),
            snapshots=_two_paths(values, names.SNAPSHOTS),
            elastic_coordinator=values.get(names.ELASTIC_COORDINATOR) or None,
            host_id=values.get(names.HOST_ID) or None,
            listen_fd=parse_integer(values, names.LISTEN_FD),
            tls=_tls_files(values),
            encryption=_encryption(values),
            seed=parse_integer(values, names.SEED),
            collectives=CollectiveConfig.from_environment(values),
            timeline=_timeline(values),
        )


def preemption_signals() -> tuple[signal.Signals, ...]:
    """The signals that tell a `fit` with a `Checkpoint` to save and exit.

    Raises: ConfigurationError if PHALANX_PREEMPTION_SIGNAL names no signal that a process can catch.
    """
    name = process_environment().get(names.PREEMPTION_SIGNAL, "")
    return tuple(dict.fromkeys((signal.SIGTERM, parse_signal(name or "TERM"))))


def run_of_job() -> tuple[str, int]:
    """ID of the `phalanx run` call that this process belongs to, and how often that call has started the job before.

    Without a launcher: the job ID, if any, and 0.
    """
    values = process_environment()
    run, _, attempt = values.get(names.RUN, "").partition(":")
    if run and attempt.isdecimal():
        return run, int(attempt)
    return values.get(names.JOB_ID) or _scheduler_job_id(values), 0


def _timeline(values: Mapping[str, str]) -> TimelineConfig | None:
    name = values.get(names.TIMELINE) or values.get(names.HOROVOD_TIMELINE)
    marks_cycles = parse_switch(values, names.MARK_CYCLES)
    return TimelineConfig(Path(name).absolute(), marks_cycles) if name and name != "DYNAMIC" else None


def _scheduler_job_id(values: Mapping[str, str]) -> str:
    """The scheduler's ID of the job; empty if the cluster is not from the scheduler, or if tasks may disagree on it.

    Not the ID of the job step, because `phalanx doctor` runs in a separate step.
    """
    if values.get(names.TF_CONFIG):  # may name tasks of several scheduler jobs
        return ""
    if "OMPI_COMM_WORLD_RANK" in values:
        candidates: tuple[str, ...] = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    elif "SLURM_STEP_NODELIST" in values and "SLURM_PROCID" in values:
        candidates = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID")
    elif "PMI_RANK" in values and not values.get(names.HOSTS):  # without a list, every task reads the scheduler's
        candidates = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID")
    else:
        return ""
    return next((values[name] for name in candidates if values.get(name)), "")


def _secret(values: Mapping[str, str]) -> bytes | None:
    # `is None`, unlike for other variables: an empty secret is refused below; see the top of this file.
    text = values.get(names.SECRET)
    if text is None:
        return None
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"{names.SECRET} has {len(text)} characters; use at least {MIN_SECRET_CHARACTERS} random ones, so that it "
            f"cannot be guessed. Create one with `python -c 'import secrets; print(secrets.token_hex())'` and set it "
            f"for every task of the job, or leave it unset on a trusted network."
        )
    return text.encode()


def _two_paths(values: Mapping[str, str], name: str) -> tuple[Path, Path] | None:
    text = values.get(name)
    if not text:
        return None
    first, _, second = text.partition(":")
    if not (first and second):
        raise ConfigurationError(f"{name}={text!r} is not two paths separated by a colon.")
    return Path(first), Path(second)


def _encryption(values: Mapping[str, str]) -> Encryption:
    text = values.get(names.ENCRYPTION) or Encryption.ALWAYS.value
    try:
        return Encryption(text.lower())
    except ValueError as error:
        choices = ", ".join(each.value for each in Encryption)
        raise ConfigurationError(f"{names.ENCRYPTION}={text!r} is not one of {choices}.") from error


def _tls_files(values: Mapping[str, str]) -> TLSFiles | None:
    given = [name for name in names.TLS_FILES if values.get(name)]
    if not given:
        return None
    missing = [name for name in names.TLS_FILES if name not in given]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(given)} is set, but not {' and '.join(missing)}. TLS needs all three: this "
            f"task's certificate, its key, and the authority that signed the certificates of all tasks."
        )
    for name in given:
        if not os.access(values[name], os.R_OK) or not os.path.isfile(values[name]):
            raise ConfigurationError(f"{name}={values[name]!r} is not a file that this process can read.")
    return TLSFiles(*(Path(values[name]) for name in names.TLS_FILES))
