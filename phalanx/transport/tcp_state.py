"""Configures TCP connections, and reads their state from the kernel. Other sockets have no such state."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios

from phalanx.transport.dead_peers import (
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    UNANSWERED_TRANSMISSIONS,
)

_TCP_CLOSE = 7
"""The state of a closed connection, in include/net/tcp_states.h."""


def configure(sock: socket.socket) -> None:
    """Send small messages at once, and detect a dead host on an idle connection."""
    if not _is_tcp(sock):
        return
    # Disable Nagle's algorithm: the end of a message must not wait for the acknowledgement of its start.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Some systems lack these options and keep their slower defaults. macOS calls the first one TCP_KEEPALIVE.
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
    for option, value in (
        (idle, KEEPALIVE_IDLE_S),
        (getattr(socket, "TCP_KEEPINTVL", None), KEEPALIVE_INTERVAL_S),
        (getattr(socket, "TCP_KEEPCNT", None), KEEPALIVE_PROBES),
    ):
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Number of sent bytes that the peer's host has not received yet; 0 if the connection is broken. Linux only."""
    if not _has_state(sock):
        return 0
    with contextlib.suppress(OSError):
        (state,) = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        # A broken connection still counts bytes that it will never send.
        if state != _TCP_CLOSE:
            (count,) = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
            return int(count)
    return 0


def host_silence_s(sock: socket.socket) -> float:
    """Seconds since the peer's host last acknowledged anything; 0.0 if it owes no answer. Linux only.

    Source: struct tcp_info in include/uapi/linux/tcp.h: eight bytes (the third is the number of unanswered
    retransmissions, the fourth that of unanswered probes), then u32 fields of which the 13th is
    tcpi_last_ack_recv, in ms.
    """
    if not _has_state(sock):
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    except OSError:  # another thread has closed it
        return 0.0
    retransmits, probes = info[2], info[3]
    if max(retransmits, probes) < UNANSWERED_TRANSMISSIONS:
        return 0.0
    (last_ack_ms,) = struct.unpack_from("=I", info, 56)
    return float(last_ack_ms) / 1000


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def _has_state(sock: socket.socket) -> bool:
    return hasattr(socket, "TCP_INFO") and _is_tcp(sock)
