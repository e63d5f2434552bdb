"""Who may write checkpoints to a directory: one process, until a later one of its job claims the directory.

A process that is cut off does not know that its job goes on without it, or was started again elsewhere. Its checkpoints
must not mix with those of its successor. So each writer claims its directory with a fencing token (Burrows 2006, "The
Chubby lock service", section 2.4): the run of the launcher, the attempt and the generation. A later token of the same
run supersedes an earlier one; another run takes over from a process that is dead. Two files implement this:

`.NAME.owner`  describes the owner, which locks it for as long as it trains. So others know that it is alive.
`.NAME.lock`   is locked while the owner changes, and while the owner puts a file in its place after it has compared
               itself with `.NAME.owner`. So no file appears there after another process has claimed the directory.

The kernel, or the server of a network file system, releases the locks of a dead process. On a file system without locks
and in a store (`phalanx.storage`) the owner is compared as well, before and after a file is put in its place. A process
that stops between comparing and writing can still finish that one file when it wakes. Of two processes of a run that
claim a directory at once, the one with the earlier token may have the last word; the other takes the directory back
when it writes next. A process of another run counts as dead.
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

DYING_S = 30.0
"""How long a process of another run on this host is waited for: one that has lost its launcher ends within 25 s."""
LEASE_S = 120.0
"""The same for one on another host: the server of a network file system releases the locks of a dead host later."""
POLL_S = 0.05

_lost: set[StoragePath] = set()  # what other processes have claimed from this one, which may not claim it back


class Owner(msgspec.Struct, frozen=True):
    """Who has claimed a directory: the content of `.NAME.owner`.

    Attributes:
        run: id of the run of the launcher, or of the job; empty if the job has no name.
        attempt: how often the launcher had started the job before.
        generation: of the members of an elastic job.
        process: differs from that of every other process.
        host, pid: for people.
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
        """Orders the owners of one run."""
        return self.attempt, self.generation

    def is_of_run(self, other: Owner) -> bool:
        """Whether both are of the same run."""
        return bool(self.run) and self.run == other.run


class WriteClaim:
    """The right of this process to write certain files. Threads may share it.

    Args:
        directory: where they are; created when it is claimed.
        name: what the files have in common; other names in the directory may belong to other processes.
        generation: number of the present membership, in elastic jobs.
    """

    def __init__(self, directory: StoragePath, name: str, generation: Callable[[], int] = lambda: 0):
        self.directory = directory
        self._record = owner_record(directory.absolute(), name)
        self._generation = generation
        self._mutex = threading.RLock()  # protects the record; held while a file is written

    def acquire(self) -> None:
        """Claim the directory, unless this process has it. Waits for a process of another run that may be dying.

        Raises:
            ConfigurationError: another job that is alive has it.
            SupersededError: a later process of this job has it.
            OSError: the claim cannot be written.
        """
        with self._mutex:
            if self._record.is_mine:
                return
            self.directory.mkdir(parents=True, exist_ok=True)
            me, started_at, has_noticed = self._me(), time.monotonic(), False
            while (owner := self._try(me)) is not None:
                limit_s = DYING_S if owner.host == me.host else LEASE_S
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
        """Around putting files in their places, and around deleting them: nothing else may claim the directory then.

        Raises: as `acquire`, which it does first if need be.
        """
        # The mutex before the file's lock, here and in `acquire`. That lock belongs to an open file: without the mutex,
        # another thread of this process would poll for it like a stranger.
        with self._mutex:
            self.acquire()
            with self._record.locked():
                self._check()
                yield
                self._check()  # see the top of the file

    def _check(self) -> None:
        """Raise SupersededError unless this process has the directory, or it is its turn by the tokens."""
        owner, me = self._read(), self._me()
        if owner is not None and owner.process == me.process:
            return
        # Where there are no locks, an earlier process of the run may have had the last word.
        if owner is not None and me.is_of_run(owner) and me.token > owner.token:
            self._record.take(msgspec.json.encode(me))
            return
        self._record.drop()
        _lost.add(self._record.path)
        raise self._superseded(owner)

    def release(self) -> None:
        """Let others claim the directory. Safe to call twice."""
        with self._mutex:
            if not self._record.is_mine:
                return
            self._record.drop()
            with contextlib.suppress(OSError):  # the directory is gone: nothing is left to write
                # Another process took it meanwhile, which this one has not noticed: it may not claim it back.
                if (owner := self._read()) is None or owner.process != _process():
                    _lost.add(self._record.path)

    def _me(self) -> Owner:
        run, attempt = run_of_job()
        # At each call, because the generation grows while the claim lasts.
        return Owner(run, attempt, self._generation(), _process(), socket.gethostname(), os.getpid())

    def _try(self, me: Owner) -> Owner | None:
        """Claim the directory; returns its owner if that is of another run and alive."""
        with self._record.locked():
            owner = self._read()
            if owner is not None and owner.process != me.process:
                of_run, has_lost = me.is_of_run(owner), self._record.path in _lost
                is_later = of_run and me.token > owner.token
                if (of_run and me.token < owner.token) or (has_lost and not is_later):
                    raise self._superseded(owner)
                if not of_run and self._record.is_alive():
                    return owner
            self._record.take(msgspec.json.encode(me))
            _lost.discard(self._record.path)
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
    """Names this process, also after a fork."""
    # In one step of the interpreter: two threads that ask first, at once, get the same.
    return _own.setdefault(os.getpid(), secrets.token_hex(8))
