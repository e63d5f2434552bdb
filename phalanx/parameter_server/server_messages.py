"""Messages between a worker and a parameter server, and between a server and its replica.

A message is a header, one of the structs below, and arrays as raw buffers. A worker waits for the response to a request
before it sends the next one, so responses need no request numbers.
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
"""Names of optimizer variables: the number of one of the server's shards (-1: the optimizer's own), and a name."""


def dtypes_of(arrays: Sequence[Array]) -> tuple[str, ...]:
    """The dtype names of the arrays, as a message states them."""
    return tuple([_dtype_name(array.dtype) for array in arrays])


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy composes the string on every access


def arrays_of(buffers: Sequence[memoryview], dtypes: Sequence[str]) -> list[Array]:
    """The arrays of a message, flat; they share the buffers' memory.

    Raises: FrameError if the buffers are not arrays of these dtypes.
    """
    try:
        return [np.frombuffer(buffer, dtype) for buffer, dtype in zip(buffers, dtypes, strict=True)]
    except (TypeError, ValueError, SyntaxError) as error:  # SyntaxError: NumPy parses dtypes with commas
        raise FrameError(f"The arrays of a message cannot be read: {error}") from error


class ModelDescription(msgspec.Struct, frozen=True):
    """The trained model, as servers need it.

    Attributes:
        variables: The trainable variables, in the model's order.
        shards: The shards of all servers.
        optimizer: The optimizer's Keras config, as JSON.
        constraints: Each variable's constraint as a Keras config in JSON, or None.
        uses_weight_decay: Whether weight decay applies, for each variable.
        tables: Numbers of the variables that are sent by rows (embeddings).
    """

    variables: tuple[PlacedVariable, ...]
    shards: tuple[Shard, ...]
    optimizer: str
    constraints: tuple[str | None, ...]
    uses_weight_decay: tuple[bool, ...] = msgspec.field(name="decays")  # the name in snapshots
    tables: tuple[int, ...] = ()


class UpdateRules(msgspec.Struct, frozen=True):
    """How the workers' gradients become updates.

    Attributes:
        synchronous: Whether the gradients of one step are merged into one update; otherwise each push is an update.
        replicas_to_aggregate: Number of workers whose gradients make one update in synchronous training; 0: all.
        staleness: Number of steps that a worker may be ahead of the slowest in asynchronous training; -1: no bound.
        refuse_nan: Whether updates that are not finite are discarded and counted instead of applied.
        timeout_s: Seconds to wait for a connected worker before it is evicted.
        overlap: Whether workers of asynchronous training compute the next step while their gradients are sent.
    """

    synchronous: bool
    replicas_to_aggregate: int
    staleness: int
    refuse_nan: bool
    timeout_s: float
    overlap: bool = False

    @property
    def is_lockstep(self) -> bool:
        """Whether all workers take each step together and wait for each other."""
        return self.synchronous and not self.replicas_to_aggregate


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages. The tag on the wire is the name of the class."""


class Ticket(_Message, frozen=True):
    """The right, and the duty, to train on one batch.

    Attributes:
        fit: Number of the `fit` call.
        epoch: Number of the epoch.
        batch: Number of the global batch in the epoch.
        members: Workers that take this step, in order: several in synchronous training, otherwise one.
        member: Worker that holds this ticket.
        serial: Number of the step in the job.
        era: Era of the `fit`, as the chief declared it; a step of another era is not applied.
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
        fit: Number of the `fit` call.
        first_epoch: Number of its first epoch.
        model: Description of the trained model.
        rules: Rules by which gradients become updates.
        slots: Names of the optimizer's variables.
        step: Global step of the values; a step that the job has passed changes nothing.
        era: Number greater than the era of every earlier `fit`, even of one that a killed chief declared.
        step_offset: Number of steps that the job is ahead of this optimizer because of other models.
    """

    fit: int
    first_epoch: int
    model: ModelDescription
    rules: UpdateRules
    slots: Slots
    step: int
    era: int
    step_offset: int = msgspec.field(default=0, name="ahead")  # the name in snapshots


class JoinFit(_Message, frozen=True):
    """From any worker: wait until the chief has declared this `fit`, then compare the models.

    The response is `FitJoined`, or `FitOver` if the chief has declared a later one.
    """

    fit: int
    variables: tuple[PlacedVariable, ...]


class Rejoin(_Message, frozen=True):
    """From a worker that lost its connection during a `fit`: its position in the training.

    A restarted server resumes from its snapshot, and the head rebuilds its schedule from the positions of all workers.
    Buffer, from the chief to the head: the sample order, if there is one.

    Attributes:
        fit: Number of the `fit` call.
        era: Era of that `fit`.
        epoch: Number of the worker's epoch; -1 if no schedule issues tickets.
        version: Newest version of the server's values that the worker has seen.
        tickets: Tickets that the worker holds.
        batches: Number of batches of the epoch that the worker knows to be issued.
        finished: Serial of the worker's last applied step; -1 before the first.
        step: Global step, as the worker knows it.
        steps: Number of steps in the epoch; -1 while unknown.
        order_epoch: First epoch of the pass over the data whose sample order is attached; -1: none is attached.
        is_epoch_opened: Whether the chief has opened the epoch.
        steps_taken: Number of steps of the epoch that the worker has taken.
        counted_serials: Serials of steps that are included in `step`; see `Values`.
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
    is_epoch_opened: bool = True
    steps_taken: int = 0
    counted_serials: tuple[int, ...] = ()


# Requests: values and updates.


class PullValues(_Message, frozen=True):
    """Send the values of the server's shards, except tables, if they are newer than `version`.

    Attributes:
        fit: Number of the `fit` call.
        version: Version of the values that the worker has.
        after: Serial of a step to wait for first. The head has applied that step without the sender, and another
            worker's part may still be on its way to this server.
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
        ticket: Step that the gradients belong to.
        phase: Number of the merge within the step.
        has_gradients: Whether there are gradients; otherwise only extras are merged, and nothing is updated.
        is_finite: Whether all gradients of the step are finite, including those sent to other servers. With it, all
            servers decide the same, unless each receives other workers' gradients first (`replicas_to_aggregate`).
        share: Fraction of the global batch that the gradients were computed on.
        dtypes: Dtypes of the buffers.
        extras: Weightings, as values of `MergeWeight`, of the buffers that are not gradients but are merged in
            synchronous training.
        lengths: Lengths of the buffers in bytes, if they are in shared memory and not in the message.
        wants_rows: Whether the numbers of the rows to respond with, for each shard of a table, precede the extras.
    """

    ticket: Ticket
    phase: int
    has_gradients: bool
    is_finite: bool
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

    Buffers: the values of the server's shards of these variables, in the server's order.
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
    """Request the next step. With `wait`, wait until there is one or no more will follow; otherwise the response may be
    `Acknowledged`: not now."""

    fit: int
    epoch: int
    era: int
    wait: bool = True


class NoBatch(_Message, frozen=True):
    """There is no batch for this ticket: the data ends before it, or this worker's stream is already past it."""

    ticket: Ticket
    is_end_of_data: bool


class EndEpoch(_Message, frozen=True):
    """From the chief: issue no more tickets for this epoch. The response is `EpochOver` with its number of steps."""

    fit: int
    epoch: int


class RequestSampleOrder(_Message, frozen=True):
    """Request the sample order of the pass over the data that began with this epoch.

    If the chief has gone back or has ended the `fit`, the response is the same as to `RequestTicket`.
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

    If the chief has gone back or has ended the `fit`, the response is the same as to `RequestTicket`. If the chief
    trains the next epoch and has not validated, it is `Acknowledged`.
    """

    fit: int
    epoch: int
    era: int


class EpochReport(_Message, frozen=True):
    """A worker's metrics of an epoch. Buffers: the variables of its metrics.

    Attributes:
        fit: Number of the `fit` call.
        epoch: Number of the epoch.
        samples: Number of samples that the worker trained on.
        steps: Number of steps that it took.
        dtypes: Dtypes of the buffers.
        weights: Weightings of the buffers: values of `MergeWeight`.
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
    """From the chief: issue no more tickets, and respond when the steps of all other workers are applied; with
    `is_held` False, continue. The response contains the global step."""

    is_held: bool


class EndFit(_Message, frozen=True):
    """From the chief: this `fit` has no more steps."""

    fit: int


class RequestStop(_Message, frozen=True):
    """Stop this `fit` after its epoch. With `stop`, a worker requests it; otherwise the chief asks whether any worker
    has. The response is a `Decision`."""

    fit: int
    stop: bool


# Requests to the head: what the chief shares with the other workers.


class Broadcast(_Message, frozen=True):
    """From the chief: arrays for the other workers. Buffers: the arrays; in the response, those now in effect.

    Attributes:
        subject: Name of the arrays' content.
        fit: First `fit` (or managed session) for which they are in effect; -1: the whole program.
        keep_first: Whether to keep the arrays of an earlier broadcast of the `subject`, perhaps one before a restart.
    """

    subject: str
    fit: int = -1
    keep_first: bool = False


class RequestBroadcast(_Message, frozen=True):
    """Wait for the chief's broadcast of a subject, for this `fit` or a later one; `FitOver` if the chief leaves."""

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
    """The worker has finished, or has failed with the error in `failure`. The chief may list tasks as
    `excluded`: the job ended without them, and servers do not wait for them."""

    failure: str = ""
    excluded: tuple[str, ...] = ()


# Responses.


class EpochOver(_Message, frozen=True):
    """All steps of the epoch are taken, or the chief has gone back.

    Attributes:
        steps: Number of steps in the epoch.
        resume_epoch: Epoch that a restarted chief continues with, if that is the reason; otherwise -1.
        era: New era, if the chief has gone back.
        newest_serial: Serial of the newest step that the head has applied, in synchronous training.
    """

    steps: int = 0
    resume_epoch: int = -1
    era: int = 0
    newest_serial: int = -1


class FitOver(_Message, frozen=True):
    """The chief has ended this `fit`."""


class Values(_Message, frozen=True):
    """The requested arrays. Buffers: the arrays; none if they are unchanged.

    Attributes:
        version: Version of the server's values; grows with every update.
        step: Global step: number of updates that the job has made.
        dtypes: Dtypes of the buffers.
        shards: Number of buffers, from the first, that are the values of the server's shard groups.
        note: Text that the worker logs about its update.
        slots: Names of the optimizer's variables, if they were requested.
        ticket: Ticket for a further step, in the response to gradients, if the head has one available.
        is_unreplicated: Whether the replica of these shards, which should exist, is missing or behind.
        lengths: Lengths of the buffers in bytes, if they are in shared memory and not in the message.
        memory_region: Region of the shared memory that contains them.
        rows: Number of the next buffers that are rows of tables, or tables.
        counted_serials: Serials of steps that are included in `step` in asynchronous training: each worker's newest. If
            the head is lost now, the worker may not know yet that its step was applied, and repeats it.
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
    memory_region: int = 0
    rows: int = 0
    counted_serials: tuple[int, ...] = ()


class FitJoined(_Message, frozen=True):
    """The `fit` that the worker now takes part in.

    Attributes:
        era: Era of the `fit`.
        first_epoch: Number of its first epoch.
        step: Global step; valid from the head only.
        tables: Numbers of the variables that are sent by rows.
        groups: Numbers of the server's shards whose gradients and values are sent as one vector (see `ShardPacking`).
        step_offset: Number of steps that the job is ahead; see `DeclareModel`.
        counted_serials: Serials of steps that are included in `step`; see `Values`.
    """

    era: int
    first_epoch: int
    step: int
    tables: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    step_offset: int
    counted_serials: tuple[int, ...] = ()


class SharedMemoryMapped(_Message, frozen=True):
    """Whether the server has mapped the offered memory."""

    accepted: bool


class Acknowledged(_Message, frozen=True):
    """The request is done. The response to `LeaveJob` lists tasks that the server has `excluded`."""

    excluded: tuple[str, ...] = ()


class Decision(_Message, frozen=True):
    """The answer to a yes-or-no question."""

    answer: bool


class Refusal(_Message, frozen=True):
    """The request failed for good; the worker raises an error.

    Attributes:
        kind: Name of the error's class.
        reason: Text of the error.
        task: Task that a `PeerLostError` names.
        rank: Rank that a `PeerLostError` names.
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
        declared: Declaration of the model by the chief.
        version: Version of the values.
        era: Era of the `fit`.
        slots: Names of the optimizer's variables.
        completed: Newest merges: serial, phase, members, and number of merged extras.
        dtypes: Dtypes of the buffers.
        refused: Number of updates that were discarded because they were not finite.
        ended: Whether the chief has ended the `fit`.
        step: Global step; valid on the head only.
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
        serial: Serial of the step.
        phase: Phase of the step.
        members: Workers whose gradients it contains.
        num_gradients: Number of buffers that are gradients; 0 if nothing was applied.
        dtypes: Dtypes of the buffers.
        step: Global step after it; valid on the head only.
    """

    serial: int
    phase: int
    members: tuple[int, ...]
    num_gradients: int
    dtypes: tuple[str, ...]
    step: int


class JobOver(_Message, frozen=True):
    """The workers of the group have finished."""


class LeaseRequest(msgspec.Struct, frozen=True):
    """A leader requests its lease from the chief, which answers with `Acknowledged`.

    Attributes:
        is_replica_lost: Whether it may have answered updates that its replica lacks, or may do so from now on.
    """

    is_replica_lost: bool
