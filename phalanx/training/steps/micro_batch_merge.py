"""Sum of the contributions of a global batch's micro-batches to a step: bitwise equal for any number of ranks.

Each rank computes its micro-batches one after the other, and sums them in the nodes of a fixed tree
(`arrays/tree_sum`). With its last one, the ranks exchange the largest nodes, and each sums these in the rest of the
tree.

Some losses and layers need sums over the whole global batch in the middle of a step: the divisor of a loss, the moments
of a batch normalization, and their gradients. No micro-batch can wait there for the later ones. So all are computed
several times. Each time, a micro-batch receives the sums of all contributions of the previous pass, until no
contribution changes. The first sums depend on nothing else, and so are right from the second pass on; those that depend
on these, from the third pass on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.arrays.tree_sum import TreeSum, nodes_between
from phalanx.collectives.reduction import wire_dtype
from phalanx.data.micro_batches import MicroBatch, micro_batch_range
from phalanx.engines.engine import GradientRows, UpdateDeferred
from phalanx.engines.step_layout import EXTREMES, MergeWeight, StepLayout
from phalanx.errors import UnsupportedError
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_rows import join_rows

Array = np.ndarray[Any, Any]


class MicroBatchMerge:
    """Merge of the micro-batches of successive steps; see `phalanx.engines.engine.Merge`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._global_size = 0
        # The micro-batch that the engine is computing; collectives of the step refer to it.
        self._micro: MicroBatch
        self._is_last = False
        self._sums: TreeSum | None = None  # created with the first, whose layout determines what is summed
        self._rows: list[list[GradientRows]] = []  # of each micro-batch
        self._contributed: list[list[Array]] = []  # by each micro-batch to sums within the step, in this pass
        self._contributed_before: list[list[Array]] = []
        self._totals: list[Array] = []  # the sums of the latter
        self._is_final: bool | None = None  # whether this pass is the last; None if unknown, or there is no merge

    def run(self, batch: JointBatch, compute: Callable[[MicroBatch], None]) -> None:
        """Take one step with a global batch. All ranks must call.

        Args:
            compute: Makes the engine compute a micro-batch; the last call takes the step.

        Raises: UnsupportedError if the step yields different numbers when it is computed again.
        """
        self._global_size = batch.global_size
        self._contributed, self._totals = [], []
        self._compute_all(batch, compute)
        times = 1
        while self._is_final is False:
            if times > len(self._contributed[-1]):  # no sum can depend on more others
                raise UnsupportedError(
                    "CommunicationOptions(deterministic=True): a loss or layer that needs sums over the global batch "
                    "computes other numbers each time that it is computed for the same samples. Draw random numbers "
                    "from a keras.random.SeedGenerator of the layer."
                )
            self._totals = self._sum_contributions(batch)
            self._compute_all(batch, compute)
            times += 1

    def _compute_all(self, batch: JointBatch, compute: Callable[[MicroBatch], None]) -> None:
        self._contributed_before, self._contributed = self._contributed, []
        self._sums, self._rows, self._is_final = None, [], None
        for micro in batch.micro_batches:
            self._micro, self._is_last = micro, micro is batch.micro_batches[-1]
            self._contributed.append([])
            with contextlib.suppress(UpdateDeferred):
                compute(micro)

    def all_reduce(self, local: Array) -> Array:
        """See `Merge.all_reduce`."""
        contributed = self._contributed[-1]
        contributed.append(np.array(local).reshape(-1))
        if len(contributed) > len(self._totals):
            return local  # an arbitrary value: the step will be computed again
        return self._totals[len(contributed) - 1].reshape(local.shape)

    def gather(self, rows: Sequence[GradientRows]) -> list[GradientRows]:
        """See `Merge.gather`."""
        micro = self._micro
        if micro.share:
            share = micro.share
            own = [each._replace(gradients=each.gradients * each.gradients.dtype.type(share)) for each in rows]
            self._rows.append([each._replace(indices=np.array(each.indices)) for each in own])
        if not self._ends_step():
            return list(rows)
        return [self._exchange_rows(number, like) for number, like in enumerate(rows)]

    def merge(self, layout: StepLayout, arrays: Sequence[Array]) -> list[Array]:
        """See `Merge.__call__`."""
        micro = self._micro
        extremes = [i for i, weight in enumerate(layout.weights) if weight in EXTREMES]
        operations = [EXTREMES[layout.weights[i]] for i in extremes]
        own = [*(np.array(arrays[i]).reshape(-1) for i in extremes), *_weighted(layout, arrays, micro)]
        if micro.share:
            self._sums = self._sums or TreeSum(operations)
            self._sums.add(micro.number, own)
        if not self._ends_step():
            raise UpdateDeferred
        progress.enter("all_reduce")
        timeline.current.enter("merge")
        merged = self._exchange(self._sums, own, operations)
        progress.enter("update")
        timeline.current.enter("apply")
        flats = layout.allocate()
        for flat, total in zip(flats, merged[len(extremes) :], strict=True):
            np.copyto(flat, total, casting="unsafe")
        views = layout.unpack(flats)
        for i, extreme in zip(extremes, merged, strict=False):
            views[i][...] = extreme.reshape(views[i].shape)
        return flats

    def _ends_step(self) -> bool:
        """Whether the current micro-batch is the last of the last pass; a collective if the step has inner sums."""
        if not self._is_last:
            return False
        # Determined once per pass, by the last micro-batch of every rank: `any` is a collective.
        if self._is_final is None:
            self._is_final = not self._replica.any(self._has_changed()) if self._contributed[-1] else True
        return self._is_final

    def _has_changed(self) -> bool:
        def bits(contributed: list[list[Array]]) -> list[list[bytes]]:
            return [[array.tobytes() for array in of_micro] for of_micro in contributed]

        return bits(self._contributed) != bits(self._contributed_before)

    def _sum_contributions(self, batch: JointBatch) -> list[Array]:
        sums = TreeSum()
        for micro, arrays in zip(batch.micro_batches, self._contributed, strict=True):
            if micro.share:
                sums.add(micro.number, [array.astype(wire_dtype(array.dtype)) for array in arrays])
        like = self._contributed[-1]
        wide = [array.astype(wire_dtype(array.dtype), copy=False) for array in like]
        totals = self._exchange(sums, wide)
        return [total.astype(array.dtype, copy=False) for total, array in zip(totals, like, strict=True)]

    def _exchange(self, own: TreeSum | None, like: Sequence[Array], operations: Sequence[np.ufunc] = ()) -> list[Array]:
        """Return the sum over all micro-batches of all ranks.

        Args:
            own: Sums over this rank's micro-batches; None if it has none.
            like: Arrays like those of the sum.
            operations: See `TreeSum`.
        """
        replica, nodes = self._replica, [] if own is None else own.nodes()
        if not like:
            return []
        if replica.is_alone:  # not in an elastic job, where others join in a collective
            assert own is not None
            return own.total()
        gathered = []
        for index, array in enumerate(like):
            rows = [node[index] for node in nodes]
            stacked = np.stack(rows) if rows else np.empty((0, len(array)), array.dtype)
            # Nodes, not sums: the ranks' parts of the tree meet at nodes of any level, and only a fixed tree has fixed
            # bits.
            gathered.append(replica.communicator.all_gather(stacked))
        assert replica.micro_batches is not None
        whole = TreeSum(operations)
        world_size = len(gathered[0])  # the replica may already belong to a later generation
        for rank in range(world_size):
            of_rank = micro_batch_range(self._global_size, replica.micro_batches, rank, world_size)
            for row, (level, index) in enumerate(nodes_between(*of_rank)):
                whole.add(index, [arrays[rank][row] for arrays in gathered], level)
        return whole.total()

    def _exchange_rows(self, number: int, like: GradientRows) -> GradientRows:
        """Return the rows of one variable's gradient, from all micro-batches of all ranks."""
        own = [rows[number] for rows in self._rows]
        all_gather = self._replica.communicator.all_gather
        lengths = np.concatenate(all_gather(np.array([len(rows.indices) for rows in own], np.int64)))
        ends = np.cumsum(lengths)[:-1]
        parts = [
            np.split(np.concatenate(all_gather(np.concatenate([empty, *of_micro]))), ends)
            for empty, of_micro in (
                (like.indices[:0], [rows.indices for rows in own]),
                (like.gradients[:0], [rows.gradients for rows in own]),
            )
        ]
        return join_rows(*parts, is_batch_independent=like.is_batch_independent)


def _weighted(layout: StepLayout, arrays: Sequence[Array], micro: MicroBatch) -> list[Array]:
    """Return a micro-batch's terms of the sum: one array for each dtype of the layout, in the sum's dtype."""
    flats = layout.allocate()
    with np.errstate(all="ignore"):  # an overflow shows in the sum
        for view, array, weight in zip(layout.unpack(flats), arrays, layout.weights, strict=True):
            if weight in (MergeWeight.GRADIENT, MergeWeight.SHARE) and array.dtype.kind not in "iub":
                np.multiply(array, array.dtype.type(micro.share), out=view)
            elif weight is MergeWeight.ONE or micro.number == 0:
                np.copyto(view, array)
    return [flat.astype(wire_dtype(flat.dtype), copy=False) for flat in flats]
