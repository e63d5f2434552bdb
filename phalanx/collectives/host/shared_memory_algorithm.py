"""Collectives between the processes of one host through shared memory.

Theory
------
Each rank has a page with its counter and four *slots*, buffers small enough to stay in cache. A vector
of any size passes through them in chunks: chunk s through slot s mod 4. For each chunk a rank

1. writes its values to its own slot,
2. *posts*: increments its counter,
3. waits until every other counter is as high, and
4. reads the slots of all ranks, merging them in rank order straight into the result.

It does steps 1 and 2 of chunk s + 1 before 3 and 4 of chunk s, so that ranks that are up to a chunk apart do not wait
for each other.

One post per chunk is enough. A rank writes to slot s mod 4 again for chunk s + 4, after its step 4 of chunk s + 2. It
has then seen all counters of chunk s + 2, and a rank posts s + 2 only after its step 4 of chunk s, so no rank is still
reading the slot. The same holds for the signatures, because each rank has four of them as well.

With three or more ranks, step 4 would read every slot on every rank. Large chunks are therefore merged in two rounds:
each rank merges its share of the chunk in place in its own slot (no other rank reads or writes this range); the ranks
synchronize; each copies out all shares.

`SharedCounters` implements posting and waiting.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from phalanx.cluster.membership import Rank
from phalanx.collectives.communicator import Array
from phalanx.collectives.fusion_layout import FusionLayout, LayoutPiece, byte_view, shares, views_between
from phalanx.collectives.host.algorithm import Reduction, Views, copy_views, total_bytes
from phalanx.collectives.host.mesh import Mesh
from phalanx.collectives.host.shared_counters import PAGE_BYTES, SharedCounters
from phalanx.collectives.host.shared_segment import SharedSegment
from phalanx.collectives.operation import CollectiveCall
from phalanx.collectives.reduction import finish, load, merge_rows
from phalanx.monitoring import timeline

SLOTS = 4
SLOT_BYTES = 512 * 1024
"""Size of a slot: small enough for the memory of a chunk to stay in cache, large enough to make posting (about 5 us)
negligible."""
MIN_SLOT_BYTES = 4096
TUNED_SLOT_BYTES = 2**20
"""Size of a slot if chunks are tuned, so that larger chunks can be tried."""
CHUNK_CHOICES = (128 * 1024, 256 * 1024, 512 * 1024, 2**20)
SHARED_MERGE_BYTES = 64 * 1024
"""With three or more ranks, chunks of at least this size are merged in shares. For smaller chunks, the second
synchronization costs more than reading all slots."""


class _Part(NamedTuple):
    """Elements `start` to `stop` of array number `array`, or the `whole` array, and their position in a slot.

    `rows` holds a view of them in the slot of each position.
    """

    array: int
    start: int
    stop: int
    whole: bool
    rows: list[Array]


class _Chunk:
    """A chunk of a layout and its views of the slots, which are created on first use.

    Attributes:
        pieces: Ranges of arrays that the chunk consists of.
        size: Length of the chunk in elements.
        parts: Pieces with their views, per slot.
    """

    __slots__ = ("parts", "pieces", "size")

    def __init__(self, pieces: list[LayoutPiece]):
        self.pieces = pieces
        self.size = pieces[-1].offset + pieces[-1].stop - pieces[-1].start
        self.parts: list[list[_Part] | None] = [None] * SLOTS


class SharedMemoryAlgorithm:
    """Collectives among `ranks`, which are processes of one host.

    Args:
        ranks: Members of the group, in order of their positions.
        mesh: Links to the other ranks.
        segment: Shared memory of at least `segment_bytes` bytes, mapped by all ranks; owned by this object.
        slot_bytes: Size of a slot, as for `segment_bytes`.
        chunk_bytes: Number of bytes of a slot that an all-reduce uses; None for all of it.
        spin: Whether there is a core for every rank, so that a spinning rank does not delay others.
    """

    name = "shared memory"
    pack_choices: Sequence[int] = ()

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[Rank],
        segment: SharedSegment,
        slot_bytes: int = SLOT_BYTES,
        *,
        chunk_bytes: int | None = None,
        spin: bool = True,
    ):
        self.ranks = tuple(ranks)
        self._mesh = mesh
        self._segment = segment
        self._slot_bytes = slot_bytes
        self._chunk_bytes = chunk_bytes or slot_bytes
        self.chunk_choices: Sequence[int] = [size for size in CHUNK_CHOICES if size <= slot_bytes]
        self._size = size = len(self.ranks)
        self._position = self.ranks.index(mesh.membership.rank)
        pages = size * PAGE_BYTES
        self._counters = SharedCounters(mesh, self.ranks, segment.memory[:pages], spin=spin)
        memory = np.frombuffer(segment.memory, np.uint8)
        starts = [pages + number * slot_bytes for number in range(SLOTS * size)]
        slots = [memory[start : start + slot_bytes] for start in starts]
        # Position p has slots SLOTS * p to SLOTS * p + SLOTS - 1 of these. Here, they are ordered by slot, then
        # position.
        self._slots: list[list[Array]] = [slots[number::SLOTS] for number in range(SLOTS)]
        self._slot = 0  # slot of the next chunk; equal on all ranks, because all run the same chunks
        # Weak keys: `operation` caches the layouts of recent calls, and chunks live as long as their layout.
        self._chunks: weakref.WeakKeyDictionary[FusionLayout, list[_Chunk]] = weakref.WeakKeyDictionary()
        self._chunks_by_size = {self._chunk_bytes: self._chunks}

    @property
    def sizes(self) -> tuple[int, int]:
        """See `TunableAlgorithm.sizes`."""
        return self._chunk_bytes, 0

    def set_sizes(self, chunk_bytes: int, pack_bytes: int) -> None:
        """See `TunableAlgorithm.set_sizes`."""
        self._chunk_bytes = chunk_bytes
        self._chunks = self._chunks_by_size.setdefault(chunk_bytes, weakref.WeakKeyDictionary())

    # -------------------------------------------------------------- all-reduce

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        outputs, op, divisor = reduction.outputs, reduction.op, reduction.divisor
        self._mesh.bytes_shared += sum(layout.wire_bytes for layout in reduction.layouts)
        if not reduction.layouts:
            self._counters.synchronize(call)

        def merge(count: int, parts: list[_Part]) -> None:
            self._counters.wait(call, count)
            for array, start, stop, whole, rows in parts:
                merge_rows(rows, outputs[array] if whole else outputs[array][start:stop], op, divisor)

        fuse = self._load_recorded if timeline.current.on else self._load
        behind: tuple[int, list[_Part]] | None = None  # the chunk that is posted but not merged
        for layout in reduction.layouts:
            share_from = SHARED_MERGE_BYTES // layout.wire.itemsize if self._size > 2 else None
            for chunk in self._chunks.get(layout) or self._cut(layout):
                parts = chunk.parts[self._slot] or self._views(chunk, layout)
                if share_from is None or chunk.size < share_from:
                    fuse(parts, reduction)
                    posted = self._counters.post(call)
                    if behind is not None:
                        merge(*behind)
                    behind = posted, parts
                else:
                    # Two posts follow, and a rank must have read a chunk before its second post after that chunk.
                    if behind is not None:
                        merge(*behind)
                        behind = None
                    fuse(parts, reduction)
                    self._counters.synchronize(call)
                    self._merge_shares(call, chunk, layout, reduction)
                self._slot = (self._slot + 1) % SLOTS
        if behind is not None:
            merge(*behind)

    def _load(self, parts: list[_Part], reduction: Reduction) -> None:
        """Write this rank's values to its slot."""
        inputs, scales, position = reduction.inputs, reduction.scales, self._position
        for array, start, stop, whole, rows in parts:
            source = inputs[array] if whole else inputs[array][start:stop]
            load(source, scales[array], rows[position])

    def _load_recorded(self, parts: list[_Part], reduction: Reduction) -> None:
        with timeline.current.span(self._mesh.track, "fuse", {"arrays": len(parts)}):
            self._load(parts, reduction)

    def _merge_shares(self, call: CollectiveCall, chunk: _Chunk, layout: FusionLayout, reduction: Reduction) -> None:
        """Merge this rank's share of a chunk in its own slot, then copy all shares."""
        wire = layout.wire
        slots = [slot.view(wire)[: chunk.size] for slot in self._slots[self._slot]]
        bounds = shares(chunk.size, self._size, wire.itemsize)
        low, high = bounds[self._position]
        if high > low:
            # Not in place: this rank's own row is one of those still to be read.
            merged = np.empty(high - low, wire)
            merge_rows([row[low:high] for row in slots], merged, reduction.op, reduction.divisor)
            np.copyto(slots[self._position][low:high], merged)
        self._counters.synchronize(call)
        for array, start, stop, offset, _ in chunk.pieces:
            target = reduction.outputs[array][start:stop]
            for row, (share_low, share_high) in zip(slots, bounds, strict=True):
                first, last = max(share_low, offset), min(share_high, offset + stop - start)
                if first < last:
                    finish(row[first:last], target[first - offset : last - offset])

    def _cut(self, layout: FusionLayout) -> list[_Chunk]:
        elements = self._chunk_bytes // layout.wire.itemsize
        chunks = [_Chunk(pieces) for pieces in layout.chunks(elements)]
        self._chunks[layout] = chunks
        return chunks

    def _views(self, chunk: _Chunk, layout: FusionLayout) -> list[_Part]:
        slots = [memory.view(layout.wire) for memory in self._slots[self._slot]]
        parts = [
            _Part(array, start, stop, whole, [row[offset : offset + stop - start] for row in slots])
            for array, start, stop, offset, whole in chunk.pieces
        ]
        chunk.parts[self._slot] = parts
        return parts

    # ------------------------------------------------------------------ others

    def all_gather(self, call: CollectiveCall, parts: Sequence[Views]) -> None:
        lengths = [total_bytes(views) for views in parts]
        wanted = [(0, length, views) for length, views in zip(lengths, parts, strict=True)]
        self._stream(call, parts[self._position], lengths, wanted)

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        wanted = []
        for row, views in zip(sizes, incoming, strict=True):
            start = sum(row[: self._position])
            wanted.append((start, start + row[self._position], views))
        payload = [view for views in outgoing for view in views]
        self._stream(call, payload, [sum(row) for row in sizes], wanted)
        copy_views(outgoing[self._position], incoming[self._position])

    def _stream(
        self,
        call: CollectiveCall,
        outgoing: Views,
        lengths: Sequence[int],
        wanted: Sequence[tuple[int, int, Views]],
    ) -> None:
        """Publish a stream of bytes and read the wanted parts of the other ranks' streams.

        Args:
            outgoing: Stream of this rank.
            lengths: Length of the stream of each position in bytes, known to all ranks.
            wanted: Per position, the range `start` to `stop` of its stream and the views to copy it to. The entry
                of this rank is ignored.
        """
        size = self._slot_bytes
        own = lengths[self._position]
        if not any(lengths):  # a barrier
            self._counters.synchronize(call)
            return
        self._mesh.bytes_shared += own
        for low in range(0, max(lengths), size):  # the same rounds on every rank, even after its own stream has ended
            slots = [byte_view(slot) for slot in self._slots[self._slot]]
            if low < own:
                part = views_between(outgoing, low, min(low + size, own))
                copy_views(part, [slots[self._position]])
            self._counters.synchronize(call)
            for position, (start, stop, views) in enumerate(wanted):
                first, last = max(start, low), min(stop, low + size)
                if first < last and position != self._position:
                    copy_views(
                        [slots[position][first - low : last - low]],
                        views_between(views, first - start, last - start),
                    )
            self._slot = (self._slot + 1) % SLOTS

    # ----------------------------------------------------------------- endings

    def fail(self) -> None:
        self._counters.fail()

    def close(self) -> None:
        # Release all views first: a mapping with views is not unmapped.
        self._chunks_by_size.clear()
        self._chunks.clear()
        self._slots = []
        self._counters.close()
        self._segment.close()


def segment_bytes(ranks: int, slot_bytes: int) -> int:
    """Size of the segment that a group needs."""
    return ranks * (PAGE_BYTES + SLOTS * slot_bytes)
