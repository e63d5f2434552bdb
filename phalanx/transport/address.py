"""The address on which a task listens: `host:port`, checked when it is parsed and not when a connection fails."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from phalanx.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})

# Underscores are not allowed by RFC 1123, but Docker Compose and Slurm sites use them.
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name or IP address, IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address and not a name."""
        try:
            ipaddress.ip_address(self.host.split("%")[0])
        except ValueError:
            return False
        return True

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on the same host can reach it."""
        try:
            return ipaddress.ip_address(self.host.split("%")[0]).is_loopback
        except ValueError:
            return self.host.lower().rstrip(".") in LOOPBACK_NAMES

    @classmethod
    def parse(cls, text: object, *, where: str) -> Address:
        """Parse `host:port` or `[IPv6]:port`, ignoring surrounding spaces.

        Args:
            text: Address to parse.
            where: Source of the address, for messages, for example `cluster.worker[1]`.
        Raises: ConfigurationError with the mistake and a correction.
        """
        if not isinstance(text, str):
            raise ConfigurationError(f"{where} is {text!r}, which is not an address. Write a string like 'host:2222'.")
        stripped = text.strip()
        bare = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*://", "", stripped).split("/")[0]
        if bare != stripped:
            raise ConfigurationError(
                f"{where} is {text!r}, which is a URL. Write only host and port: {bare or 'host:2222'!r}."
            )
        host, port = _split(stripped)
        if port is None:
            if stripped.count(":") > 1:
                raise ConfigurationError(
                    f"{where} is {text!r}: an IPv6 address needs brackets before its port. "
                    f"Write '[{stripped}]:2222', or with another port."
                )
            raise ConfigurationError(
                f"{where} is {text!r}, which has no port. Write '{stripped or 'host'}:2222', or another port."
            )
        if not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
            raise ConfigurationError(
                f"{where} is {text!r}, whose port {port!r} is not a number from 1 to 65535. "
                f"Write for example '{host or 'host'}:2222'."
            )
        if not _is_host(host):
            raise ConfigurationError(
                f"{where} is {text!r}, whose host {host!r} is neither a host name nor an IP address. "
                f"Write for example 'worker0.example.com:{port}' or '10.0.0.1:{port}'."
            )
        return cls(host, int(port))


def _split(text: str) -> tuple[str, str | None]:
    """Return the host without brackets, and the text of the port or None."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        return (host, rest[1:]) if bracket and rest.startswith(":") else (text, None)
    host, colon, port = text.rpartition(":")
    return (host, port) if colon and ":" not in host else (text, None)


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None and len(host) <= 253
    return True
