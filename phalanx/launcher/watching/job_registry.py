"""Which jobs this user's launchers run: a file for each, which the launcher removes when it exits.

Several hosts may share the directory, as they often share home directories. Only processes of the launcher's host and
PID namespace can tell whether it is alive, and reach its socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phalanx.config.environment import process_environment, user_cache_directory
from phalanx.config.environment_variables import JOBS_DIRECTORY
from phalanx.errors import FrameError
from phalanx.runtime.host_identity import host_identity
from phalanx.transport.decoding import decode_json

MAX_ENTRY_BYTES = 1 << 20
"""A command line may be long."""


@dataclass(frozen=True)
class RegisteredJob:
    """A running job.

    Attributes:
        job: its id.
        pid: of its launcher.
        started: when that process started, as the kernel counts; empty if unknown. Its number may be used again.
        host: of its launcher, by name.
        processes: where this process id means something.
        program: its command line.
    """

    job: str
    pid: int
    started: str
    host: str
    processes: str
    program: str

    @property
    def is_here(self) -> bool:
        return self.processes == _processes()

    @property
    def socket_path(self) -> Path:
        """Where its launcher answers; see `job_connection`."""
        return socket_path(self.job)


def folder() -> Path:
    """Where the files are; only this user may read them."""
    chosen = process_environment().get(JOBS_DIRECTORY)
    return Path(chosen) if chosen else user_cache_directory() / "jobs"


def socket_path(job: str) -> Path:
    """The socket of a job's launcher."""
    return folder() / f"{job}.sock"


@contextlib.contextmanager
def registered(job: str, program: Sequence[str]) -> Iterator[None]:
    """While inside, the job is known to `phalanx status` and the others. A folder that cannot be written to is no
    reason not to train."""
    path: Path | None = None
    shown = " ".join(program).encode(errors="replace").decode()
    entry = RegisteredJob(job, os.getpid(), _start(os.getpid()), socket.gethostname(), _processes(), shown)
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        place = folder() / f"{job}.json"
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        path = place  # only now: what is there already is another job's
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(entry))
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def running() -> list[RegisteredJob]:
    """The jobs that run, as far as is known here. Files of launchers that were killed are removed on their own host."""
    found = []
    for path in sorted(_files()):
        try:
            entry = decode_json(_read(path), RegisteredJob)
        except (OSError, FrameError):
            continue  # gone, being written, or of another version
        if not entry.is_here or _lives(entry):
            found.append(entry)
        else:
            for left in (path, path.with_suffix(".sock")):
                with contextlib.suppress(OSError):
                    left.unlink()
    return found


def _read(path: Path) -> bytes:
    """The content of a file. In a folder that others may write to, a pipe would be waited for, and a link could lead to
    a device without end.

    Raises: OSError.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "This is no file", str(path))
        return file.read(MAX_ENTRY_BYTES)


def _files() -> list[Path]:
    try:
        return list(folder().glob("*.json"))
    except RuntimeError:  # a user without a home
        return []


def _processes() -> str:
    """Two processes with the same answer see each other's process ids."""
    try:
        return f"{host_identity()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return host_identity()


def _lives(entry: RegisteredJob) -> bool:
    if entry.pid <= 0:  # these mean groups of processes
        return False
    try:
        os.kill(entry.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process of another user
        pass
    return _start(entry.pid) == entry.started


def _start(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty if that cannot be known here.

    Source: proc(5), the field `starttime` of /proc/PID/stat.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
