"""Which hosts run how many workers: the value of `--hosts`."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.errors import ConfigurationError

# [user@]name[:workers]; an IPv6 address stands in brackets. A leading dash would be an option to ssh.
_ENTRY = re.compile(r"(?:(?P<user>[\w.-]+)@)?(?P<name>\[[0-9a-fA-F:.]+\]|[\w][\w.-]*)(?::(?P<workers>\d+))?")
_HERE = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class HostShare:
    """A host and how many workers it runs.

    Attributes:
        name: as the other hosts can resolve it; an IPv6 address in brackets, as in `host:port`.
        user: to log in as; None leaves it to ssh's configuration.
    """

    name: str
    workers: int
    user: str | None = None

    @property
    def login(self) -> str:
        """The destination for ssh."""
        name = self.name.strip("[]")
        return f"{self.user}@{name}" if self.user else name

    @property
    def is_loopback(self) -> bool:
        return self.name in _HERE

    @property
    def is_here(self) -> bool:
        """Whether this is the launcher's own host, which needs no ssh."""
        own = socket.gethostname()
        return self.user is None and (self.is_loopback or self.name in (own, own.partition(".")[0]))


def parse_hosts(text: str) -> list[HostShare]:
    """`a:2,user@b:2,[fe80::1]:4` as shares, in order; a host without a number runs one worker.

    Raises: ConfigurationError with what is wrong and what to write instead.
    """
    shares = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ConfigurationError(
                f"--hosts: {entry.strip()!r} is not a host. Write name:workers, separated by commas, "
                "for example --hosts a:2,b:2 (an IPv6 address in brackets)."
            )
        workers = int(match["workers"] or 1)
        if workers < 1:
            raise ConfigurationError(f"--hosts: {entry.strip()!r} has no worker. Leave the host out, or give it 1.")
        shares.append(HostShare(match["name"], workers, match["user"]))
    _check(shares)
    return shares


def add_tasks(shares: Sequence[HostShare], count: int) -> list[HostShare]:
    """The shares with so many tasks more, which are not workers, on the last host."""
    *others, last = shares
    return [*others, replace(last, workers=last.workers + count)]


def _check(shares: Sequence[HostShare]) -> None:
    names = [share.name for share in shares]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        total = sum(share.workers for share in shares if share.name == twice)
        raise ConfigurationError(f"--hosts names {twice} twice. Write it once: {twice}:{total}.")
    loopback = next((share.name for share in shares if share.is_loopback), None)
    if loopback is not None and len(shares) > 1:
        raise ConfigurationError(
            f"--hosts has {loopback} beside other hosts, which cannot reach this host under that name. "
            f"Use a name that all hosts resolve, perhaps {socket.gethostname()}."
        )
