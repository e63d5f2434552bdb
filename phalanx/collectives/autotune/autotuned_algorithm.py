"""Measures in the first all-reduces which algorithm, chunk size and pack size are fastest.

Message sizes differ by orders of magnitude, and so do their best plans. Each power of two of bytes therefore has its
own search (see `trial_search`). The trials are the program's own calls, so no work is wasted and the real load is
measured.

All ranks see the same calls, so they try the same plans. A rank measures the time until it has its result, which for
early ranks is mostly waiting. The minimum over the ranks is the time of the rank that arrived last: the cost of the
algorithm itself. The ranks exchange these minima at the end of each round, within the call that ends it.

Different algorithms add in different orders. All ranks still get the same bits, but another run of the job may choose a
different algorithm and round differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from phalanx.collectives.autotune.autotune_log import AutotuneLog
from phalanx.collectives.autotune.trial_search import TrialSearch
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.fusion_layout import group_by_dtype
from phalanx.collectives.host.algorithm import CollectiveAlgorithm, Reduction, Views
from phalanx.collectives.operation import CollectiveCall

LEAST_BYTES = 64 * 1024
"""Smaller messages are exchanged in one piece, whatever the plan."""
LARGEST_CLASS = 30
"""Messages from 1 GiB on share one search."""


class AllReducePlan(NamedTuple):
    """How to all-reduce messages of about one size.

    Attributes:
        algorithm: Name of the algorithm.
        chunk_bytes: Number of bytes that are merged and passed on at a time.
        pack_bytes: Size of the buffers into which small arrays are packed; 0 for algorithms without packing.
    """

    algorithm: str
    chunk_bytes: int
    pack_bytes: int = 0

    def __str__(self) -> str:
        packs = f", packs of {_readable_size(self.pack_bytes)}" if self.pack_bytes else ""
        return f"{self.algorithm}, chunks of {_readable_size(self.chunk_bytes)}{packs}"


class TunableAlgorithm(CollectiveAlgorithm, Protocol):
    """An algorithm whose chunk and pack sizes can be chosen."""

    chunk_choices: Sequence[int]
    pack_choices: Sequence[int]

    @property
    def sizes(self) -> tuple[int, int]:
        """The current chunk and pack sizes in bytes."""
        ...

    def set_sizes(self, chunk_bytes: int, pack_bytes: int) -> None:
        """Use other sizes from the next call on. Every rank must do so at the same call."""
        ...


class AutotunedAlgorithm:
    """Runs all-reduces on the fastest of several algorithms, and every other collective on the default one.

    Args:
        algorithms: Algorithms among the same ranks, by name; the first one is the default.
        log: Log of the choices; None on ranks that do not report.
    """

    def __init__(self, algorithms: Mapping[str, TunableAlgorithm], log: AutotuneLog | None):
        self._algorithms = dict(algorithms)
        self._default_plans = [AllReducePlan(name, *each.sizes) for name, each in algorithms.items()]
        self._plan = self._default_plans[0]
        self._default = self._last_used = self._algorithms[self._plan.algorithm]
        self._log = log
        self._searches: dict[int, TrialSearch[AllReducePlan]] = {}
        self.ranks = self._default.ranks

    @property
    def name(self) -> str:
        """See `CollectiveAlgorithm.name`."""
        return self._last_used.name

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        """See `CollectiveAlgorithm.all_reduce`."""
        size = sum(layout.wire_bytes for layout in reduction.layouts)
        if size < LEAST_BYTES:
            self._use_default().all_reduce(call, reduction)
            return
        search = self._search_for(size)
        if search.choice is not None:
            self._use(search.choice).all_reduce(call, reduction)
            return
        algorithm = self._use(search.plan)
        started = time.perf_counter()
        algorithm.all_reduce(call, reduction)
        search.record(time.perf_counter() - started, lambda costs: self._minimum_over_ranks(call, costs))
        if search.choice is not None and self._log is not None:
            self._log.report(f"all-reduce of {_readable_size(1 << _size_class(size))}", search)

    def all_gather(self, call: CollectiveCall, parts: Sequence[Views]) -> None:
        """See `CollectiveAlgorithm.all_gather`."""
        self._use_default().all_gather(call, parts)

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        """See `CollectiveAlgorithm.all_to_all`."""
        self._use_default().all_to_all(call, outgoing, incoming, sizes)

    def fail(self) -> None:
        """See `CollectiveAlgorithm.fail`."""
        for algorithm in self._algorithms.values():
            algorithm.fail()

    def close(self) -> None:
        """See `CollectiveAlgorithm.close`."""
        for algorithm in self._algorithms.values():
            algorithm.close()

    def _use_default(self) -> TunableAlgorithm:
        # With the sizes of the last trial of this algorithm, if any: they are the same on every rank.
        self._last_used = self._default
        return self._default

    def _use(self, plan: AllReducePlan) -> TunableAlgorithm:
        self._last_used = self._algorithms[plan.algorithm]
        if plan != self._plan:
            self._last_used.set_sizes(plan.chunk_bytes, plan.pack_bytes)
            self._plan = plan
        return self._last_used

    def _search_for(self, size: int) -> TrialSearch[AllReducePlan]:
        number = _size_class(size)
        search = self._searches.get(number)
        if search is None:
            search = self._searches[number] = TrialSearch(
                self._default_plans[0],
                [lambda plan: self._default_plans, lambda plan: self._chunk_plans(plan, size), self._pack_plans],
            )
        return search

    def _chunk_plans(self, best: AllReducePlan, size: int) -> list[AllReducePlan]:
        choices = self._algorithms[best.algorithm].chunk_choices
        return [best._replace(chunk_bytes=chunk) for chunk in choices if chunk < 2 * size]

    def _pack_plans(self, best: AllReducePlan) -> list[AllReducePlan]:
        choices = self._algorithms[best.algorithm].pack_choices
        return [best._replace(pack_bytes=pack) for pack in choices if pack >= best.chunk_bytes]

    def _minimum_over_ranks(self, call: CollectiveCall, costs: Sequence[float]) -> list[float]:
        own: Array = np.array(costs)
        merged = np.empty_like(own)
        layouts = group_by_dtype([own.dtype], [own.size])
        reduction = Reduction(layouts, [own], [merged], [1.0], ReduceOp.MIN, 1)
        self._use(self._default_plans[0]).all_reduce(call, reduction)
        return [float(cost) for cost in merged]


def _size_class(size: int) -> int:
    """Exponent of the nearest power of two."""
    return min(LARGEST_CLASS, round(math.log2(size)))


def _readable_size(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"
