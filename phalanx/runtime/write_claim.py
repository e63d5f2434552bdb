"""Exclusive right to write checkpoints to a directory: held by one process, until a later one of its job claims it.

A process that is cut off cannot know that its job continues without it or was restarted elsewhere. Its checkpoints must
not mix with those of its successor. Each writer therefore claims its directory with a fencing token (Burrows 2006, "The
Chubby lock service", section 2.4): the run of the launcher, the attempt and the generation. A later token of the same
run supersedes an earlier one; another run takes over from a dead process. Two files implement this:

`.NAME.owner`  describes the owner, which locks it while it trains, to show others that it is alive.
`.NAME.lock`   is locked while the owner changes, and while the owner, having compared itself with `.NAME.owner`, moves
               a file into place. No file can therefore appear after another process has claimed the directory.

The kernel, or the server of a network file system, releases the locks of a dead process. On a file system without locks
and in a store (`phalanx.storage`), the owner is also compared before and after a file is moved into place. A process
that is suspended between comparing and writing can still finish that one file when it resumes. If two processes of a
run claim a directory simultaneously, the one with the earlier token may write last; the other reclaims the directory at
its next write. A process of another run counts as dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from phalanx.config.job_config import run_of_job
from phalanx.errors import ConfigurationError, FrameError, SupersededError
from phalanx.runtime.owner_records import owner_record
from phalanx.storage.paths import StoragePath
from phalanx.transport.decoding import decode_json

logger = logging.getLogger(__name__)

LOCAL_TAKEOVER_S = 30.0
"""Seconds to wait for a process of another run on this host. A process that lost its launcher exits within 25 s."""
REMOTE_TAKEOVER_S = 120.0
"""The same for other hosts. The server of a network file system releases the locks of a dead host later."""
POLL_S = 0.05

_lost_claims: set[StoragePath] = set()  # claims lost to other processes, which this one may not reclaim


class Owner(msgspec.Struct, frozen=True):
    """The owner of a directory: the content of `.NAME.owner`.

    Attributes:
        run: Id of the run of the launcher, or of the job; empty if the job has no name.
        attempt: Number of earlier starts of the job by the launcher.
        generation: Generation of an elastic job.
        process: Unique id of the process.
        host, pid: Host and process id, for messages.
    """

    run: str
    attempt: int
    generation: int
    process: str
    host: str
    pid: int

    def __str__(self) -> str:
        job = f" of job {self.run}" if self.run else ""
        return f"process {self.pid}{job} on {self.host}"

    @property
    def token(self) -> tuple[int, int]:
        """The fencing token, which orders the owners of one run."""
        return self.attempt, self.generation

    def is_same_run(self, other: Owner) -> bool:
        """Whether both owners belong to the same run."""
        return bool(self.run) and self.run == other.run


class WriteClaim:
    """The right of this process to write certain files. Thread-safe.

    Args:
        directory: Directory of the files; created when it is claimed.
        name: Common name of the files; other names in the directory may belong to other processes.
        generation: Returns the current generation of an elastic job.
    """

    def __init__(self, directory: StoragePath, name: str, generation: Callable[[], int] = lambda: 0):
        self.directory = directory
        self._record = owner_record(directory.absolute(), name)
        self._generation = generation
        self._mutex = threading.RLock()  # protects the record; held while a file is written

    def acquire(self) -> None:
        """Claim the directory unless this process owns it. Waits for a process of another run that may be dying.

        Raises:
            ConfigurationError: another job that is alive owns it.
            SupersededError: a later process of this job owns it.
            OSError: the claim cannot be written.
        """
        with self._mutex:
            if self._record.is_owned:
                return
            self.directory.mkdir(parents=True, exist_ok=True)
            me, started_at, has_noticed = self._build_owner(), time.monotonic(), False
            while (owner := self._try_claim(me)) is not None:
                limit_s = LOCAL_TAKEOVER_S if owner.host == me.host else REMOTE_TAKEOVER_S
                if time.monotonic() - started_at > limit_s:
                    raise ConfigurationError(
                        f"{self.directory} is in use: {owner} writes to it, and is alive. Two jobs cannot have the "
                        f"same directory of checkpoints. End the other one, or pass another directory. To take over "
                        f"from a job that you cannot reach, delete {self._record.path}: it then stops before it writes "
                        f"again."
                    )
                if not has_noticed:
                    logger.warning("%s is in use; waiting up to %g s for %s to end.", self.directory, limit_s, owner)
                    has_noticed = True
                time.sleep(POLL_S)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Prevent other claims while files are moved into place or deleted. Acquires the claim if necessary.

        Raises: as `acquire`.
        """
        # The mutex before the file lock, here and in `acquire`. The lock belongs to an open file: without the mutex,
        # another thread would poll for it like another process.
        with self._mutex:
            self.acquire()
            with self._record.locked():
                self._check()
                yield
                self._check()  # for file systems without locks

    def _check(self) -> None:
        """Raise SupersededError unless this process owns the directory, or may reclaim it by its token."""
        owner, me = self._read(), self._build_owner()
        if owner is not None and owner.process == me.process:
            return
        # Without locks, an earlier process of the run may have written its claim last.
        if owner is not None and me.is_same_run(owner) and me.token > owner.token:
            self._record.claim(msgspec.json.encode(me))
            return
        self._record.release()
        _lost_claims.add(self._record.path)
        raise self._superseded(owner)

    def release(self) -> None:
        """Release the directory to other processes. Safe to call twice."""
        with self._mutex:
            if not self._record.is_owned:
                return
            self._record.release()
            with contextlib.suppress(OSError):  # the directory is gone, so nothing can be written to it
                # If another process has taken it unnoticed, this one may not reclaim it.
                if (owner := self._read()) is None or owner.process != _process():
                    _lost_claims.add(self._record.path)

    def _build_owner(self) -> Owner:
        run, attempt = run_of_job()
        # Built at each call, because the generation grows while the claim lasts.
        return Owner(run, attempt, self._generation(), _process(), socket.gethostname(), os.getpid())

    def _try_claim(self, me: Owner) -> Owner | None:
        """Claim the directory; return its owner instead if that belongs to another run and is alive."""
        with self._record.locked():
            owner = self._read()
            if owner is not None and owner.process != me.process:
                of_run, has_lost = me.is_same_run(owner), self._record.path in _lost_claims
                is_later = of_run and me.token > owner.token
                if (of_run and me.token < owner.token) or (has_lost and not is_later):
                    raise self._superseded(owner)
                if not of_run and self._record.is_alive():
                    return owner
            self._record.claim(msgspec.json.encode(me))
            _lost_claims.discard(self._record.path)
            return None

    def _read(self) -> Owner | None:
        try:
            return decode_json(self._record.path.read_bytes(), Owner)
        except FileNotFoundError:
            return None
        except FrameError as error:
            logger.warning("%s is damaged and ignored: %s", self._record.path, error)
            return None

    def _superseded(self, owner: Owner | None) -> SupersededError:
        now = "its claim was deleted or damaged" if owner is None else f"it belongs to {owner} now"
        return SupersededError(
            f"This process may no longer write to {self.directory}: {now}. Since then, it has at most finished the "
            f"file that it was writing, and it stops. If it was cut off from its job, the job continues without it, "
            f"and you need not do anything. If two jobs were given this directory, give each its own."
        )


_own: dict[int, str] = {}  # by process id: a fork is another process


def _process() -> str:
    """Unique id of this process, which changes after a fork."""
    # `setdefault` is atomic: two threads whose first calls coincide get the same id.
    return _own.setdefault(os.getpid(), secrets.token_hex(8))
