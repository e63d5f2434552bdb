"""Registry of this user's running jobs: a file for each, which its launcher removes when it exits.

Hosts with a shared home directory also share this directory. Only processes in the launcher's host and PID namespace
can check whether it is alive, and reach its socket.
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
"""Size limit of a file, large enough for a long command line."""


@dataclass(frozen=True)
class RegisteredJob:
    """A running job.

    Attributes:
        job: Id of the job.
        pid: Process id of its launcher.
        started: Start time of that process, in the kernel's ticks; empty if unknown. Detects a reused process id.
        host: Name of its launcher's host.
        processes: The host and PID namespace that the process id belongs to.
        program: Command line of the job.
    """

    job: str
    pid: int
    started: str
    host: str
    processes: str
    program: str

    @property
    def is_local(self) -> bool:
        return self.processes == _processes()

    @property
    def socket_path(self) -> Path:
        """The socket of its launcher; see `job_connection`."""
        return socket_path(self.job)


def folder() -> Path:
    """The directory of the files, which only this user may read."""
    chosen = process_environment().get(JOBS_DIRECTORY)
    return Path(chosen) if chosen else user_cache_directory() / "jobs"


def socket_path(job: str) -> Path:
    """The socket of a job's launcher."""
    return folder() / f"{job}.sock"


@contextlib.contextmanager
def registered(job: str, program: Sequence[str]) -> Iterator[None]:
    """Register the job for `phalanx status` and the other commands, inside the block. Does nothing if the folder is not
    writable: training does not depend on it."""
    path: Path | None = None
    shown = " ".join(program).encode(errors="replace").decode()
    entry = RegisteredJob(job, os.getpid(), _start(os.getpid()), socket.gethostname(), _processes(), shown)
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        place = folder() / f"{job}.json"
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        path = place  # only now: an existing file belongs to another job
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(entry))
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def running() -> list[RegisteredJob]:
    """List the running jobs, as far as is known here. Files of killed launchers are removed on the launcher's host."""
    found = []
    for path in sorted(_files()):
        try:
            entry = decode_json(_read(path), RegisteredJob)
        except (OSError, FrameError):
            continue  # deleted, being written, or from another version
        if not entry.is_local or _lives(entry):
            found.append(entry)
        else:
            for left in (path, path.with_suffix(".sock")):
                with contextlib.suppress(OSError):
                    left.unlink()
    return found


def _read(path: Path) -> bytes:
    """Read a regular file. In a folder that others may write to, a pipe would block, and a link could lead to an
    infinite device.

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
    """Identifies the host and PID namespace: processes with the same value see each other's process ids."""
    try:
        return f"{host_identity()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return host_identity()


def _lives(entry: RegisteredJob) -> bool:
    if entry.pid <= 0:  # denotes a group of processes
        return False
    try:
        os.kill(entry.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process of another user
        pass
    return _start(entry.pid) == entry.started


def _start(pid: int) -> str:
    """Start time of a process, in the kernel's clock ticks; empty if unknown.

    Source: proc(5), the field `starttime` of /proc/PID/stat.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
