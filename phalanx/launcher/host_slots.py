"""Hosts and their numbers of slots, parsed from `--hosts` or from the output of a `--host-discovery-script`."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.transport.address import LOOPBACK, Address
from phalanx.transport.name_resolution import look_up, resolve

# More digits are a typing error. (Each task costs memory before the launcher can check whether there is room for it.)
SLOT_DIGITS = 5
MAX_WORKERS = 10**SLOT_DIGITS - 1
# [user@]name[:workers], with an IPv6 address in brackets. No leading dash, which ssh would read as an option.
_ENTRY = re.compile(r"(?:(?P<user>[\w][\w.-]*)@)?(?P<name>\[[0-9a-fA-F:.]+\]|[\w][\w.-]*)(?::(?P<workers>\d+))?")
_HERE = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host and its number of workers.

    Attributes:
        name: Name that the other hosts can resolve, or an IPv6 address in brackets, as in `host:port`.
        workers: Number of slots.
        user: Login name; None leaves it to ssh's configuration.
    """

    name: str
    workers: int
    user: str | None = None

    @property
    def login(self) -> str:
        """Destination for ssh."""
        name = self.name.strip("[]")
        return f"{self.user}@{name}" if self.user else name

    @property
    def is_loopback(self) -> bool:
        return self.name.lower() in _HERE

    @property
    def is_local(self) -> bool:
        """Whether this is the launcher's own host, which needs no ssh."""
        own = socket.gethostname().lower()
        return self.user is None and (self.is_loopback or self.name.lower() in (own, own.partition(".")[0]))


# A documentation address (RFC 5737) that no host has: the route to it is the default route.
_ANYWHERE = HostSpec("192.0.2.1", 1)


def parse_hosts(text: str) -> list[HostSpec]:
    """Parse `a:2,user@b:2,[fe80::1]:4`, keeping the order. A host without a number runs one worker.

    Raises: ConfigurationError that says what is wrong and what to write instead.
    """
    host_specs = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ConfigurationError(
                f"--hosts: {entry.strip()!r} is not a host. Write name:workers, separated by commas, "
                "for example --hosts a:2,b:2 (an IPv6 address in brackets)."
            )
        if len(match["workers"] or "") > SLOT_DIGITS:
            raise ConfigurationError(f"--hosts: {entry.strip()[:80]!r}: at most {MAX_WORKERS} workers can be given.")
        workers = int(match["workers"] or 1)
        if workers < 1:
            raise ConfigurationError(f"--hosts: {entry.strip()!r} has no worker. Leave the host out, or give it 1.")
        host_specs.append(HostSpec(match["name"], workers, match["user"]))
    _check(host_specs)
    return host_specs


def parse_hostfile(text: str) -> list[HostSpec]:
    """Parse a hostfile with lines `name slots=2`; without `slots`, a host runs one worker. A # starts a comment.

    Raises: ConfigurationError naming the line.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=(\d+)", words[1]) if len(words) == 2 else None
        if len(words) > 2 or (len(words) == 2 and slots is None):
            raise ConfigurationError(f"--hostfile, line {number}: {line!r} is not `name slots=2`.")
        entries.append(f"{words[0]}:{slots[1]}" if slots else words[0])
    if not entries:
        raise ConfigurationError("--hostfile names no host. Write a line `name slots=2` for each.")
    return parse_hosts(",".join(entries))


def parse_discovered(text: str, slots: int) -> list[HostSpec]:
    """Parse the output of a discovery script: lines `name:slots`, or `name`, as for `horovodrun`. A # starts a comment.

    Args:
        text: Output of the script.
        slots: Number of slots of a host that is listed without a number.

    Raises: ConfigurationError naming the line. Empty output is valid: there is no host.
    """
    host_specs: dict[str, HostSpec] = {}
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _ENTRY.fullmatch(entry)
        if match is None or len(match["workers"] or "") > SLOT_DIGITS:
            raise ConfigurationError(f"{entry[:80]!r} is not a host. Write `name:slots`, or `name`.")
        host_spec = HostSpec(match["name"], int(match["workers"] or slots), match["user"])
        # This host has several names, and its cores must be divided once.
        known = host_specs.setdefault("localhost" if host_spec.is_local else host_spec.name, host_spec)
        if (host_spec.workers, host_spec.user) != (known.workers, known.user):
            raise ConfigurationError(f"{host_spec.name} is listed twice, with different slots.")
    return [host_spec for host_spec in host_specs.values() if host_spec.workers]


def find_local_name(others: Sequence[HostSpec]) -> str:
    """Find a name or address at which other hosts reach this one; `127.0.0.1` if there is no other.

    Args:
        others: Some of the other hosts.
    """
    with contextlib.suppress(OSError):
        name = look_up(socket.getfqdn)
        if not any(str(entry[4][0]).startswith(("127.", "::1")) for entry in resolve(Address(name, 0))):
            return name
    for other in [*others, _ANYWHERE]:
        # Connecting a datagram socket sends nothing. It only chooses the route, and thus the local address.
        with contextlib.suppress(OSError):
            family, _, _, _, endpoint = resolve(Address(other.name.strip("[]"), 9))[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(endpoint)
                address: str = probe.getsockname()[0]
            return f"[{address}]" if ":" in address else address
    return LOOPBACK


def choose_hosts(
    workers: int | None, hosts: str | None, hostfile: Path | None, *, all_slots: bool = False, others: int = 0
) -> list[HostSpec]:
    """Choose the slots of the tasks: on this host, or the first slots of the given hosts. Tasks that are not workers
    get the remaining slots, or run on the last host if none remain.

    Args:
        workers: Number of workers; None for all slots of the hosts.
        hosts: Value of `--hosts`.
        hostfile: File that lists the hosts.
        all_slots: Whether to return all slots of the hosts, even if there are more than workers, which may use any of
            them.
        others: Number of tasks that are not workers.

    Raises: ConfigurationError if both name hosts, or there are fewer slots than workers.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigurationError("--hosts and --hostfile both name hosts. Give one of them.")
    if hosts is None and hostfile is None:
        return [HostSpec("localhost", (workers or 1) + others)]
    # Comments may be in any encoding; names that this damages are not valid names.
    text = hostfile.read_text(encoding="utf-8", errors="replace") if hostfile else ""
    host_specs = parse_hosts(hosts) if hosts is not None else parse_hostfile(text)
    num_slots = sum(host_spec.workers for host_spec in host_specs)
    if workers is None:
        workers = num_slots
    if workers > num_slots:
        raise ConfigurationError(
            f"{workers} workers are requested, and the hosts have {num_slots} places. Give more hosts, or larger "
            f"numbers, for example --hosts {host_specs[0].name}:{host_specs[0].workers + workers - num_slots}."
        )
    if all_slots:
        return [replace(host_spec, workers=min(host_spec.workers, workers)) for host_spec in host_specs]
    chosen: list[HostSpec] = []
    count = workers + others
    for host_spec in host_specs:
        if count:
            chosen.append(replace(host_spec, workers=min(host_spec.workers, count)))
            count -= chosen[-1].workers
    return [*chosen[:-1], replace(chosen[-1], workers=chosen[-1].workers + count)]


def check_interfaces(names: str | None, host_specs: Sequence[HostSpec]) -> None:
    """Check the value of `--network-interfaces`. Workers on one host do not need it; others use the hosts' names.

    Raises: ConfigurationError for an interface that this host does not have, or several hosts.
    """
    if names is None:
        return
    known = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ConfigurationError(f"--network-interfaces: this host has no {unknown[0]!r}; it has {', '.join(known)}.")
    if len(host_specs) > 1:
        raise ConfigurationError(
            "--network-interfaces: the hosts' names determine which network is used. Leave the option out, and name "
            "the hosts in --hosts by their names or addresses in that network."
        )


def _check(host_specs: Sequence[HostSpec]) -> None:
    names = [host_spec.name for host_spec in host_specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        total = sum(host_spec.workers for host_spec in host_specs if host_spec.name == twice)
        raise ConfigurationError(f"--hosts names {twice} twice. Write it once: {twice}:{total}.")
    loopback = next((host_spec.name for host_spec in host_specs if host_spec.is_loopback), None)
    if loopback is not None and len(host_specs) > 1:
        raise ConfigurationError(
            f"--hosts has {loopback} next to other hosts, which cannot reach this host under that name. "
            f"Use a name that all hosts resolve, perhaps {socket.gethostname()}."
        )
