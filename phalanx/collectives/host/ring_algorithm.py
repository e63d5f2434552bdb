"""Collectives over links: between hosts, or wherever there is no shared memory.

Theory
------
Small vectors are exchanged *directly*: each rank sends its vector to every other rank, and all ranks merge all vectors
in rank order. This takes one message time for any number of ranks.

Large vectors go around a *ring*: the vector is cut into one share per rank. In n - 1 steps, each share moves from rank
to rank, and every rank merges its values into it (reduce-scatter). In n - 1 more steps, the finished shares go around
again (all-gather). Each rank sends and receives 2 (n - 1) / n of the vector, the minimum possible, and communicates
only with its two neighbors, in both directions at once. Shares are cut into chunks, and a chunk is passed on as soon as
it is merged, so that merging and sending overlap. Two ranks also form a ring: each merges one half. Source: Patarasuk
and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.

The bits are the same on every rank, because each element is merged in one place and order: rank order for direct
exchange; r, r + 1, ..., r - 1 for the share of rank r. Narrow floats are sent as float32 while they are sums of several
ranks (see `reduction.py`), and in their own dtype once they are finished.

A large broadcast goes through a *chain* (root, root + 1, ...), chunk by chunk, so that no rank sends it twice. A rank
completes any of these only after it has seen a packet from every other rank, so no rank can finish a collective that
another rank calls differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from phalanx.cluster.membership import Rank
from phalanx.collectives.communicator import Array
from phalanx.collectives.fusion_layout import FusionLayout, LayoutPiece, byte_view, ranges, shares, views_between
from phalanx.collectives.host.algorithm import Reduction, Views, copy_views, total_bytes
from phalanx.collectives.host.mesh import Mesh
from phalanx.collectives.operation import CollectiveCall
from phalanx.collectives.reduction import UFUNCS, finish, load, merge_rows
from phalanx.monitoring import timeline

DIRECT_BYTES = 32 * 1024
"""Vectors up to this size are exchanged directly, because a message's latency outweighs its bytes."""
CHUNK_BYTES = 256 * 1024
"""Bytes that are merged and passed on at a time: fits twice into the L2 cache, and costs 50 times as much as its
handling in Python."""
PACK_BYTES = 8 * 2**20
"""Several arrays are packed into buffers of this size, which go around the ring one after another: small enough for
the last-level cache, large enough to make the ring's 2 (n - 1) message times negligible."""


class RingAlgorithm:
    """Collectives among `ranks` over the links of a mesh.

    Args:
        mesh: Links to the other ranks.
        ranks: Members of the group, in order of their positions.
        bytes_per_pack: Replacement for `PACK_BYTES`, which also limits the chunks; 0 for the defaults.
    """

    chunk_choices: Sequence[int] = (64 * 1024, 256 * 1024, 2**20)
    pack_choices: Sequence[int] = (2 * 2**20, 8 * 2**20, 32 * 2**20)

    def __init__(self, mesh: Mesh, ranks: Sequence[Rank], bytes_per_pack: int = 0):
        self.ranks = tuple(ranks)
        self.mesh = mesh
        self.name = "direct"
        self._position = self.ranks.index(mesh.membership.rank)
        self._size = len(self.ranks)
        self._others = [rank for rank in self.ranks if rank != mesh.membership.rank]
        self._next = self.ranks[(self._position + 1) % self._size]
        self._previous = self.ranks[self._position - 1]
        self._pack_bytes = bytes_per_pack or PACK_BYTES
        self._chunk_bytes = min(CHUNK_BYTES, self._pack_bytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """See `TunableAlgorithm.sizes`."""
        return self._chunk_bytes, self._pack_bytes

    def set_sizes(self, chunk_bytes: int, pack_bytes: int) -> None:
        """See `TunableAlgorithm.set_sizes`."""
        self._chunk_bytes, self._pack_bytes = chunk_bytes, pack_bytes

    # -------------------------------------------------------------- all-reduce

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        if sum(layout.wire_bytes for layout in reduction.layouts) <= DIRECT_BYTES:
            self.name = "direct"
            self._reduce_directly(reduction)
            return
        self.name = "ring"
        for layout in reduction.layouts:
            if len(layout.indices) == 1:
                self._reduce_array(layout, reduction)
            else:
                for pieces in layout.chunks(max(1, self._pack_bytes // layout.wire.itemsize)):
                    self._reduce_pack(layout, pieces, reduction)

    def _reduce_directly(self, reduction: Reduction) -> None:
        rows = [[np.empty(layout.total, layout.wire) for layout in reduction.layouts] for _ in self.ranks]
        for position, rank in enumerate(self.ranks):
            if rank != self.mesh.membership.rank:
                self.mesh.expect(rank, [byte_view(row) for row in rows[position]])
        mine = rows[self._position]
        cuts = [layout.chunks(max(1, layout.total))[0] for layout in reduction.layouts]
        for row, pieces in zip(mine, cuts, strict=True):
            _pack(pieces, reduction, row)
        payload = [byte_view(row) for row in mine]
        for rank in self._others:
            self.mesh.send(rank, payload)
        self.mesh.run()
        # Everything is sent, so the first row, which on one rank is its own, may be overwritten.
        for group, pieces in enumerate(cuts):
            merged = rows[0][group]
            merge_rows([row[group] for row in rows], merged, reduction.op, reduction.divisor)
            _unpack(pieces, merged, reduction)

    def _reduce_array(self, layout: FusionLayout, reduction: Reduction) -> None:
        """Merge a single array directly from and into its memory, unless it must be scaled or cast."""
        index = layout.indices[0]
        source, target = reduction.inputs[index], reduction.outputs[index]
        scale = reduction.scales[index]
        work = target if target.dtype == layout.wire else np.empty(source.size, layout.wire)
        # Otherwise, the caller's memory is the source and is only read.
        if scale != 1.0 or source.dtype != layout.wire:
            load(source, scale, work)
            source = work
        self._ring(source, work, target, reduction)

    def _reduce_pack(self, layout: FusionLayout, pieces: list[LayoutPiece], reduction: Reduction) -> None:
        size = pieces[-1].offset + pieces[-1].stop - pieces[-1].start
        work = np.empty(size, layout.wire)
        started = timeline.now()
        _pack(pieces, reduction, work)
        if timeline.current.on:
            timeline.current.complete(self.mesh.track, "fuse", started, {"bytes": work.nbytes, "arrays": len(pieces)})
        target = reduction.outputs[pieces[0].array]  # the same for all: arrays of a layout have one dtype
        result = work if target.dtype == layout.wire else np.empty(size, target.dtype)
        self._ring(work, work, result, reduction)
        _unpack(pieces, result, reduction)

    def _ring(self, source: Array, work: Array, result: Array, reduction: Reduction) -> None:
        """Merge `source` of all ranks into `result`.

        Memory that is being sent must not change. This holds although source, work and result may be one array: a
        finished chunk, which replaces this rank's values or partial sum, arrives only after it has been around the
        ring, and so after the next rank has received them.

        Args:
            source: This rank's values, in the wire dtype.
            work: Array for partial sums, in the wire dtype. May be `source`.
            result: Array for the result, in the final dtype. Is `work` if that dtype is the wire dtype.
        """
        mesh, size = self.mesh, self._size
        ufunc, divisor = UFUNCS[reduction.op], reduction.divisor
        elements = max(1, self._chunk_bytes // source.itemsize)
        bounds = shares(source.size, size, source.itemsize)
        # One is enough: packets of a peer arrive one after another, and each is merged before the next is read.
        scratch = np.empty(min(elements, bounds[0][1]), source.dtype)

        def chunks_at(step: int) -> list[tuple[int, int]]:
            """Chunks that *arrive* in a step: step s brings share p - 1 - s to position p."""
            start, stop = bounds[(self._position - 1 - step) % size]
            return [(start + low, start + high) for low, high in ranges(stop - start, elements)]

        def merge(low: int, high: int, last: bool) -> Callable[[], None]:
            def arrived() -> None:
                merged = work[low:high]
                # The partial sum comes first: the order of ranks around the ring.
                ufunc(scratch[: high - low], source[low:high], out=merged)
                if last:
                    finish(merged, result[low:high] if result is not work else merged, divisor)
                mesh.send(self._next, [byte_view((result if last else work)[low:high])])

            return arrived

        def pass_on(low: int, high: int) -> Callable[[], None]:
            return lambda: mesh.send(self._next, [byte_view(result[low:high])])

        for step in range(size - 1):
            for low, high in chunks_at(step):
                view = [byte_view(scratch[: high - low])]
                mesh.expect(self._previous, view, merge(low, high, last=step == size - 2))
        for step in range(size - 1, 2 * size - 2):
            for low, high in chunks_at(step):
                then = pass_on(low, high) if step < 2 * size - 3 else None
                mesh.expect(self._previous, [byte_view(result[low:high])], then)
        for low, high in chunks_at(-1):  # this rank's own share starts
            mesh.send(self._next, [byte_view(source[low:high])])
        mesh.run()

    # ------------------------------------------------------------------ others

    def all_gather(self, call: CollectiveCall, parts: Sequence[Views]) -> None:
        # All ranks know all sizes, so they make the same choice.
        roots = [position for position, views in enumerate(parts) if total_bytes(views)]
        if len(roots) == 1 and total_bytes(parts[roots[0]]) > DIRECT_BYTES:
            self._broadcast(parts[roots[0]], roots[0])
        else:
            self._exchange([parts[self._position]] * self._size, parts)

    def _broadcast(self, buffers: Views, root: int) -> None:
        """Broadcast along the chain that begins at position `root`."""
        self.name = "chain"
        self._meet()  # in the chain, a rank receives only from the one before it
        mesh = self.mesh
        chunks = [views_between(buffers, *bounds) for bounds in ranges(total_bytes(buffers), self._chunk_bytes)]
        is_last = self._next == self.ranks[root]
        for chunk in chunks:
            if self._position == root:
                mesh.send(self._next, chunk)
            else:
                then = None if is_last else (lambda chunk=chunk: mesh.send(self._next, chunk))
                mesh.expect(self._previous, chunk, then)
        mesh.run()

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        copy_views(outgoing[self._position], incoming[self._position])
        self._exchange(outgoing, incoming)

    def _exchange(self, outgoing: Sequence[Views], incoming: Sequence[Views]) -> None:
        """Send to and receive from every other rank at the same time."""
        self.name = "direct"
        for rank, views in zip(self.ranks, incoming, strict=True):
            if rank != self.mesh.membership.rank:
                self.mesh.expect(rank, views)
        # The next rank first, so that not all ranks send to rank 0 at once.
        for position in [*range(self._position + 1, self._size), *range(self._position)]:
            self.mesh.send(self.ranks[position], outgoing[position])
        self.mesh.run()

    def fail(self) -> None:
        pass  # the mesh notifies the others

    def close(self) -> None:
        pass

    def _meet(self) -> None:
        """Return when all ranks have arrived with the same call."""
        for rank in self._others:
            self.mesh.expect(rank)
        for rank in self._others:
            self.mesh.send(rank)
        self.mesh.run()


def _pack(pieces: list[LayoutPiece], reduction: Reduction, work: Array) -> None:
    for index, start, stop, offset, whole in pieces:
        source = reduction.inputs[index]
        load(
            source if whole else source[start:stop],
            reduction.scales[index],
            work[offset : offset + stop - start],
        )


def _unpack(pieces: list[LayoutPiece], merged: Array, reduction: Reduction) -> None:
    for index, start, stop, offset, _ in pieces:
        reduction.outputs[index][start:stop] = merged[offset : offset + stop - start]
