"""The kinds of communicator that the contract suite runs on: name, hosts of the ranks, options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.membership import Membership
from phalanx.collectives import CommunicationImplementation, CommunicationOptions, connect
from phalanx.collectives.host.host_communicator import HostCommunicator
from tests.support.processes import run_ranks, values


@dataclass(frozen=True)
class Kind:
    """One way to connect ranks.

    Attributes:
        name: for the test's id.
        hosts: of the ranks.
        kind: what `HostCommunicator.kind` must say.
        options: for `connect`.
        segment_methods: likewise; None for the default.
    """

    name: str
    hosts: tuple[str, ...]
    kind: str
    options: CommunicationOptions = field(default_factory=CommunicationOptions)
    segment_methods: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def connect(self, membership: Membership, timeout_s: float | None = 50.0) -> HostCommunicator:
        options = CommunicationOptions(
            bytes_per_pack=self.options.bytes_per_pack,
            timeout_seconds=timeout_s,
            implementation=self.options.implementation,
        )
        if self.segment_methods is None:
            return connect(membership, options)
        return connect(membership, options, segment_methods=self.segment_methods)

    def run(self, function: Callable[[HostCommunicator], Any]) -> list[Any]:
        """What `function(communicator)` returns on each rank."""

        def body(membership: Membership) -> Any:
            with self.connect(membership) as communicator:
                assert communicator.kind == self.kind
                return function(communicator)

        return values(run_ranks(body, hosts=self.hosts))


RING = CommunicationOptions(implementation=CommunicationImplementation.RING)
SMALL_PACKS = CommunicationOptions(bytes_per_pack=4096)
SMALL_PACKS_RING = CommunicationOptions(4096, implementation=CommunicationImplementation.RING)

KINDS: Sequence[Kind] = (
    Kind("single", ("a",), "single"),
    Kind("shared2", ("a", "a"), "shared memory"),
    Kind("shared5", ("a",) * 5, "shared memory"),
    Kind("shared3-file", ("a",) * 3, "shared memory", segment_methods=("tmp",)),
    Kind("shared3-small-packs", ("a",) * 3, "shared memory", SMALL_PACKS),
    Kind("ring2", ("a", "a"), "ring", RING),
    Kind("ring3", ("a", "b", "c"), "ring"),
    Kind("ring3-small-packs", ("a", "b", "c"), "ring", SMALL_PACKS_RING),
    Kind("hierarchical-even", ("a", "a", "b", "b"), "hierarchical"),
    Kind("hierarchical-uneven", ("a", "b", "a", "a", "c"), "hierarchical"),
    Kind("hierarchical-no-memory", ("a", "a", "b"), "hierarchical", segment_methods=()),
)

SLOW = ("shared2", "shared3-file", "ring2", "ring3", "hierarchical-even", "hierarchical-no-memory")
"""Kinds that differ little from others: the contract suite runs on them only when the slow tests do. What fits into one
small pack takes the path of large ones; two ranks that share memory are what most other tests have."""
