"""What the environment says about this process, read once and checked, in one frozen value.

A variable that is set but empty counts as not set, as launchers and shells often leave them so. The one
exception is the secret: an empty one is an error, since the job would silently run unprotected.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import ConfigurationError

SECRET = "PHALANX_SECRET"
"""Known to all tasks of a job and to nobody else. `phalanx run` makes a fresh one for each job."""
JOB_ID = "PHALANX_JOB_ID"
"""Names the job; tasks of different jobs refuse each other even if they share a secret. Where it is not set, a
scheduler that says what the cluster is names it."""
RENDEZVOUS_TIMEOUT = "PHALANX_RENDEZVOUS_TIMEOUT"
"""Seconds that a task waits at the start for the others."""
TIMEOUT = "PHALANX_TIMEOUT"
"""Seconds that a collective waits for a rank that is connected but does not come."""
RETURN_TIMEOUT = "PHALANX_RETURN_TIMEOUT"
"""Seconds that the tasks of a job with parameter servers wait for a task that was killed to be started again."""
SNAPSHOTS = "PHALANX_SNAPSHOTS"
"""The two files for a parameter server's snapshots, which the launcher opened, joined by a colon."""
KEEPER = "PHALANX_KEEPER"
"""`host:port` of the launcher that keeps the members of an elastic job; set by `phalanx run --workers MIN:MAX`."""
HOST_ID = "PHALANX_HOST_ID"
"""Replaces the identity of this host. For tests: local ranks pretend to be on different hosts."""
LISTEN_FD = "PHALANX_LISTEN_FD"
"""Descriptor of a listening socket that the launcher opened for this task, so that its port was never
free."""
TLS_CERT = "PHALANX_TLS_CERT"
"""PEM file: this task's certificate (and those between it and the authority)."""
TLS_KEY = "PHALANX_TLS_KEY"
"""PEM file: the key of this task's certificate."""
TLS_CA = "PHALANX_TLS_CA"
"""PEM file: the authority that signed the certificates of all tasks of the job."""
TLS_FILES = (TLS_CERT, TLS_KEY, TLS_CA)
PREEMPTION_SIGNAL = "PHALANX_PREEMPTION_SIGNAL"
"""Name of a signal that, like SIGTERM, tells a `fit` with a `Checkpoint` to save and end."""
SEED = "PHALANX_SEED"
"""The job's seed, where no program sets one."""
SIMULATED_MBITS = "PHALANX_SIMULATED_MBITS"
"""For experiments: a task sends at most so many millions of bits in a second in collectives, and tasks of one host do
not share memory, as if a slow network were between all of them. The same for all tasks."""

TIMELINE = "PHALANX_TIMELINE"
"""File on the host of rank 0 for the timeline of all ranks; HOROVOD_TIMELINE means the same."""
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
"""As PHALANX_TIMELINE. DYNAMIC, which Horovod wants where a program starts the timeline itself, means nothing here."""
MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
"""1: rounds of negotiation are in the timeline, too."""
STALL_CHECK_TIME = "HOROVOD_STALL_CHECK_TIME_SECONDS"
"""Seconds after which a warning names the ranks that have not come."""
STALL_SHUTDOWN_TIME = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
"""Seconds after which the job ends. 0 or unset: as PHALANX_TIMEOUT says (Horovod itself would wait for ever)."""
STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
"""1: no warning. The job still ends after the second limit."""
AUTOTUNE = "HOROVOD_AUTOTUNE"
"""1: the first steps find out how collectives are fastest. The same for all tasks."""
AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
"""File in which rank 0 writes what was tried and chosen."""

DEFAULT_STALL_S = 60.0
"""A minute: compilation of a large model takes that long as well, but then it is worth knowing."""
DEFAULT_RENDEZVOUS_TIMEOUT_S = 300.0
"""5 minutes: schedulers start the tasks of one job minutes apart, while a person is still there to see it
fail."""
DEFAULT_TIMEOUT_S = 600.0
"""10 minutes: the slowest legitimate delay between two steps is the compilation of a large model or a
checkpoint to a slow file system; a dead process is noticed at once and does not wait for this."""
MIN_SECRET_CHARACTERS = 16
"""Whoever overhears a handshake can try out secrets at leisure; 16 random characters withstand that."""


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The three PEM files of mutual TLS; see `phalanx.transport.tls`."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class JobConfig:
    """See the constants above for the meaning of each; units are in the names. `named`: whether `job_id` is that of
    PHALANX_JOB_ID, as under `phalanx run`."""

    secret: bytes | None = field(default=None, repr=False)
    job_id: str = ""
    named: bool = False
    rendezvous_timeout_s: float = DEFAULT_RENDEZVOUS_TIMEOUT_S
    timeout_s: float = DEFAULT_TIMEOUT_S
    return_timeout_s: float | None = None
    snapshots: tuple[Path, Path] | None = None
    keeper: str | None = None
    host_id: str | None = None
    listen_fd: int | None = None
    tls: TLSFiles | None = None
    seed: int | None = None
    simulated_mbits: float | None = None
    timeline: Path | None = None
    timeline_marks_cycles: bool = False
    stall_s: float = DEFAULT_STALL_S
    stall_end_s: float | None = None
    autotune: bool = False
    autotune_log: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> JobConfig:
        """The settings that the environment gives (`os.environ` if not said otherwise).

        Raises: ConfigurationError naming the variable, its value and what to write instead.
        """
        values = os.environ if environment is None else environment
        return cls(
            secret=_secret(values),
            job_id=values.get(JOB_ID) or _scheduler_job_id(values),
            named=bool(values.get(JOB_ID)),
            rendezvous_timeout_s=_seconds(values, RENDEZVOUS_TIMEOUT, DEFAULT_RENDEZVOUS_TIMEOUT_S),
            timeout_s=_seconds(values, TIMEOUT, DEFAULT_TIMEOUT_S),
            return_timeout_s=_seconds(values, RETURN_TIMEOUT, 60.0) if values.get(RETURN_TIMEOUT) else None,
            snapshots=_two_paths(values, SNAPSHOTS),
            keeper=values.get(KEEPER) or None,
            host_id=values.get(HOST_ID) or None,
            listen_fd=_whole_number(values, LISTEN_FD),
            tls=_tls(values),
            seed=_whole_number(values, SEED),
            simulated_mbits=_rate(values, SIMULATED_MBITS),
            timeline=_timeline(values),
            timeline_marks_cycles=_switch(values, MARK_CYCLES),
            stall_s=stall_time_s(values),
            stall_end_s=number_of(values, STALL_SHUTDOWN_TIME, 0.0) or None,
            autotune=_switch(values, AUTOTUNE),
            autotune_log=Path(values[AUTOTUNE_LOG]).absolute() if values.get(AUTOTUNE_LOG) else None,
        )


def preemption_signals(environment: Mapping[str, str] | None = None) -> tuple[signal.Signals, ...]:
    """The signals that tell a `fit` with a `Checkpoint` to save and end.

    Raises: ConfigurationError if PHALANX_PREEMPTION_SIGNAL names none that a process can catch.
    """
    name = (os.environ if environment is None else environment).get(PREEMPTION_SIGNAL, "")
    chosen = signal_of(name) if name else signal.SIGTERM
    return (signal.SIGTERM,) if chosen is signal.SIGTERM else (signal.SIGTERM, chosen)


def signal_of(name: str) -> signal.Signals:
    """The signal of a name like USR1 or SIGUSR1; raises ConfigurationError for any that cannot be used here."""
    upper = name.upper()
    found = getattr(signal, upper if upper.startswith("SIG") else f"SIG{upper}", None)
    taken = (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2)
    if not isinstance(found, signal.Signals) or found in taken:
        raise ConfigurationError(
            f"{name!r} is no signal for preemption. Write for example USR1 or TERM; KILL and STOP cannot be caught, "
            f"INT ends a job at once, and USR2 and CHLD have another use in Phalanx."
        )
    return found


def stall_time_s(values: Mapping[str, str]) -> float:
    """Seconds after which a warning names the ranks that have not come; infinite if there is to be none."""
    if _switch(values, STALL_CHECK_DISABLE):
        return math.inf
    return number_of(values, STALL_CHECK_TIME, DEFAULT_STALL_S) or math.inf


def number_of(values: Mapping[str, str], name: str, default: float) -> float:
    """What a variable of Horovod's says; raises ConfigurationError if it is no number of at least 0."""
    text = values.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigurationError(f"{name}={text!r} is no number of at least 0. Write for example {name}={default:g}.")
    return number


def _switch(values: Mapping[str, str], name: str) -> bool:
    """Nothing, 0 and the words for no are no; Horovod itself takes words for 0 and so all of them for no."""
    return values.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def _timeline(values: Mapping[str, str]) -> Path | None:
    name = values.get(TIMELINE) or values.get(HOROVOD_TIMELINE)
    return Path(name).absolute() if name and name != "DYNAMIC" else None


def _scheduler_job_id(values: Mapping[str, str]) -> str:
    """What the scheduler calls the job whose tasks it says; empty where it says none, or may not have started all.

    Not the job step: `phalanx doctor` asks from one of its own.
    """
    if values.get("TF_CONFIG"):
        return ""
    if "OMPI_COMM_WORLD_RANK" in values:
        names: tuple[str, ...] = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    elif "SLURM_STEP_NODELIST" in values and "SLURM_PROCID" in values:
        names = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID")
    elif "PMI_RANK" in values and not values.get("PHALANX_HOSTS"):  # else each of them has read the scheduler's list
        names = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID")
    else:
        return ""
    return next((values[name] for name in names if values.get(name)), "")


def _secret(values: Mapping[str, str]) -> bytes | None:
    text = values.get(SECRET)
    if text is None:
        return None
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"{SECRET} has {len(text)} characters; at least {MIN_SECRET_CHARACTERS} random ones are needed, "
            f"or it could be guessed. Make one with `python -c 'import secrets; "
            f"print(secrets.token_hex())'` and set it for every task of the job, or leave it unset on a "
            f"network where everybody is trusted."
        )
    return text.encode()


def _seconds(values: Mapping[str, str], name: str, default: float) -> float:
    text = values.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"{name}={text!r} is no time. Write a number of seconds greater than 0, for example {default:g}."
        )
    return seconds


def _rate(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name)
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigurationError(
            f"{name}={text!r} is no rate. Write millions of bits in a second, greater than 0, for example {name}=100."
        )
    return rate


def _two_paths(values: Mapping[str, str], name: str) -> tuple[Path, Path] | None:
    text = values.get(name)
    if not text:
        return None
    first, colon, second = text.partition(":")
    if not (first and colon and second):
        raise ConfigurationError(f"{name}={text!r} is not two paths joined by a colon.")
    return Path(first), Path(second)


def _whole_number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name)
    if not text:
        return None
    # Not int() alone, which also takes "1_000" and digits of other scripts, and fails at thousands of them.
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ConfigurationError(f"{name}={text!r} is no whole number of at least 0. Write for example {name}=3.")
    return int(text)


def _tls(values: Mapping[str, str]) -> TLSFiles | None:
    given = [name for name in TLS_FILES if values.get(name)]
    if not given:
        return None
    missing = [name for name in TLS_FILES if name not in given]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(given)} is set, but not {' and '.join(missing)}. TLS needs all three: this "
            f"task's certificate, its key, and the authority that signed the certificates of all tasks."
        )
    for name in TLS_FILES:
        if not os.access(values[name], os.R_OK) or not os.path.isfile(values[name]):
            raise ConfigurationError(f"{name}={values[name]!r} is not a file that this process can read.")
    return TLSFiles(*(Path(values[name]) for name in TLS_FILES))
