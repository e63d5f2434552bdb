"""The barrier of synchronous training: all members of a step send their gradients, and the last one merges them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.engines.step_layout import MergeWeight
from phalanx.errors import DisagreementError
from phalanx.parameter_server.server.declared_shards import Gradient
from phalanx.parameter_server.server.epoch_reports import EXTREME_VALUES, merged_extremes
from phalanx.parameter_server.server.merge_history import MergeHistory, MergeKey
from phalanx.parameter_server.server.worker_membership import POLL_S, WorkerMembership
from phalanx.parameter_server.server_messages import PushGradients, Ticket, UpdateRules
from phalanx.parameter_server.server_protocol import Worker
from phalanx.parameter_server.table_rows import TableRows, weighted_sum

Array = np.ndarray[Any, Any]


class Contribution(NamedTuple):
    """One worker's part of a merge.

    Attributes:
        share: Fraction of the global batch that the gradients were computed on.
        gradients: Gradients of the shard groups.
        extras: Other arrays to merge.
    """

    share: float
    gradients: list[Gradient]
    extras: list[Array]


class MergedStep(NamedTuple):
    """A merge whose update is to be applied."""

    members: tuple[Worker, ...]
    gradients: list[Gradient]
    extras: list[Array]
    is_finite: bool


class _PendingMerge:
    """A synchronous step whose contributions are arriving."""

    def __init__(self) -> None:
        self.contributions: dict[Worker, Contribution] = {}
        self.extras: list[Array] | None = None  # the merged extras, once all contributions have arrived
        self.is_finite = True
        self.is_abandoned = False  # the chief has declared the `fit` again
        self.disagreement = ""  # why contributions cannot be merged


class MergeBarrier:
    """Merges the parts of a step. Each worker's thread uses it, under the store's lock `changed`.

    Args:
        members: Workers; one that does not send its part in time is evicted.
        changed: The store's lock.
    """

    def __init__(self, members: WorkerMembership, changed: threading.Condition):
        self._members = members
        self._changed = changed
        self._pending: dict[MergeKey, _PendingMerge] = {}
        self._newest: dict[Worker, MergeKey] = {}  # newest push of each worker
        self._num_late = 0

    def abandon(self) -> None:
        """Invalidate all earlier pushes."""
        for pending in self._pending.values():
            pending.is_abandoned = True
        self._pending.clear()
        self._newest.clear()

    def push(
        self,
        message: PushGradients,
        part: Contribution,
        rules: UpdateRules,
        history: MergeHistory,
        apply: Callable[[MergedStep], object],
    ) -> tuple[list[Array], str]:
        """Wait, with the lock held, for the other members' parts; the last one to arrive calls `apply`.

        The arrays of `part` may be in memory that the worker shares with this process. They stay valid while this
        waits: the worker reuses that memory only after this push is answered.

        Returns: the merged extras, and a note for the worker's log.
        """
        ticket, key = message.ticket, (message.ticket.serial, message.phase)
        self._newest[ticket.member] = key
        self._changed.notify_all()
        if history.is_completed(key):
            self._num_late += 1
            return part.extras, f"it came too late and was discarded, like {self._num_late - 1} before it"
        pending = self._pending.setdefault(key, _PendingMerge())
        pending.disagreement = pending.disagreement or self._difference(pending, ticket.member, part.extras)
        pending.contributions[ticket.member] = part
        pending.is_finite &= message.is_finite or not message.share  # a part without samples has no weight in the merge
        until = self._members.clock() + rules.timeout_s
        while pending.extras is None:
            if pending.is_abandoned:
                return part.extras, "the chief has declared this `fit` again"
            if pending.disagreement:
                self._changed.notify_all()
                raise DisagreementError(pending.disagreement)
            if self._is_complete(key, pending, ticket, rules):
                merged = _merge(pending, message)
                apply(merged)
                pending.extras = merged.extras
                self._pending.pop(key, None)
                self._changed.notify_all()
            elif self._members.clock() > until:
                for member in ticket.members:
                    if member not in pending.contributions:
                        self._members.evict(member)  # the next iteration finds the merge complete
            else:
                self._changed.wait(POLL_S)
        return pending.extras, ""

    def _difference(self, pending: _PendingMerge, member: Worker, extras: Sequence[Array]) -> str:
        """A description of how a member's extras differ from another's; "" if they do not."""
        names = self._members.names
        for other, (_, _, theirs) in pending.contributions.items():
            if [array.size for array in theirs] != [array.size for array in extras]:
                return (
                    f"{names[member]} merges {_described(extras)} in a step, and {names[other]} {_described(theirs)}: "
                    f"metrics, states of layers and what train_step returns must be the same on all workers."
                )
        return ""

    def _is_complete(self, key: MergeKey, pending: _PendingMerge, ticket: Ticket, rules: UpdateRules) -> bool:
        if rules.replicas_to_aggregate and len(pending.contributions) >= rules.replicas_to_aggregate:
            return True
        # A worker with a newer push never took this step from its own head, was too late there, or was answered by a
        # server that is now lost.
        return all(
            member in pending.contributions or self._newest.get(member, (-1, -1)) > key
            for member in ticket.members
            if self._members.table.is_present(member)
        )


def _merge(pending: _PendingMerge, message: PushGradients) -> MergedStep:
    """The mean of the gradients, and the merged extras."""
    # In the members' order, not the order of arrival, so that floating-point sums are the same in every run.
    parts = [pending.contributions[m] for m in message.ticket.members if m in pending.contributions]
    # The samples of a lost or late worker are missing; the mean is over the others' samples.
    total = sum(share for share, _, _ in parts) or 1.0
    shares = [share / total for share, _, _ in parts]
    weights = {
        MergeWeight.SHARE.value: shares,
        MergeWeight.ONE.value: [float(share > 0) for share in shares],
        MergeWeight.FIRST.value: [1.0, *[0.0] * (len(parts) - 1)],
    }
    gradients = [_mean(column, shares) for column in zip(*[part.gradients for part in parts], strict=True)]
    columns = zip(*[part.extras for part in parts], strict=True)
    extras = [
        merged_extremes(kind, shares, column) if kind in EXTREME_VALUES else _weighted_sum(column, weights[kind])
        for column, kind in zip(columns, message.extras, strict=True)
    ]
    return MergedStep(tuple(pending.contributions), gradients, extras, pending.is_finite)


def _mean(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    rows = [gradient for gradient in gradients if isinstance(gradient, TableRows)]
    if rows:
        return weighted_sum(rows, weights)
    return _weighted_sum([gradient for gradient in gradients if not isinstance(gradient, TableRows)], weights)


def _weighted_sum(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """The sum in the given order, in the arrays' own dtype. Arrays of weight 0 are ignored, whatever they contain."""
    counted = [(array, weight) for array, weight in zip(arrays, weights, strict=True) if weight]
    if not counted:
        return np.zeros_like(arrays[0])
    first, weight = counted[0]
    result: Array = np.asarray(first * first.dtype.type(weight))  # NumPy turns an array without axes into a scalar
    for array, weight in counted[1:]:
        result += array * array.dtype.type(weight)
    return result


def _described(extras: Sequence[Array]) -> str:
    return f"{len(extras)} arrays of {', '.join(str(array.size) for array in extras)} values" if extras else "nothing"
