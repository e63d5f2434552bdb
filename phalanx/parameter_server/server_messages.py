"""Messages between a worker and a parameter server, and between a server and its replica.

A message is a header, one of the structs below, and arrays as raw buffers. A worker sends a request and the server
answers it before the next one, so a response needs no number that says which request it belongs to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import msgspec
import numpy as np

from phalanx.collectives.host.shared_segment import SegmentOffer
from phalanx.errors import FrameError
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard

Array = np.ndarray[Any, Any]
Slots = tuple[tuple[int, str], ...]
"""Names of optimizer variables: the number of a shard among the server's (-1: the optimizer's own), and a name."""


def dtypes_of(arrays: Sequence[Array]) -> tuple[str, ...]:
    """The names of the arrays' dtypes, as a message states them."""
    return tuple([_dtype_name(array.dtype) for array in arrays])


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy composes the string on every access


def arrays_of(buffers: Sequence[memoryview], dtypes: Sequence[str]) -> list[Array]:
    """The arrays that came with a message, flat; they share the buffers' memory.

    Raises: FrameError if the buffers are no arrays of these dtypes.
    """
    try:
        return [np.frombuffer(buffer, dtype) for buffer, dtype in zip(buffers, dtypes, strict=True)]
    except (TypeError, ValueError, SyntaxError) as error:  # SyntaxError: NumPy parses dtypes with commas
        raise FrameError(f"The arrays of a message cannot be read: {error}") from error


class ModelDescription(msgspec.Struct, frozen=True):
    """The trained model, as far as servers need to know it.

    Attributes:
        variables: the trainable variables, in the model's order.
        shards: the shards of all servers.
        optimizer: the optimizer's Keras config, as JSON.
        constraints: each variable's constraint as a Keras config in JSON, or None.
        decays: for each variable, whether weight decay applies to it.
        tables: numbers of the variables of which only some rows are sent (embeddings).
    """

    variables: tuple[PlacedVariable, ...]
    shards: tuple[Shard, ...]
    optimizer: str
    constraints: tuple[str | None, ...]
    decays: tuple[bool, ...]
    tables: tuple[int, ...] = ()


class UpdateRules(msgspec.Struct, frozen=True):
    """How the workers' gradients become updates.

    Attributes:
        synchronous: the gradients of one step are merged into one update; otherwise each push is an update.
        replicas_to_aggregate: in synchronous training, how many workers' gradients make an update; 0: all.
        staleness: in asynchronous training, how many steps a worker may be ahead of the slowest; -1: no bound.
        refuse_nan: discard and count updates that are not finite; otherwise apply them.
        timeout_s: seconds to wait for a connected worker before it is evicted.
        overlap: in asynchronous training, workers compute the next step while their gradients are on their way.
    """

    synchronous: bool
    replicas_to_aggregate: int
    staleness: int
    refuse_nan: bool
    timeout_s: float
    overlap: bool = False

    @property
    def is_lockstep(self) -> bool:
        """Whether all workers make each step together and wait for each other."""
        return self.synchronous and not self.replicas_to_aggregate


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A message's tag on the wire is the name of its class."""


class Ticket(_Message, frozen=True):
    """The right, and the duty, to train on one batch.

    Attributes:
        fit: number of the `fit` call.
        epoch: number of the epoch.
        batch: number of the global batch in the epoch.
        members: the workers that make this step, in order: several in synchronous training, otherwise one.
        member: the worker that holds this ticket.
        serial: numbers the steps of the job.
        era: of the `fit`, as the chief declared it; a step of another era is not applied.
    """

    fit: int
    epoch: int
    batch: int
    members: tuple[int, ...]
    member: int
    serial: int
    era: int


# Requests: the model, and who takes part.


class DeclareModel(_Message, frozen=True):
    """From the chief, at the start of each `fit`. Buffers: the server's shards, then the variables in `slots`.

    Attributes:
        fit: number of the `fit` call.
        first_epoch: number of its first epoch.
        model: the trained model.
        rules: how gradients become updates.
        slots: the optimizer's variables.
        step: the global step of the values; a step that the job has passed changes nothing.
        era: greater than the era of every earlier `fit`, even of one that a killed chief declared.
        ahead: how far the job's step count is ahead of this optimizer's, because of other models.
    """

    fit: int
    first_epoch: int
    model: ModelDescription
    rules: UpdateRules
    slots: Slots
    step: int
    era: int
    ahead: int = 0


class JoinFit(_Message, frozen=True):
    """From any worker: wait until the chief has declared this `fit`, then compare the models.

    The response is `FitJoined`, or `FitOver` if the chief has declared a later one.
    """

    fit: int
    variables: tuple[PlacedVariable, ...]


class Rejoin(_Message, frozen=True):
    """From a worker that lost its connection in the middle of a `fit`: its position in the training.

    A restarted server resumes from its snapshot, and the head rebuilds its schedule from the positions of all workers.
    Buffer, from the chief to the head: the sample order, if there is one.

    Attributes:
        fit: number of the `fit` call.
        era: era of that `fit`.
        epoch: number of the worker's epoch; -1 if no schedule hands out batches.
        version: the newest version of the server's values that the worker has seen.
        tickets: tickets that the worker holds.
        batches: how many batches of the epoch the worker knows to be handed out.
        finished: serial of the worker's last applied step; -1 before the first.
        step: the global step, as the worker knows it.
        steps: number of steps in the epoch; -1 while unknown.
        order_epoch: first epoch of the pass over the data whose sample order is sent along; -1: none is.
        opened: whether the chief has opened the epoch.
        steps_made: how many steps of the epoch the worker has made.
        counted: as for `Values`, of the steps in `step`.
    """

    fit: int
    era: int
    epoch: int
    version: int
    tickets: tuple[Ticket, ...]
    batches: int
    finished: int
    step: int
    steps: int
    order_epoch: int = -1
    opened: bool = True
    steps_made: int = 0
    counted: tuple[int, ...] = ()


# Requests: values and updates.


class PullValues(_Message, frozen=True):
    """Send the values of the server's shards, tables excepted, if they are newer than `version`.

    Attributes:
        fit: number of the `fit` call.
        version: version of the values that the worker has.
        after: first wait until the step of this serial is applied: the head has applied it without the sender, and
            another worker's part may still be on its way to this server.
    """

    fit: int
    version: int
    after: int = -1


class PullRows(_Message, frozen=True):
    """Send rows of the server's tables. Buffers: for each shard of a table, the numbers of the rows."""

    fit: int


class PullTables(_Message, frozen=True):
    """Send the server's tables with all rows."""

    fit: int


class PullOptimizer(_Message, frozen=True):
    """Send the optimizer's variables; without `tables`, only those that belong to no table."""

    tables: bool = True


class PushGradients(_Message, frozen=True):
    """Gradients of the server's shards, to be applied.

    Buffers: the gradients in the order of the shard groups (see `FitJoined`), then the extras. A shard of a table has
    two buffers: the numbers of the rows that have a gradient, and their gradients.

    Attributes:
        ticket: the step that the gradients belong to.
        phase: numbers the merges of one step.
        gradients: whether there are gradients; otherwise only extras are merged, and no update is made.
        finite: whether all gradients of the step are finite, including those sent to other servers: so all servers
            decide alike, unless each receives other workers' gradients first (`replicas_to_aggregate`).
        share: fraction of the global batch that the gradients were computed on.
        dtypes: dtypes of the buffers.
        extras: for each buffer that is no gradient but is merged in synchronous training, how it is weighted: a value
            of `MergeWeight`.
        lengths: lengths of the buffers in bytes, if they are in shared memory instead of the message.
        wants_rows: whether the numbers of the rows to respond with, for each shard of a table, precede the extras.
    """

    ticket: Ticket
    phase: int
    gradients: bool
    finite: bool
    share: float
    dtypes: tuple[str, ...]
    extras: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    wants_rows: bool = False


class SetLearningRate(_Message, frozen=True):
    """From the chief: the learning rate from now on."""

    learning_rate: float


class AssignVariables(_Message, frozen=True):
    """From the chief, between two epochs: new values of these variables, set by a callback.

    Buffers: the values of the server's shards of them, in its order.
    """

    fit: int
    variables: tuple[int, ...]


# Requests to the head: the schedule.


class OpenEpoch(_Message, frozen=True):
    """From the chief: open an epoch of this many steps; -1: until the data ends.

    Buffer: the sample order, if this is the first epoch of a pass over shuffled data.
    """

    fit: int
    epoch: int
    steps: int


class RequestTicket(_Message, frozen=True):
    """Request the next step. With `wait`, wait until there is one or there will be none; otherwise the response may be
    `Acknowledged`: not now."""

    fit: int
    epoch: int
    era: int
    wait: bool = True


class NoBatch(_Message, frozen=True):
    """There is no batch for this ticket: the epoch `ends` before it, or this worker's stream is already past it."""

    ticket: Ticket
    ends: bool


class EndEpoch(_Message, frozen=True):
    """From the chief: hand out no more steps of this epoch. The response is `EpochOver` with its number of steps."""

    fit: int
    epoch: int


class RequestSampleOrder(_Message, frozen=True):
    """Request the sample order of the pass over the data that began with this epoch.

    If the chief has gone back or has ended the `fit`, the response is that to `RequestTicket`.
    """

    fit: int
    epoch: int
    era: int


class ValidationLogs(_Message, frozen=True):
    """From the chief: the results of the validation after this epoch. Buffers: the logs, serialized."""

    fit: int
    epoch: int
    era: int


class RequestValidationLogs(_Message, frozen=True):
    """Wait for the results of the validation after this epoch, or a later one. Buffers of the response: the logs.

    If the chief has gone back or has ended the `fit`, the response is that to `RequestTicket`; if it trains the next
    epoch and has not validated, `Acknowledged`.
    """

    fit: int
    epoch: int
    era: int


class EpochReport(_Message, frozen=True):
    """A worker's metrics of an epoch. Buffers: its metrics' variables.

    Attributes:
        fit: number of the `fit` call.
        epoch: number of the epoch.
        samples: number of samples that the worker trained on.
        steps: number of steps that it made.
        dtypes: dtypes of the buffers.
        weights: how each buffer is weighted: values of `MergeWeight`.
    """

    fit: int
    epoch: int
    samples: int
    steps: int
    dtypes: tuple[str, ...]
    weights: tuple[str, ...]


class CollectReports(_Message, frozen=True):
    """From the chief: the merged reports of all workers on an epoch."""

    fit: int
    epoch: int


class HoldSteps(_Message, frozen=True):
    """From the chief: hand out no more steps, and respond when the steps of all other workers are applied; with `on`
    False, continue. The response contains the global step."""

    on: bool


class EndFit(_Message, frozen=True):
    """From the chief: this `fit` has no more steps."""

    fit: int


class RequestStop(_Message, frozen=True):
    """Stop this `fit` with its epoch. With `stop`, a worker requests it; otherwise the chief queries whether any worker
    has. The response is a `Decision`."""

    fit: int
    stop: bool


# Requests to the head: what workers learn from the chief.


class Broadcast(_Message, frozen=True):
    """From the chief: arrays for the other workers. Buffers: the arrays; in the response, those that now hold.

    Attributes:
        subject: what the arrays are.
        fit: first `fit` (or managed session) for which they hold; -1: for the whole program.
        keep_first: if the chief has broadcast the `subject` before, perhaps before a restart, keep the earlier arrays.
    """

    subject: str
    fit: int = -1
    keep_first: bool = False


class RequestBroadcast(_Message, frozen=True):
    """Wait for the chief's broadcast of a subject, for this `fit` or a later one; `FitOver` if it leaves first."""

    subject: str
    fit: int = -1


class ChiefAlive(_Message, frozen=True):
    """From the chief, while the others wait for it: it is still working."""


class QueryJobOver(_Message, frozen=True):
    """Whether the chief has left the job. The response is a `Decision`."""


# Requests: the connection.


class OfferSharedMemory(_Message, frozen=True):
    """From a worker on the server's host: use this shared memory (see `shared_memory_channel`)."""

    offer: SegmentOffer


class LeaveJob(_Message, frozen=True):
    """The worker has finished, or has failed with the error in `failure`. The chief may name tasks `without` which the
    job ended: servers do not wait for them."""

    failure: str = ""
    without: tuple[str, ...] = ()


# Responses.


class EpochOver(_Message, frozen=True):
    """All steps of the epoch are made, or the chief has gone back.

    Attributes:
        steps: number of steps in the epoch.
        back_to: the epoch that a restarted chief continues with, if that is the reason; otherwise -1.
        era: the new era, if the chief has gone back.
        newest: in synchronous training, serial of the newest step that the head has applied.
    """

    steps: int = 0
    back_to: int = -1
    era: int = 0
    newest: int = -1


class FitOver(_Message, frozen=True):
    """The chief has ended this `fit`."""


class Values(_Message, frozen=True):
    """The requested arrays. Buffers: the arrays; none if they are unchanged.

    Attributes:
        version: version of the server's values; grows with every update.
        step: the global step: number of updates that the job has made.
        dtypes: dtypes of the buffers.
        shards: how many of the first buffers are the values of the server's shard groups.
        note: what the worker should log about its update.
        slots: names of the optimizer's variables, if they were requested.
        ticket: in the response to gradients, a ticket for a further step, if the head has one at hand.
        is_unreplicated: whether the replica of these shards, which should exist, is missing or behind.
        lengths: lengths of the buffers in bytes, if they are in shared memory instead of the message.
        place: the place in the shared memory.
        rows: how many of the next buffers are rows of tables, or tables.
        counted: in asynchronous training, serials of steps that are in `step`: the newest one of each worker. If the
            head is lost now, its maker may not know yet that it was applied, and repeats it.
    """

    version: int
    step: int = 0
    dtypes: tuple[str, ...] = ()
    shards: int = 0
    note: str = ""
    slots: Slots = ()
    ticket: Ticket | None = None
    is_unreplicated: bool = False
    lengths: tuple[int, ...] = ()
    place: int = 0
    rows: int = 0
    counted: tuple[int, ...] = ()


class FitJoined(_Message, frozen=True):
    """The `fit` that the worker now takes part in.

    Attributes:
        era: era of the `fit`.
        first_epoch: number of its first epoch.
        step: the global step; valid from the head only.
        tables: numbers of the variables of which only some rows are sent.
        groups: numbers of the server's shards whose gradients and values are sent as one vector (see `ShardPacking`).
        ahead: as for `DeclareModel`.
        counted: as for `Values`.
    """

    era: int
    first_epoch: int
    step: int
    tables: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    ahead: int
    counted: tuple[int, ...] = ()


class SharedMemoryMapped(_Message, frozen=True):
    """Whether the server has mapped the offered memory."""

    accepted: bool


class Acknowledged(_Message, frozen=True):
    """The request is done. The answer to a goodbye names tasks that the server has `excluded`."""

    excluded: tuple[str, ...] = ()


class Decision(_Message, frozen=True):
    """The answer to a question of yes or no."""

    yes: bool


class Refusal(_Message, frozen=True):
    """The request failed for good: the worker raises an error.

    Attributes:
        kind: name of the error's class.
        reason: text of the error.
        task: the task that a `PeerLostError` names.
        rank: the rank that a `PeerLostError` names.
    """

    kind: str
    reason: str
    task: str = ""
    rank: int = -1


Request = (
    DeclareModel
    | JoinFit
    | Rejoin
    | PullValues
    | PullRows
    | PullTables
    | PullOptimizer
    | PushGradients
    | SetLearningRate
    | AssignVariables
    | OpenEpoch
    | RequestTicket
    | NoBatch
    | EndEpoch
    | RequestSampleOrder
    | ValidationLogs
    | RequestValidationLogs
    | EpochReport
    | CollectReports
    | HoldSteps
    | EndFit
    | RequestStop
    | Broadcast
    | RequestBroadcast
    | ChiefAlive
    | QueryJobOver
    | OfferSharedMemory
    | LeaveJob
)
Response = Ticket | EpochOver | FitOver | Values | FitJoined | SharedMemoryMapped | Acknowledged | Decision | Refusal


# Between the leader of a shard group and its replica.


class GroupState(_Message, frozen=True):
    """The state of a shard group, as a snapshot and a replica keep it.

    Buffers: the shards' values, then the optimizer's variables, then the merged extras of `completed`, in order.

    Attributes:
        declared: the chief's declaration of the model.
        version: version of the values.
        era: era of the `fit`.
        slots: names of the optimizer's variables.
        completed: the newest merges: serial, phase, members, and number of merged extras.
        dtypes: dtypes of the buffers.
        refused: how many updates were discarded because they were not finite.
        ended: whether the chief has ended the `fit`.
        step: the global step; valid on the head only.
    """

    declared: DeclareModel
    version: int
    era: int
    slots: Slots
    completed: tuple[tuple[int, int, tuple[int, ...], int], ...]
    dtypes: tuple[str, ...]
    refused: int
    ended: bool
    step: int


class AppliedUpdate(_Message, frozen=True):
    """A completed merge. Buffers: the applied gradients, then the merged extras.

    Attributes:
        serial: serial of the step.
        phase: phase of the step.
        members: the workers whose gradients are in it.
        gradients: how many of the buffers are gradients; 0 if nothing was applied.
        dtypes: dtypes of the buffers.
        step: the global step after it; valid on the head only.
    """

    serial: int
    phase: int
    members: tuple[int, ...]
    gradients: int
    dtypes: tuple[str, ...]
    step: int


class JobOver(_Message, frozen=True):
    """The workers of the group have finished."""


class LeaseRequest(msgspec.Struct, frozen=True):
    """A leader requests its lease from the chief, which answers `Acknowledged`.

    Attributes:
        is_replica_lost: it may have answered updates that its replica lacks, or may do so from now on.
    """

    is_replica_lost: bool
