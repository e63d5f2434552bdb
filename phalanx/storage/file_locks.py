"""Locks on open files (`flock`), which the kernel releases even if their process is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def lock(descriptor: int) -> bool:
    """Lock a file or directory until it is closed. Return whether that succeeded; True if there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def unlock(descriptor: int) -> None:
    """Unlock a file or directory before it is closed: a child forked meanwhile inherits the descriptor and the lock."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
