"""What passes between the keeper of a job and the processes that take part or want to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from phalanx.elastic.stragglers import StepTiming

Message = TypeVar("Message")

KEEPER = "keeper"
"""Purpose of a process's link to the keeper."""
GENERATION = "generation"
"""Purpose of the links between members."""


DISAGREEMENT = "disagreement"
"""Refusal: the process differs from the others in what must be equal."""
FAILED = "failed"
"""Refusal: the job cannot go on."""


class JoinRequest(msgspec.Struct, frozen=True):
    """What a process says of itself with its `Hello`: `statement` is an encoded `agreement.Statement`."""

    statement: bytes


class JoinResponse(msgspec.Struct, frozen=True):
    """The keeper's answer to a newcomer.

    Attributes:
        begun: whether the job runs already, so that the newcomer is a candidate.
        replicas: the number of members with which the job began, or is to begin.
    """

    begun: bool
    replicas: int


# From a process to the keeper.


class EntryQuery(msgspec.Struct, frozen=True, tag="ask"):
    """The sender, a candidate, comes to this entry: what about it?"""

    entry: int


class ReadyToJoin(msgspec.Struct, frozen=True, tag="ready"):
    """The sender stands at the beginning of this entry, and can take part."""

    entry: int


class LossReport(msgspec.Struct, frozen=True, tag="report"):
    """The sender has left its generation, because of a loss or as it was asked to.

    Attributes:
        completed: how many collectives it has finished since the job began.
        boundary: whether the one that failed is the merge of a training step: others may join before it.
        fresh: whether the sender has not been given the job's state yet.
        late: what did not come in time, if that was the reason.
        missing: incarnations of members that the sender could not reach, or waited for in vain.
        linked: whether the generation had linked up. If not, nothing was computed in it.
    """

    generation: int
    completed: int
    boundary: bool
    fresh: bool = False
    late: str = ""
    missing: list[str] = []
    linked: bool = True


class EntryBegan(msgspec.Struct, frozen=True, tag="began"):
    """From the chief: an entry begins. To a candidate that has asked: it has begun.

    Attributes:
        note: what all who take part must know of it from its beginning.
        members: how many there are.
    """

    entry: int
    note: bytes = b""
    members: int = 0


class EntryFinished(msgspec.Struct, frozen=True, tag="done"):
    """From the chief: an entry is over, with this result."""

    entry: int
    result: bytes


class LeaveNotice(msgspec.Struct, frozen=True, tag="leave"):
    """The sender has finished, well."""


# From the keeper to a process.


class MemberAddress(msgspec.Struct, frozen=True):
    """A member of a generation.

    Attributes:
        completed: as in its report; -1 for one that was not in the generation before.
        fresh: whether it has to be given the job's state.
    """

    incarnation: str
    task: str
    host: str
    address: str
    pid: int
    completed: int = -1
    fresh: bool = False


class FormGeneration(msgspec.Struct, frozen=True, tag="form"):
    """The members of the next generation, in rank order. They link up and go on.

    Attributes:
        broken: pairs of incarnations whose link is to be made anew.
    """

    generation: int
    members: list[MemberAddress]
    broken: list[tuple[str, str]] = []


class EntryResult(msgspec.Struct, frozen=True, tag="over"):
    """To members that have not reported: this generation has ended. They may not hear of it from the others, if the
    connection is half open or the network is cut."""

    generation: int


class RegroupRequest(msgspec.Struct, frozen=True, tag="regroup"):
    """To the chief: leave this generation before the next training step, so that others can come or go."""

    generation: int


class PastEntry(msgspec.Struct, frozen=True, tag="past"):
    """The entry at which the receiver stands is over; this was its result."""

    entry: int
    result: bytes


class Dismissed(msgspec.Struct, frozen=True, tag="dismissed"):
    """The receiver takes no part any more.

    Attributes:
        reason: why, for people.
        cause: `evicted` (it was stuck), `surplus` (fewer are wanted), `over` (the job has ended), `failed` (the job
            cannot go on).
    """

    reason: str
    cause: str


ToKeeper = EntryQuery | ReadyToJoin | LossReport | EntryBegan | EntryFinished | StepTiming | LeaveNotice
FromKeeper = FormGeneration | EntryResult | EntryBegan | RegroupRequest | PastEntry | Dismissed


NOT_KEPT = b"\xc1too large"  # 0xc1 begins no msgpack value
"""In place of a result that takes too much of the launcher's memory."""


def pack(message: ToKeeper | FromKeeper) -> tuple[bytes, list[bytes]]:
    """Header and buffers of a frame; see `unpack`. A result may be larger than a header."""
    if isinstance(message, EntryFinished | PastEntry):
        return msgspec.msgpack.encode(msgspec.structs.replace(message, result=b"")), [message.result]
    return msgspec.msgpack.encode(message), []


def unpack(decoder: msgspec.msgpack.Decoder[Message], header: bytes, buffers: Sequence[memoryview]) -> Message:
    """The message of a frame. Raises msgspec.MsgspecError if it is none."""
    message = decoder.decode(header)
    if isinstance(message, EntryFinished | PastEntry) and buffers:
        return msgspec.structs.replace(message, result=bytes(buffers[0]))
    return message
