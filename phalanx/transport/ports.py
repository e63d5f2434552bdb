"""Opens the listening sockets of a task, or takes over the socket that its launcher opened."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from phalanx.config.environment_variables import LISTEN_FD, SECRET
from phalanx.errors import ConfigurationError
from phalanx.transport.address import Address
from phalanx.transport.name_resolution import resolve

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues while the listener's thread is not running: all tasks of a large job at once."""

NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENOPROTOOPT)
"""This host has no address of the family: `::1` is in /etc/hosts even where IPv6 is disabled."""


class PortTakenError(ConfigurationError):
    """Another process listens on the port of this task."""


_inherited_sockets: dict[int, int] = {}
"""Inodes, by descriptor, of the launcher's listening sockets, which forked children must close."""

_has_warned_no_secret = False


def open_listening_sockets(
    address: Address, *, secret: bytes | None, listen_fd: int | None = None
) -> list[socket.socket]:
    """Open listening sockets on the port of a task's address.

    A task whose address is loopback or another IP address of this host listens there only. Otherwise it listens on all
    interfaces: an address may be translated on the way (containers, NAT), and a name may mean another address of this
    host to other hosts. Without a secret, an address that is not loopback logs a warning.

    Args:
        address: Address of this task according to the cluster.
        secret: The job's secret, or None.
        listen_fd: Descriptor of a listening socket inherited from the launcher, to use instead.

    Raises:
        PortTakenError: Another process listens on this port.
        ConfigurationError: The port cannot be opened for another reason, named in the message.
    """
    if not address.is_loopback and not secret:
        _warn_no_secret(address)
    if listen_fd is not None:
        return [_take_over(listen_fd, address.port)]
    try:
        if address.is_loopback:
            return _listen_on_loopback(address)
        return [listen_at(address.host, address.port)]
    except OSError as error:
        raise describe_failure(address, error) from error


def _warn_no_secret(address: Address) -> None:
    """Warn once per process."""
    global _has_warned_no_secret
    if _has_warned_no_secret:
        return
    _has_warned_no_secret = True
    logger.warning(
        "%s is not set, so anyone who can reach port %d of this host can join the job or disturb it. Set the "
        "same random value for all tasks (python -c 'import secrets; print(secrets.token_hex())'), or start "
        "the job with `phalanx run`, which does so.",
        SECRET,
        address.port,
    )


def _take_over(descriptor: int, port: int) -> socket.socket:
    advice = f"Unset {LISTEN_FD}: `phalanx run` sets it for the processes that it starts itself."
    try:
        duplicate = os.dup(descriptor)
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
    except OSError as error:
        raise ConfigurationError(f"{LISTEN_FD}={descriptor} is not a socket ({error.strerror}). {advice}") from error
    is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    is_ip = sock.family in (socket.AF_INET, socket.AF_INET6)
    if not (is_listening and is_ip and sock.getsockname()[1] == port):
        sock.close()
        raise ConfigurationError(
            f"{LISTEN_FD}={descriptor} is not a socket that listens on this task's port {port}. {advice}"
        )
    # The original stays open, so that the process can leave the job and rejoin it. Programs that this process starts
    # and processes that it forks must not keep the port.
    with contextlib.suppress(OSError):
        os.set_inheritable(descriptor, False)
    _inherited_sockets[descriptor] = os.fstat(descriptor).st_ino
    return sock


def _close_inherited_sockets() -> None:
    """In a forked child: release the port, which would otherwise stay taken as long as the child lives."""
    for descriptor, inode in _inherited_sockets.items():
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:  # otherwise, it was closed and its number is reused
                os.close(descriptor)
    _inherited_sockets.clear()


os.register_at_fork(after_in_child=_close_inherited_sockets)


def _listen_on_loopback(address: Address) -> list[socket.socket]:
    """Listen on every loopback address of the name: `localhost` may be 127.0.0.1, ::1 or both."""
    sockets: list[socket.socket] = []
    failure = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    with contextlib.ExitStack() as stack:
        # Deduplicated: /etc/hosts may map the name to one address on several lines.
        for family, endpoint in dict.fromkeys((family, endpoint) for family, _, _, _, endpoint in resolve(address)):
            try:
                sockets.append(stack.enter_context(listen(family, endpoint)))
            except OSError as error:
                if error.errno not in NO_SUCH_ADDRESS:
                    raise
                failure = error
        stack.pop_all()  # success: keep them open
    if not sockets:
        raise failure
    return sockets


def listen_at(host: str | None, port: int = 0) -> socket.socket:
    """Open a listening socket.

    Args:
        host: IP address to listen on. For a name, which may mean a different address to other hosts, for None, and for
            an address that this host does not have (NAT, containers): all addresses of this host.
        port: Port number; 0 to let the system choose.
    """
    if host is not None and Address(host, port).is_ip:
        [(family, _, _, _, endpoint), *_] = resolve(Address(host, port))
        try:
            return listen(family, endpoint)
        except OSError as error:
            if error.errno not in NO_SUCH_ADDRESS:
                raise
            logger.info("%s is not an address of this host: listening on all addresses.", host)
    return _on_all_addresses(port, listen)


def listen(family: int, endpoint: tuple[Any, ...], *, dual: bool = False) -> socket.socket:
    """Open a listening socket. `dual` makes an IPv6 socket accept IPv4 connections as well."""
    sock = _bind(family, endpoint, dual=dual) if endpoint[1] else _bind_free_port(family, endpoint, dual=dual)
    try:
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_free_port(family: int, endpoint: tuple[Any, ...], *, dual: bool) -> socket.socket:
    """Return a socket bound to a port that no other socket of this host uses.

    TensorFlow's servers listen on all addresses, so the port must be free on each (`tensorflow1/graph_server`). The
    kernel reclaims a port of its choice once the socket stops listening. The servers also need the port to stay taken
    until the socket is closed, so it is bound by number.
    """
    with _on_all_addresses(0, _bind) as chosen:
        return _bind(family, (endpoint[0], chosen.getsockname()[1], *endpoint[2:]), dual=dual)


def _on_all_addresses(port: int, opened: Callable[..., socket.socket]) -> socket.socket:
    """Call `opened` for all IPv6 and IPv4 addresses of this host, or for IPv4 alone if it has no IPv6."""
    try:
        return opened(socket.AF_INET6, ("::", port), dual=True)
    except OSError as error:
        if error.errno not in NO_SUCH_ADDRESS:
            raise
        return opened(socket.AF_INET, ("0.0.0.0", port))


def _bind(family: int, endpoint: tuple[Any, ...], *, dual: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Replaces only closing connections: a port with a listener stays taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Always set, because its default is a system setting (net.ipv6.bindv6only).
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(endpoint)
    except BaseException:
        sock.close()
        raise
    return sock


def describe_failure(address: Address, error: OSError) -> ConfigurationError:
    """Return the error for a task that could not listen on its address."""
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"port {address.port} of this host is taken by another process (`ss -ltnp 'sport = "
            f":{address.port}'` shows which). Stop it, or give this task another port in the cluster, on all "
            f"tasks."
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(
            f"port {address.port} may not be opened by this user: ports below 1024 are the system's. Choose another."
        )
    if isinstance(error, socket.gaierror):
        return ConfigurationError(f"this task's own host name {address.host!r} cannot be resolved ({error}).")
    return ConfigurationError(f"this task cannot listen at {address}: {error}.")
