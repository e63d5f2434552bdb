"""Parses the host lists of schedulers and derives clusters from them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.cluster.spec import WORKER, ClusterSpec
from phalanx.errors import ConfigurationError

MAX_HOSTS = 1 << 16
"""Limit for the expansion of one expression, so that a typo like [1-999999999] is an error instead of a hang."""

HostTasks = list[tuple[str, int]]
"""Hosts in order, each with its number of tasks."""


def expand_host_list(text: str) -> list[str]:
    """Return the hosts of a Slurm node list, in its order.

    >>> expand_host_list("a[01-03,7],b,c[1-2]x[5,6]")
    ['a01', 'a02', 'a03', 'a7', 'b', 'c1x5', 'c1x6', 'c2x5', 'c2x6']

    Raises: ConfigurationError if brackets or ranges are malformed.
    """
    hosts = [host for part in _split_outside_brackets(text) for host in _expand(part, text)]
    if not hosts:
        raise ConfigurationError(f"the list of hosts {text!r} is empty.")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a Slurm list with repetitions.

    >>> expand_counts("3(x2),2,1")
    [3, 3, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            raise ConfigurationError(f"{text!r} is not a list of tasks per host: {part!r} is not like '2' or '2(x3)'.")
        counts.extend([int(match[1])] * int(match[2] or 1))
        _check_size(len(counts), text)
    return counts


def parse_hosts(text: str, *, where: str) -> HostTasks:
    """Parse hosts with slots, `a:2,b:2`; one slot by default.

    >>> parse_hosts("a:2, b", where="PHALANX_HOSTS")
    [('a', 2), ('b', 1)]
    """
    hosts: HostTasks = []
    for part in text.split(","):
        match = re.fullmatch(r"(\[[^\]\s]+\]|[^\s:]+)(?::([1-9][0-9]{0,5})?)?", part.strip())
        if match is None:
            raise ConfigurationError(
                f"{where} is {text!r}: {part.strip()!r} is not like 'host' or 'host:2' (a host and how many "
                f"tasks it has). Write for example 'host0:2,host1:2', an IPv6 address in brackets."
            )
        hosts.append((match[1].strip("[]"), int(match[2] or "1")))
    return hosts


def worker_cluster(tasks: HostTasks, first_port: int) -> ClusterSpec:
    """Return workers numbered host by host; the ports of each host count up from `first_port`.

    If a host is listed twice, its port numbers continue.
    """
    used: dict[str, int] = {}
    addresses = []
    for host, count in tasks:
        for _ in range(count):
            port = first_port + used.get(host, 0)
            used[host] = used.get(host, 0) + 1
            addresses.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return ClusterSpec({WORKER: addresses})


def interleave_hosts(tasks: HostTasks) -> HostTasks:
    """Distribute the tasks one by one over the hosts, as `srun --distribution=cyclic` numbers them."""
    rounds = max((count for _, count in tasks), default=0)
    return [(host, 1) for turn in range(rounds) for host, count in tasks if turn < count]


def _split_outside_brackets(text: str) -> list[str]:
    if re.search(r"\[[^\]]*\[|\][^\[]*\]|^[^\[]*\]|\[[^\]]*$", text):
        raise ConfigurationError(f"the list of hosts {text!r} has brackets that do not match.")
    return [part for part in re.split(r",(?![^\[]*\])", text.strip()) if part]


def _expand(part: str, text: str) -> list[str]:
    hosts = [""]
    for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
        pieces = [literal] if literal else _expand_ranges(ranges, text)
        _check_size(len(hosts) * len(pieces), text)
        hosts = [host + piece for host in hosts for piece in pieces]
    return hosts


def _expand_ranges(ranges: str, text: str) -> Sequence[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch("([0-9]{1,18})(?:-([0-9]{1,18}))?", item.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigurationError(f"the list of hosts {text!r} has {item!r} in brackets; expected '3' or '1-3'.")
        first, last = int(match[1]), int(match[2] or match[1])
        _check_size(last - first + 1, text)
        # All numbers have the width of the first one: [01-03] is 01, 02, 03.
        numbers.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers


def _check_size(count: int, text: str) -> None:
    if count > MAX_HOSTS:
        raise ConfigurationError(f"the list {text!r} expands to more than {MAX_HOSTS} entries.")
