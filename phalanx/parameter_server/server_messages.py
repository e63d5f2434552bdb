"""What passes between a worker and a server: a header of one of these kinds, and arrays as raw buffers.

A worker asks, the server answers, in turn; so a link needs no numbers to match answers with questions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 by its name)
import msgspec
import numpy as np

from phalanx.collectives.host.shared_segment import SegmentOffer
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard

Array = np.ndarray[Any, Any]


def dtypes_of(arrays: Sequence[Array]) -> tuple[str, ...]:
    """What a message says of the arrays that go with it."""
    return tuple([_name_of(array.dtype) for array in arrays])


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy puts it together anew each time


def arrays_of(buffers: Sequence[memoryview], dtypes: Sequence[str]) -> list[Array]:
    """The arrays that came with a message, flat; they share the buffers' memory."""
    return [np.frombuffer(buffer, dtype) for buffer, dtype in zip(buffers, dtypes, strict=True)]


class Model(msgspec.Struct, frozen=True):
    """What is trained, as far as the servers must know it.

    Attributes:
        variables: the trainable ones.
        shards: of all servers.
        optimizer: Keras's own description of it, as JSON.
        constraints: Keras's description of each variable's constraint, as JSON, or None.
        decays: whether weight decay applies to each variable.
        tables: numbers of the variables of which single rows travel.
    """

    variables: tuple[PlacedVariable, ...]
    shards: tuple[Shard, ...]
    optimizer: str
    constraints: tuple[str | None, ...]
    decays: tuple[bool, ...]
    tables: tuple[int, ...] = ()


class UpdateRules(msgspec.Struct, frozen=True):
    """How the workers' updates meet.

    Attributes:
        synchronous: gradients of a step are merged into one update; else each is an update of its own.
        at_least: in synchronous training, how many workers' gradients make an update; 0: all.
        staleness: how many steps a worker may be ahead of the slowest; -1: any number.
        refuse_nan: drop updates that are not finite, and count them; else apply what comes.
        timeout_s: how long to wait for a worker that is connected, before it is left out.
        all_needed: the training ends for all when a worker is lost or does not come; else the others go on without it.
    """

    synchronous: bool
    at_least: int
    staleness: int
    refuse_nan: bool
    timeout_s: float
    all_needed: bool = False

    @property
    def all_together(self) -> bool:
        """Whether all make each step together, and wait for each other."""
        return self.synchronous and not self.at_least


class Ticket(msgspec.Struct, frozen=True, tag="ticket"):
    """The right, and the duty, to make a step.

    Attributes:
        fit, epoch: where it belongs.
        batch: number of the global batch in the epoch.
        members: in synchronous training, the workers that make this step together, by number, in order; else the one.
        member: this worker's number.
        serial: numbers the steps of the job.
        era: of the `fit`, as the chief has declared it; a step of another era is not applied.
    """

    fit: int
    epoch: int
    batch: int
    members: tuple[int, ...]
    member: int
    serial: int
    era: int


# Questions.


class Declare(msgspec.Struct, frozen=True, tag="declare"):
    """From the chief, at the start of each `fit`. Buffers: the server's shards, then what `slots` name.

    Attributes:
        slots: the optimizer's variables: the number of a shard among the server's, or -1 for the optimizer's own, and
            a name.
        step: the global step that the values are of; one that the job has passed changes nothing.
        era: a number that is greater than that of every `fit` before, also of a chief that was killed.
    """

    fit: int
    first_epoch: int
    model: Model
    rules: UpdateRules
    slots: tuple[tuple[int, str], ...]
    step: int
    era: int


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """From any worker: wait until the chief has declared this `fit`, and compare. The answer's step is the epoch with
    which it begins, the version is the era; FitOver, if the chief has declared a later one."""

    fit: int
    variables: tuple[PlacedVariable, ...]


class Rejoin(msgspec.Struct, frozen=True, tag="rejoin"):
    """From a worker in the middle of a `fit` that had lost its link to the server: where it is. A server that was
    started again goes on from its snapshot, and the head makes its schedule anew from what all workers say. Buffer of
    the chief to the head: the order of the samples, if there is one.

    Attributes:
        fit, era, epoch: of the worker; no epoch (-1) where no schedule hands out batches.
        version: the newest of the server's values that it has seen.
        tickets: that it holds.
        batches: how many of the epoch it knows to be handed out.
        finished: the serial of its last step that has been applied; -1 before the first.
        step: the global step as it knows it.
        steps: how many the epoch has; -1 while that is unknown.
        order_of: the epoch with which the pass over the data began, whose order comes along.
        opened: whether the chief has opened the epoch.
        made: how many steps of the epoch the worker has made.
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
    order_of: int = -1
    opened: bool = True
    made: int = 0


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Send the shards' values of this `fit`, tables excepted, if they are newer than `version`.

    Attributes:
        after: wait before for the step of this serial, which the head has applied without the sender's part: that of
            another worker may still be on its way here.
    """

    fit: int
    version: int
    after: int = -1


class PullRows(msgspec.Struct, frozen=True, tag="pull-rows"):
    """Send rows of the server's tables. Buffers: the numbers of the rows in each shard that is of a table."""

    fit: int


class PullTables(msgspec.Struct, frozen=True, tag="pull-tables"):
    """Send the server's tables whole."""

    fit: int


class PullOptimizer(msgspec.Struct, frozen=True, tag="pull-optimizer"):
    """Send the optimizer's variables; without `tables` only those that belong to none."""

    tables: bool = True


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Gradients of the server's shards, to be applied; buffers in the order of their groups (see `Attached`), then the
    extras.

    Of a shard of a table there are two: the numbers of the rows that have a gradient, and their gradients.

    Attributes:
        ticket: the step that they are of; see `Ticket`.
        phase: numbers the merges of one step.
        gradients: whether it carries any; else only extras are to be merged, and nothing is updated.
        finite: whether all gradients of the step are, those for other servers included: all servers decide alike,
            unless each takes other workers' parts as the first ones (`replicas_to_aggregate`).
        share: of the global batch on which the gradients were computed.
        dtypes: of the buffers.
        extras: how each of the buffers counts that are no gradients, and are merged in synchronous training all the
            same: values of `Weight`.
        lengths: of the buffers, if they lie in the lane instead.
        wants: whether the numbers of the rows to answer with, of each shard of a table, come before the extras.
    """

    ticket: Ticket
    phase: int
    gradients: bool
    finite: bool
    share: float
    dtypes: tuple[str, ...]
    extras: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    wants: bool = False


class SetRate(msgspec.Struct, frozen=True, tag="rate"):
    """From the chief: the learning rate from now on."""

    learning_rate: float


class Assign(msgspec.Struct, frozen=True, tag="assign"):
    """From the chief between two epochs: a callback has changed these variables. Buffers: the values of the server's
    shards of them, in its order."""

    fit: int
    variables: tuple[int, ...]


class OpenEpoch(msgspec.Struct, frozen=True, tag="open-epoch"):
    """From the chief: these many steps may be taken; -1: until the data end. Buffer: the order of the samples, if this
    is the first epoch of a pass over shuffled data."""

    fit: int
    epoch: int
    steps: int


class TakeTicket(msgspec.Struct, frozen=True, tag="take"):
    """Ask for the next step; `wait` until there is one or will be none, else take Done for "not now"."""

    fit: int
    epoch: int
    era: int
    wait: bool = True


class NoBatch(msgspec.Struct, frozen=True, tag="no-batch"):
    """There is no batch for this ticket: the epoch `ends` before it, or this worker's stream has passed it by."""

    ticket: Ticket
    ends: bool


class EndEpoch(msgspec.Struct, frozen=True, tag="end-epoch"):
    """From the chief: hand out no more steps of this epoch. Answered with `EpochOver`: how many it has now."""

    fit: int
    epoch: int


class EpochOrder(msgspec.Struct, frozen=True, tag="order"):
    """Ask for the order of the samples in the pass that began with this epoch. Where the chief has gone back, or has
    ended the `fit`, the answer is what `TakeTicket` would get."""

    fit: int
    epoch: int
    era: int


class EpochReport(msgspec.Struct, frozen=True, tag="report"):
    """What this worker counted in an epoch; buffers: its metrics' variables.

    Attributes:
        samples: that it trained on.
        dtypes: of the buffers.
        weights: how each counts: values of `Weight`.
    """

    fit: int
    epoch: int
    samples: int
    dtypes: tuple[str, ...]
    weights: tuple[str, ...]


class CollectReports(msgspec.Struct, frozen=True, tag="collect"):
    """From the chief: everybody's report of an epoch, merged."""

    fit: int
    epoch: int


class HoldSteps(msgspec.Struct, frozen=True, tag="hold"):
    """From the chief: hand out no more steps, and answer when those of the other workers have been made; or, with `on`
    False, go on. The answer's step is the global one."""

    on: bool


class BeginSession(msgspec.Struct, frozen=True, tag="begin-session"):
    """From the chief: it has restored what this managed session starts from. From others: wait until it has."""

    session: int


class SendFromChief(msgspec.Struct, frozen=True, tag="tell"):
    """From the chief: what the other workers are to have from it. Buffers: that; and of the answer, what holds now.

    Attributes:
        fit: with which it begins to hold; -1: with the program.
        once: what the chief has told of the `subject` before, in a former life perhaps, goes on to hold.
    """

    subject: str
    fit: int = -1
    once: bool = False


class ReceiveFromChief(msgspec.Struct, frozen=True, tag="hear"):
    """Ask for what the chief tells of a subject, for this `fit` or a later one; wait until it has. FitOver, if it has
    left without."""

    subject: str
    fit: int = -1


class OfferSharedMemory(msgspec.Struct, frozen=True, tag="share"):
    """From a worker on the server's host: let us use this memory, see `lanes`. The answer is Sharing."""

    offer: SegmentOffer


class EndFit(msgspec.Struct, frozen=True, tag="end-fit"):
    """From the chief: there are no more steps in this `fit`."""

    fit: int


class ChiefAlive(msgspec.Struct, frozen=True, tag="alive"):
    """From the chief, while the others wait for it: it is at work."""


class IsOver(msgspec.Struct, frozen=True, tag="is-over"):
    """Has the chief said goodbye? FitOver: yes; Done: no."""


class StopFit(msgspec.Struct, frozen=True, tag="stop"):
    """From a worker that `asks` for it: let the chief end this `fit` with the epoch; from the chief: has anybody asked?
    FitOver: yes; Done: no."""

    fit: int
    asks: bool


class LeaveFit(msgspec.Struct, frozen=True, tag="bye"):
    """The worker has no more to do, or has met an error, which `failure` names. The chief may name tasks `without`
    which it has ended the job: they are not waited for."""

    failure: str = ""
    without: tuple[str, ...] = ()


# Answers.


class EpochOver(msgspec.Struct, frozen=True, tag="epoch-over"):
    """All steps of the epoch have been made, or the chief has gone back.

    Attributes:
        steps: how many there were.
        back_to: the epoch with which a chief that was started again goes on, if that is why; else -1.
        era: then, the new one.
        newest: in synchronous training, the serial of the newest step that the head has applied.
    """

    steps: int = 0
    back_to: int = -1
    era: int = 0
    newest: int = -1


class FitOver(msgspec.Struct, frozen=True, tag="fit-over"):
    """The chief has ended this `fit`."""


class Values(msgspec.Struct, frozen=True, tag="values"):
    """Buffers: what was asked for; none if it is unchanged.

    Attributes:
        version: of the shards' values; grows with every update.
        step: the global step: how many updates the job has made.
        dtypes: of the buffers.
        shards: how many of the buffers, from the first, are the values of the groups of the server's shards.
        rows: how many of the next are rows of tables, or tables.
        note: what the worker should know of its update, for the log.
        slots: of the optimizer's variables, if those were asked for; as in `Declare`.
        ticket: with the answer to gradients, the right to a further step, where the head had one at hand.
        alone: whether the copy of these shards, which there should be, is missing or behind.
        lengths: of the buffers, if they lie in this `place` of the lanes instead.
    """

    version: int
    step: int = 0
    dtypes: tuple[str, ...] = ()
    shards: int = 0
    note: str = ""
    slots: tuple[tuple[int, str], ...] = ()
    ticket: Ticket | None = None
    alone: bool = False
    lengths: tuple[int, ...] = ()
    place: int = 0
    rows: int = 0


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Where the training is that one now takes part in.

    Attributes:
        step: the global step, of the head's alone.
        tables: numbers of the variables of which single rows travel.
        groups: the numbers of the server's shards whose gradients and values travel as one vector; see `Groups`.
    """

    era: int
    first_epoch: int
    step: int
    tables: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


class SharedMemoryMapped(msgspec.Struct, frozen=True, tag="sharing"):
    """Whether the server has mapped the memory."""

    accepted: bool


class Acknowledged(msgspec.Struct, frozen=True, tag="done"):
    """Yes."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """No, for good: the worker raises.

    Attributes:
        kind: names the class of error.
        task, rank: of a PeerLostError: who was lost.
    """

    kind: str
    reason: str
    task: str = ""
    rank: int = -1


Question = (
    Declare
    | Attach
    | Rejoin
    | Pull
    | PullRows
    | PullTables
    | PullOptimizer
    | Push
    | SetRate
    | Assign
    | OpenEpoch
    | TakeTicket
    | NoBatch
    | EndEpoch
    | EpochOrder
    | EpochReport
    | CollectReports
    | HoldSteps
    | BeginSession
    | SendFromChief
    | ReceiveFromChief
    | OfferSharedMemory
    | EndFit
    | ChiefAlive
    | IsOver
    | StopFit
    | LeaveFit
)
Answer = Ticket | EpochOver | FitOver | Values | Attached | SharedMemoryMapped | Acknowledged | Refusal


# Between the leader of a group of shards and its copy.


class GroupState(msgspec.Struct, frozen=True, tag="state"):
    """A group's part of the training, as it is kept in a snapshot and in a copy. Buffers: the shards' values, then the
    optimizer's variables, then the merged extras of `completed`, in order.

    Attributes:
        declared: what the chief has said of the model.
        version, era: see `Values` and `Ticket`.
        slots: the optimizer's variables.
        completed: the newest merges: serial, phase, whose parts are in, and the number of merged extras.
        dtypes: of the buffers.
        refused: how many updates were left out as they were not finite.
        ended: whether the chief has ended the `fit`.
        step: the global step, if this is the head.
    """

    declared: Declare
    version: int
    era: int
    slots: tuple[tuple[int, str], ...]
    completed: tuple[tuple[int, int, tuple[int, ...], int], ...]
    dtypes: tuple[str, ...]
    refused: int
    ended: bool
    step: int


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """A merge that is over. Buffers: the gradients that were applied, then the merged extras.

    Attributes:
        serial, phase: of the step.
        members: whose parts are in.
        gradients: how many of the buffers are gradients; 0 if nothing was applied.
        dtypes: of the buffers.
        step: the global step after it, if this is the head.
    """

    serial: int
    phase: int
    members: tuple[int, ...]
    gradients: int
    dtypes: tuple[str, ...]
    step: int


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The workers have no more to do."""
