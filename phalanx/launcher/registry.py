"""Which elastic jobs this user's launchers run here: a file for each, which goes with its launcher."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.settings import TLSFiles

FOLDER = "PHALANX_JOBS"


@dataclass(frozen=True)
class Running:
    """A job that runs.

    Attributes:
        job: its name.
        keeper: address of its keeper.
        secret: of the job.
        pid: of its launcher.
        program: its command line.
        tls: the files with which it encrypts, if it does: certificate, key, authority.
    """

    job: str
    keeper: str
    secret: str
    pid: int
    program: str
    tls: tuple[str, ...] | None = None

    @property
    def tls_files(self) -> TLSFiles | None:
        return None if self.tls is None else TLSFiles(*map(Path, self.tls))


def folder() -> Path:
    """Where the files lie; only this user may read them, as they hold secrets."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx" / "jobs"


@contextlib.contextmanager
def registered(
    job: str, keeper: str, secret: str, program: Sequence[str], tls: TLSFiles | None = None
) -> Iterator[None]:
    """While inside, the job is known to `phalanx status` and `phalanx scale`. A folder that cannot be written to is no
    reason not to train."""
    path: Path | None = None
    files = None if tls is None else tuple(str(path.absolute()) for path in (tls.certificate, tls.key, tls.authority))
    entry = Running(job, keeper, secret, os.getpid(), " ".join(program), files)
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        path = folder() / f"{job}.json"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(entry), file)
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def running() -> list[Running]:
    """The jobs that run; files of launchers that were killed are removed."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            entry = Running(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # gone, or being written
        if _lives(entry.pid):
            found.append(entry)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
