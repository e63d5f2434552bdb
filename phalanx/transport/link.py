"""A link: one ordered connection between two processes, carrying frames or raw bytes.

The link owns its socket (TCP, Unix or one half of a socket pair, plain or TLS) and keeps it non-blocking. It has two
kinds of users: messages go through `send` and `receive`, which wait up to a deadline; collectives, which move several
streams at once, use `try_send` and `try_receive_into` and do their own waiting. Both may alternate on one link, as
long as raw bytes do not interrupt a frame.

How a dead peer is detected:

- The peer's *process* dies: its kernel closes the connection, and the next call here raises `LinkClosedError`.
- The peer's *host* dies (power, cable): nothing is closed. On an idle connection, TCP keep-alive detects this after
  25 s (`tcp_state`). A connection with bytes in flight sends no keep-alive, and the kernel gives up only after about 15
  minutes; `check_alive` detects the dead host after `SILENT_HOST_S`. TCP_USER_TIMEOUT was rejected: Linux also applies
  it to a peer whose host answers, but whose process does not read for a while (it compiles, is stopped, or holds the
  interpreter lock). A slow peer must cause a timeout that says so, and must not count as dead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
import weakref
from collections.abc import Collection, Sequence

from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.transport import tcp_state
from phalanx.transport.dead_peers import SILENT_HOST_S
from phalanx.transport.encryption import SessionKeys
from phalanx.transport.frames import Buffer, FrameReader, encode_frame
from phalanx.transport.wires import EncryptedWire, PlainWire, TLSWire, Wire, skip_bytes

ALIVE_CHECK_INTERVAL_S = 5.0
"""How often a waiting call checks its connection."""

DELIVERY_TIMEOUT_S = 30.0
"""How long a leaving process waits until the other hosts have received its bytes. Packets may be lost repeatedly."""


class Link:
    """One end of a connection. One thread at a time may send and one may receive; any may close.

    Args:
        sock: Connected stream socket; the link closes it.
        peer: Name of the other end, for messages, for example `worker/1`.
    """

    def __init__(self, sock: socket.socket, peer: str):
        self.peer = peer
        self._sock = sock
        self._wire: Wire = TLSWire(sock) if isinstance(sock, ssl.SSLSocket) else PlainWire(sock)
        self._closed = False
        self._reader = FrameReader()
        sock.setblocking(False)
        tcp_state.configure(sock)
        _links.add(self)

    def __repr__(self) -> str:
        return f"<Link to {self.peer}{', closed' if self._closed else ''}>"

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def encrypted(self) -> bool:
        return self._wire.is_encrypted

    def encrypt(self, keys: SessionKeys) -> None:
        """Encrypt all further bytes, and expect encrypted bytes. No bytes may be in flight."""
        self._wire = EncryptedWire(self._sock, keys)

    def fileno(self) -> int:
        """Return the descriptor to wait on with select or poll; -1 after `close`.

        With encryption, the link may hold bytes while the descriptor is not readable: call `try_receive_into` until it
        returns 0, and only then wait.
        """
        return self._sock.fileno()

    # ------------------------------------------------------------------ frames

    def send(self, header: bytes, buffers: Sequence[Buffer] = (), *, deadline: float) -> None:
        """Send one frame, and return when the kernel has accepted all of it.

        The buffers are not copied, so they must not change until this returns. If both ends send frames larger than the
        sockets' buffers at the same time, both wait until the deadline: one end must receive first.

        Args:
            header: Description of the message, at most `MAX_HEADER_BYTES`.
            buffers: Contiguous memory to send after the header.
            deadline: Time at which to give up, by `time.monotonic()`.

        Raises:
            LinkClosedError: The peer is gone.
            LinkTimeoutError: The peer did not read. If part of the frame was sent, the link is closed, because nothing
                can follow an incomplete frame.
            FrameError: The frame exceeds a limit; nothing was sent.
        """
        self.send_bytes(encode_frame(header, buffers), deadline=deadline)

    def receive(self, *, deadline: float) -> tuple[bytes, list[memoryview]]:
        """Receive one frame: its header and its buffers, which the caller owns.

        Raises:
            LinkClosedError: The peer is gone.
            LinkTimeoutError: No complete frame arrived in time. Its first part is kept; call `receive` again.
            FrameError: The bytes are not a frame; the link is closed.
        """
        reader = self._reader
        while True:
            count = self.try_receive_into(reader.get_buffer())
            if count:
                try:
                    frame = reader.buffer_updated(count)
                except FrameError as error:
                    self.close()  # the start of the next frame is unknown
                    raise FrameError(f"from {self.peer}: {error}") from error
                if frame is not None:
                    return frame.header, frame.buffers
            elif not self._wait(self._wire.receive_waits_for, deadline):
                progress = "nothing" if reader.idle else "only part of a message"
                raise self._late(f"sent {progress} before the deadline")

    # --------------------------------------------------------------- raw bytes

    def send_bytes(self, pieces: Sequence[memoryview], *, deadline: float) -> None:
        """Send all bytes of `pieces` without a frame; otherwise like `send`."""
        total = remaining = sum(piece.nbytes for piece in pieces)
        while remaining:
            count = self.try_send(pieces)
            if count:
                remaining -= count
                pieces = skip_bytes(pieces, count)
            elif not self._wait(self._wire.send_waits_for, deadline):
                # Only the rest of these bytes could follow, even if they were only sealed.
                if remaining < total or self._wire.is_in_record:
                    self.close()
                raise self._late(f"did not read: {total - remaining} of {total} bytes were sent before the deadline")

    def wait_readable(self, *, deadline: float) -> bool:
        """Wait until `try_receive_into`, after it returned 0, may have more bytes. Return False at the deadline."""
        return self._wait(self._wire.receive_waits_for, deadline)

    def try_send(self, buffers: Sequence[memoryview]) -> int:
        """Send what the kernel accepts without blocking.

        Returns: Number of bytes sent, counted over the buffers in order; 0 if it would block. In that case, offer the
            same bytes again later, as encryption requires: some may have been sealed already.
        Raises: LinkClosedError if the peer is gone.
        """
        try:
            return self._wire.send(buffers)
        except (OSError, ValueError) as error:  # ValueError: an SSLSocket that another thread has closed
            raise self._gone(error) from error

    def try_receive_into(self, buffer: memoryview) -> int:
        """Read available bytes, up to the size of `buffer`.

        Returns: Number of bytes read; 0 if it would block.
        Raises: LinkClosedError if the peer has closed the connection or is dead.
        """
        if not buffer.nbytes:
            return 0
        try:
            count = self._wire.receive_into(buffer)
        except FrameError as error:
            self.close()
            raise LinkClosedError(f"the link to {self.peer} was closed: {error}.") from error
        except (OSError, ValueError) as error:
            raise self._gone(error) from error
        if count is None:
            return 0
        if not count:
            raise LinkClosedError(f"{self.peer} closed the connection: its process ended or left the job.")
        return count

    # ------------------------------------------------------------------ health

    def check_alive(self) -> None:
        """Check with the kernel that the peer's host still answers. Cheap; call it every few seconds while waiting.

        Raises: LinkClosedError if bytes are in flight and the peer's host has not acknowledged any for
            `SILENT_HOST_S` (see the top of this file). Only Linux TCP reports this; elsewhere, this does nothing.
        """
        silence_s = 0.0 if self._closed else tcp_state.host_silence_s(self._sock)
        if silence_s >= SILENT_HOST_S:
            raise LinkClosedError(
                f"the host of {self.peer} has not answered for {silence_s:.0f} s, with data in flight to it: the host "
                f"or the network is down."
            )

    def peer_closed(self) -> bool:
        """Whether the peer is known to have closed its end. Bytes that it sent before may still be readable."""
        if self._closed:
            return True
        poller = select.poll()
        try:
            poller.register(self._sock, getattr(select, "POLLRDHUP", 0))
        except (OSError, ValueError):
            return True
        return bool(poller.poll(0))

    def unacknowledged_bytes(self) -> int:
        """Number of sent bytes that the peer's host has not received yet; 0 if the connection is broken. Only Linux TCP
        reports this; elsewhere, this is 0."""
        return 0 if self._closed else tcp_state.unacknowledged_bytes(self._sock)

    def finish(self) -> None:
        """Signal the end of the stream to the peer; receiving continues."""
        # Here and in `close`, not SSLSocket.shutdown, which drops the TLS state that another thread may be using.
        with contextlib.suppress(OSError):  # the peer may be gone already
            socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; safe to call twice and from any thread. Waiting calls raise LinkClosedError."""
        self._closed = True  # first, so that a call that fails in another thread knows why
        # shutdown, because close alone does not wake a thread that waits for this socket.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()

    def _wait(self, events: int, deadline: float) -> bool:
        """Wait until the socket is ready. Return False at the deadline."""
        poller = select.poll()
        try:
            poller.register(self._sock, events)
        except (OSError, ValueError) as error:
            raise self._gone(error) from error
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            # Not until the deadline in one call: a silent host causes no event.
            if poller.poll(1000 * min(remaining_s, ALIVE_CHECK_INTERVAL_S) + 1):
                return True
            self.check_alive()
            if self._closed:  # by another thread, between two polls: the descriptor may belong to another file now
                raise self._gone(OSError(errno.EBADF, "closed"))

    def _late(self, what: str) -> LinkTimeoutError:
        silence_s = 0.0 if self._closed else tcp_state.host_silence_s(self._sock)
        if silence_s:
            why = f"Its host has not answered for {silence_s:.0f} s: the host or the network is down."
        else:
            why = "It is connected, so it is busy, stopped or waiting for something else."
        return LinkTimeoutError(f"{self.peer} {what}. {why}", self.peer)

    def _gone(self, error: Exception) -> LinkClosedError:
        if self._closed:
            return LinkClosedError(f"the link to {self.peer} was closed by this process.")
        return LinkClosedError(f"the connection to {self.peer} is broken ({error}).")


def wait_until_delivered(links: Collection[Link], at_most_s: float = DELIVERY_TIMEOUT_S) -> None:
    """Return when the peers' hosts have received all bytes sent over these links, or at the timeout.

    If a process closes its end while bytes are in flight and the peer sends something meanwhile, those bytes can be
    lost: the kernel answers with a reset (RFC 1122, 4.2.2.13) and no longer retransmits.
    """
    until, wait_s = time.monotonic() + at_most_s, 1e-4
    while any(link.unacknowledged_bytes() for link in links) and time.monotonic() < until:
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.02)


_links: weakref.WeakSet[Link] = weakref.WeakSet()  # all links of this process, for its forked children


def _close_inherited_links() -> None:
    """In a forked child: close the copies of the parent's sockets, without shutting down its connections.

    Otherwise a data loader's worker processes would keep the connections of a killed task open, and its peers would
    not notice its death. Programs started with exec do not inherit the sockets (PEP 446).
    """
    for link in list(_links):
        link._closed = True
        link._sock.close()


os.register_at_fork(after_in_child=_close_inherited_links)
