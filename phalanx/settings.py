"""What the environment says about this process, read once and checked, in one frozen value.

A variable that is set but empty counts as not set, as launchers and shells often leave them so. The one
exception is the secret: an empty one is an error, since the job would silently run unprotected.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import ConfigurationError

SECRET = "PHALANX_SECRET"
"""Known to all tasks of a job and to nobody else. `phalanx run` makes a fresh one for each job."""
JOB_ID = "PHALANX_JOB_ID"
"""Names the job; tasks of different jobs refuse each other even if they share a secret."""
RENDEZVOUS_TIMEOUT = "PHALANX_RENDEZVOUS_TIMEOUT"
"""Seconds that a task waits at the start for the others."""
TIMEOUT = "PHALANX_TIMEOUT"
"""Seconds that a collective waits for a rank that is connected but does not come."""
RETURN_TIMEOUT = "PHALANX_RETURN_TIMEOUT"
"""Seconds that the tasks of a job with parameter servers wait for a task that was killed to be started again."""
SNAPSHOTS = "PHALANX_SNAPSHOTS"
"""The two files for a parameter server's snapshots, which the launcher opened, joined by a colon."""
HOST_ID = "PHALANX_HOST_ID"
"""Replaces the identity of this host. For tests: local ranks pretend to be on different hosts."""
LOG_DIR = "PHALANX_LOG_DIR"
"""Directory for one log file per task."""
LISTEN_FD = "PHALANX_LISTEN_FD"
"""Descriptor of a listening socket that the launcher opened for this task, so that its port was never
free."""
TLS_CERT = "PHALANX_TLS_CERT"
"""PEM file: this task's certificate (and those between it and the authority)."""
TLS_KEY = "PHALANX_TLS_KEY"
"""PEM file: the key of this task's certificate."""
TLS_CA = "PHALANX_TLS_CA"
"""PEM file: the authority that signed the certificates of all tasks of the job."""
SEED = "PHALANX_SEED"
"""The job's seed, where no program sets one."""

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
class Settings:
    """See the constants above for the meaning of each; units are in the names."""

    secret: bytes | None = field(default=None, repr=False)
    job_id: str = ""
    rendezvous_timeout_s: float = DEFAULT_RENDEZVOUS_TIMEOUT_S
    timeout_s: float = DEFAULT_TIMEOUT_S
    return_timeout_s: float | None = None
    snapshots: tuple[Path, Path] | None = None
    host_id: str | None = None
    log_dir: Path | None = None
    listen_fd: int | None = None
    tls: TLSFiles | None = None
    seed: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings that the environment gives (`os.environ` if not said otherwise).

        Raises: ConfigurationError naming the variable, its value and what to write instead.
        """
        values = os.environ if environment is None else environment
        return cls(
            secret=_secret(values),
            job_id=values.get(JOB_ID, ""),
            rendezvous_timeout_s=_seconds(values, RENDEZVOUS_TIMEOUT, DEFAULT_RENDEZVOUS_TIMEOUT_S),
            timeout_s=_seconds(values, TIMEOUT, DEFAULT_TIMEOUT_S),
            return_timeout_s=_seconds(values, RETURN_TIMEOUT, 0.0) if values.get(RETURN_TIMEOUT) else None,
            snapshots=_two_paths(values, SNAPSHOTS),
            host_id=values.get(HOST_ID) or None,
            log_dir=Path(values[LOG_DIR]) if values.get(LOG_DIR) else None,
            listen_fd=_whole_number(values, LISTEN_FD),
            tls=_tls(values),
            seed=_whole_number(values, SEED),
        )


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
    # Not int() alone, which also takes "1_000" and digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{name}={text!r} is no whole number of at least 0. Write for example {name}=3.")
    return int(text)


def _tls(values: Mapping[str, str]) -> TLSFiles | None:
    names = (TLS_CERT, TLS_KEY, TLS_CA)
    given = [name for name in names if values.get(name)]
    if not given:
        return None
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(given)} is set, but not {' and '.join(missing)}. TLS needs all three: this "
            f"task's certificate, its key, and the authority that signed the certificates of all tasks."
        )
    for name in names:
        if not os.access(values[name], os.R_OK) or not os.path.isfile(values[name]):
            raise ConfigurationError(f"{name}={values[name]!r} is not a file that this process can read.")
    return TLSFiles(*(Path(values[name]) for name in names))
