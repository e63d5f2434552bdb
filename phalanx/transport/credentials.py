"""The credentials of a task, and which connections it wants encrypted."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field

from phalanx.config.job_config import Encryption
from phalanx.transport.tls import TLS


@dataclass(frozen=True, slots=True)
class Credentials:
    """See the top of the file.

    Attributes:
        secret: The job's secret, or None.
        tls: TLS contexts of the task, or None for connections without TLS.
        encryption: Which connections that carry training data are encrypted.
    """

    secret: bytes | None = field(default=None, repr=False)
    tls: TLS | None = None
    encryption: Encryption = Encryption.ALWAYS

    def wants_encryption(self, sock: socket.socket, *, bulk: bool = True) -> bool:
        """Whether this task wants a connection encrypted by records. With TLS, it is encrypted anyway.

        Args:
            sock: Connected socket.
            bulk: Whether it carries training data; True if unknown.
        """
        if self.tls is not None:
            return False
        if not bulk or self.encryption is Encryption.ALWAYS:
            return True
        return self.encryption is Encryption.REMOTE and not is_local(sock)


def is_local(sock: socket.socket) -> bool:
    """Whether both ends of a connected socket are on this host."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    own, other = (_address(name) for name in (sock.getsockname(), sock.getpeername()))
    return own == other or (own.is_loopback and other.is_loopback)


def _address(name: tuple[str, int]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
