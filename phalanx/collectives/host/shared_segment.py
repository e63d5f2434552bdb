"""A memory segment that the processes of one host share.

The first choice is a memfd: memory without a name, which the peers open through `/proc/<pid>/fd/<fd>` of the process
that created it. It cannot be left behind, whatever kills the processes, and does not count against a `/dev/shm` that a
container limits to 64 MiB. If peers must not access each other's /proc (different users or PID namespaces), a file in
`/dev/shm` or the temporary directory is used instead, and unlinked as soon as all peers have mapped it.

A segment starts with a random token, so that a process that opened something else (the same PID in a different
namespace) detects this.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import tempfile

import msgspec

TOKEN_BYTES = 16
HEADER_BYTES = 4096
"""The token's page; the usable memory starts after it."""
MEMFD = "memfd"
METHODS = (MEMFD, "/dev/shm", "tmp")
"""Methods to create segments, best first."""


class SegmentOffer(msgspec.Struct, frozen=True):
    """How to open a segment that another process has created.

    Attributes:
        path: File to open.
        size: Size of the file in bytes.
        token: Random bytes at the start of the segment.
    """

    path: str
    size: int
    token: bytes


class SharedSegment:
    """A shared mapping. The process that created it calls `settle` once all others have opened it.

    Attributes:
        memory: Mapping without the header page.
    """

    def __init__(self, descriptor: int, offer: SegmentOffer, *, named: bool):
        self.offer = offer
        self._descriptor = descriptor
        self._name = offer.path if named else None
        self._mapping = mmap.mmap(descriptor, offer.size)
        self.memory = memoryview(self._mapping)[HEADER_BYTES:]

    @classmethod
    def create(cls, size: int, method: str) -> SharedSegment:
        """Create a segment with `size` bytes of zeros after its header. Raises OSError if this is not possible."""
        size += HEADER_BYTES
        if method == MEMFD:
            if not hasattr(os, "memfd_create"):
                raise OSError(errno.ENOSYS, "memfd_create is Linux's")
            descriptor = os.memfd_create("phalanx")
            # Valid only as long as this process keeps the descriptor, which `settle` closes.
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            directory = tempfile.gettempdir() if method == "tmp" else method
            descriptor, path = tempfile.mkstemp(prefix="phalanx-", dir=directory)
        try:
            # Reserve the memory, so that a full file system fails now and not with SIGBUS at the first write.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.truncate(descriptor, size)
            offer = SegmentOffer(path, size, secrets.token_bytes(TOKEN_BYTES))
            os.pwrite(descriptor, offer.token, 0)
            return cls(descriptor, offer, named=method != MEMFD)
        except BaseException:
            os.close(descriptor)
            if method != MEMFD:
                os.unlink(path)
            raise

    @classmethod
    def open(cls, offer: SegmentOffer) -> SharedSegment:
        """Map a segment that another process offers. Raises OSError if this process cannot open it."""
        descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Check the size too: accessing memory beyond the end of a file causes SIGBUS.
            if os.fstat(descriptor).st_size != offer.size or (os.pread(descriptor, TOKEN_BYTES, 0) != offer.token):
                raise OSError(f"{offer.path} is not the segment that was offered")
            segment = cls(descriptor, offer, named=False)
        except BaseException:
            os.close(descriptor)
            raise
        segment.settle()
        return segment

    def settle(self) -> None:
        """Close the descriptor and unlink the name, so that only mappings keep the memory. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._name is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name)
            self._name = None

    def close(self) -> None:
        """Unmap. Existing views keep their memory until they are deleted."""
        self.settle()
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()
