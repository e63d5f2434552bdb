"""Locks on open files (`flock`), which the kernel releases however their process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def lock(descriptor: int) -> bool:
    """Lock a file or directory until it is closed; whether that succeeded. True on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def unlock(descriptor: int) -> None:
    """Unlock it before it is closed: a child that was forked meanwhile has it open, and so has the lock too."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
