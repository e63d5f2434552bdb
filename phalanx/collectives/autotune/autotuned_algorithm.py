"""All-reduces whose first calls find out how they are fastest: by which algorithm, in chunks and packs of what size.

Sizes differ by orders of magnitude, and so do their best ways: each power of two of bytes has a search of its own
(`search`). Trials are the calls of the program itself, so nothing is computed in vain, and what is measured is what
counts.

All ranks see the same calls, so they try the same plans. What a call costs on a rank is the time until it has its
result, which for those who came early is mostly waiting; the least of the ranks' times is that of who came last, and is
what the way of merging costs. The ranks exchange these times, within the next call, before they draw conclusions.

With different algorithms sums are formed in different orders: always the same on all ranks, but a second run of the job
may choose another one and round differently.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from phalanx.collectives.autotune.trial_search import TrialSearch
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.fusion_layout import group_by_dtype
from phalanx.collectives.host.algorithm import CollectiveAlgorithm, Reduction, Views
from phalanx.collectives.operation import CollectiveCall

_log = logging.getLogger(__name__)

LEAST_BYTES = 64 * 1024
"""Smaller vectors are exchanged at once whatever the plan is."""
LARGEST_CLASS = 30
"""Vectors from 1 GiB on are one class."""


class Plan(NamedTuple):
    """How to merge vectors of about one size.

    Attributes:
        algorithm: the name of an engine.
        chunk_bytes: what is merged and passed on at a time.
        pack_bytes: into buffers of what size small arrays are packed; 0 where there are none.
    """

    algorithm: str
    chunk_bytes: int
    pack_bytes: int = 0

    def __str__(self) -> str:
        packs = f", packs of {_size(self.pack_bytes)}" if self.pack_bytes else ""
        return f"{self.algorithm}, chunks of {_size(self.chunk_bytes)}{packs}"


class TunableAlgorithm(CollectiveAlgorithm, Protocol):
    """An engine whose sizes can be chosen."""

    chunk_choices: Sequence[int]
    pack_choices: Sequence[int]

    @property
    def sizes(self) -> tuple[int, int]:
        """The present bytes of chunks and packs."""
        ...

    def tune(self, chunk_bytes: int, pack_bytes: int) -> None:
        """Go on with other sizes, at the same call on all ranks."""
        ...


class AutotuneLog:
    """Says what was tried and chosen: in the log, and in a file, if there is one.

    Args:
        path: None for none.
        anew: whether the file is begun anew.
    """

    def __init__(self, path: Path | None, *, anew: bool = True):
        self._path = path
        if anew:
            self._write("what\tplan\tms\n", "w")

    def chosen(self, what: str, search: TrialSearch[Plan]) -> None:
        """A search is over."""
        rows = [f"{what}\t{tried.plan}\t{tried.cost * 1e3:.3f}\n" for tried in search.tried]
        self._write("".join([*rows, f"{what}\tchosen: {search.chosen}\t\n"]), "a")
        _log.info("autotune: %s goes by %s", what, search.chosen)

    def note(self, text: str) -> None:
        """Anything else that was decided."""
        self._write(f"{text}\n", "a")
        _log.info("autotune: %s", text)

    def _write(self, text: str, mode: str) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, mode) as file:
                file.write(text)
        except OSError as error:
            _log.warning("the autotuner's log %s cannot be written: %s", self._path, error)
            self._path = None


class AutotunedAlgorithm:
    """Reduces with whichever of several engines is fastest, and does all else with the default one.

    Args:
        engines: of the same ranks, by name, the default one first.
        journal: on the rank that shall say what was chosen.
    """

    def __init__(
        self,
        engines: Mapping[str, TunableAlgorithm],
        journal: AutotuneLog | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._engines = dict(engines)
        name, self._default = next(iter(self._engines.items()))
        self._sizes = {name: engine.sizes for name, engine in self._engines.items()}
        self._plan = self._default_plan = Plan(name, *self._default.sizes)
        self._engine: TunableAlgorithm = self._default
        self._journal = journal
        self._clock = clock
        self._searches: dict[int, TrialSearch[Plan]] = {}
        self.ranks = self._default.ranks

    @property
    def algorithm(self) -> str:
        """See `CollectiveAlgorithm`."""
        return self._engine.algorithm

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        """See `Engine.all_reduce`."""
        size = sum(layout.wire_bytes for layout in reduction.layouts)
        if size < LEAST_BYTES:
            self._engine = self._default
            self._default.all_reduce(call, reduction)
            return
        search = self._search(size)
        if search.chosen is not None:
            self._use(search.chosen).all_reduce(call, reduction)
            return
        if search.round_is_over:
            search.advance(self._merged(call, search.costs))
            if search.chosen is not None and self._journal is not None:
                self._journal.chosen(f"all-reduce of {_size(1 << _class_of(size))}", search)
        engine = self._use(search.plan)
        started = self._clock()
        engine.all_reduce(call, reduction)
        if search.chosen is None:
            search.measured(self._clock() - started)

    def broadcast(self, call: CollectiveCall, buffers: Views, root: int) -> None:
        """See `Engine.broadcast`."""
        self._engine = self._default
        self._default.broadcast(call, buffers, root)

    def all_gather(self, call: CollectiveCall, payload: Views, incoming: Sequence[Views]) -> None:
        """See `Engine.all_gather`."""
        self._engine = self._default
        self._default.all_gather(call, payload, incoming)

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        """See `Engine.all_to_all`."""
        self._engine = self._default
        self._default.all_to_all(call, outgoing, incoming, sizes)

    def fail(self) -> None:
        """See `Engine.fail`."""
        for engine in self._engines.values():
            engine.fail()

    def close(self) -> None:
        """See `Engine.close`."""
        for engine in self._engines.values():
            engine.close()

    def _use(self, plan: Plan) -> TunableAlgorithm:
        self._engine = self._engines[plan.algorithm]
        if plan != self._plan:
            self._engine.tune(plan.chunk_bytes, plan.pack_bytes)
            self._plan = plan
        return self._engine

    def _search(self, size: int) -> TrialSearch[Plan]:
        number = _class_of(size)
        search = self._searches.get(number)
        if search is None:
            search = self._searches[number] = TrialSearch(
                self._default_plan, [self._algorithms, lambda plan: self._chunks(plan, size), self._packs]
            )
        return search

    def _algorithms(self, best: Plan) -> list[Plan]:
        return [Plan(name, *sizes) for name, sizes in self._sizes.items()]

    def _chunks(self, best: Plan, size: int) -> list[Plan]:
        choices = self._engines[best.algorithm].chunk_choices
        return [best._replace(chunk_bytes=chunk) for chunk in choices if chunk < 2 * size]

    def _packs(self, best: Plan) -> list[Plan]:
        choices = self._engines[best.algorithm].pack_choices
        return [best._replace(pack_bytes=pack) for pack in choices if pack >= best.chunk_bytes]

    def _merged(self, call: CollectiveCall, costs: Sequence[float]) -> list[float]:
        """The least of the ranks' times for each trial."""
        own: Array = np.array(costs)
        merged = np.empty_like(own)
        layouts = group_by_dtype([own.dtype], [own.size])
        self._use(self._default_plan).all_reduce(call, Reduction(layouts, [own], [merged], [1.0], ReduceOp.MIN, 1))
        return [float(cost) for cost in merged]


def _class_of(size: int) -> int:
    """The exponent of the nearest power of two."""
    return min(LARGEST_CLASS, round(math.log2(size)))


def _size(nbytes: int) -> str:
    """For people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"
