"""The messages between the coordinator of a job and the processes that take part in it or want to join.

The coordinator of an elastic job is in the launcher (`phalanx.elastic`). In a job of fixed size, the chief coordinates
until the job starts (`rendezvous`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from phalanx.cluster.membership import Member, Rank
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.transport.decoding import Decoder
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

IDLE_S = 3600.0
"""Duration of one wait for a message; waits repeat while the link is open."""
SLOWEST_BYTES_PER_S = 1e6
"""Slowest network that timeouts allow for: a large message gets more time."""

LAUNCHER = "the launcher"
"""Task name of the elastic coordinator, also in messages to the user."""
COORDINATOR = "elastic coordinator"
"""Purpose of a process's link to the coordinator."""
RENDEZVOUS = "rendezvous"
"""Purpose of a task's link to the chief until a job of fixed size starts."""
MESH = "mesh"
"""Purpose of the links between members."""

FAILED = "failed"
"""Refusal: the job has failed."""


class JoinResponse(msgspec.Struct, frozen=True):
    """The coordinator's answer to a new process, inside the `Welcome`. The `Hello` holds its `TaskDescription`.

    Attributes:
        has_begun: Whether the job is already running, so that the process is a candidate.
        initial_world_size: Number of members at the start of the job.
    """

    has_begun: bool
    initial_world_size: int


# From a process to the coordinator.


class EntryQuery(msgspec.Struct, frozen=True, tag="query"):
    """The sender, a candidate, has reached this entry of the program and queries its status."""

    entry: int


class ReadyToJoin(msgspec.Struct, frozen=True, tag="ready"):
    """The sender waits at the start of this entry and can become a member."""

    entry: int


class LossReport(msgspec.Struct, frozen=True, tag="report"):
    """The sender has left its generation, because a member was lost or because the coordinator requested it.

    Attributes:
        generation: The generation that the sender has left.
        completed: Number of collectives that the sender has completed since the job started.
        at_step_boundary: Whether the interrupted collective is the merge of a training step, before which others may
            join.
        needs_state: Whether the sender has not received the job's state yet.
        timeout_text: Text of the timeout, if that was the reason.
        unreachable: Incarnations of members that the sender could not reach or that did not answer in time.
        links_formed: Whether all links of the generation were established. If not, nothing was computed in it.
    """

    generation: int
    completed: int
    at_step_boundary: bool
    needs_state: bool = False
    timeout_text: str = ""
    unreachable: list[str] = []
    links_formed: bool = True


class LinkReport(msgspec.Struct, frozen=True, tag="links"):
    """In a job of fixed size: whether the sender has links to all members of a generation.

    Attributes:
        generation: Number of the generation.
        failure: The member that the sender cannot reach, and why; empty if it has all links.
    """

    generation: int
    failure: str = ""


class EntryStarted(msgspec.Struct, frozen=True, tag="began"):
    """From the chief: an entry starts. Also the answer to a candidate's query: the entry has started.

    Attributes:
        entry: Number of the entry.
        note: Data that every participant needs at the start of the entry (its seed).
        members: Number of members; set in the answer.
    """

    entry: int
    note: bytes = b""
    members: int = 0


class EntryFinished(msgspec.Struct, frozen=True, tag="finished"):
    """From the chief: an entry has finished.

    Attributes:
        result: Result of the call.
        state: Other state that the call has left to the program; empty if there is none or it is too large to keep.
    """

    entry: int
    result: bytes
    state: bytes = b""


class EntryLeft(msgspec.Struct, frozen=True, tag="left"):
    """From each member: it no longer takes part in an entry.

    Attributes:
        entry: Number of the entry.
        is_finished: Whether the member has done its part; otherwise an exception ended it.
    """

    entry: int
    is_finished: bool


class Heartbeat(msgspec.Struct, frozen=True, tag="alive"):
    """The sender is alive; sent twice a second."""


class LeaveNotice(msgspec.Struct, frozen=True, tag="leave"):
    """The sender ends its program, without an uncaught error."""


# From the coordinator to a process.


class MemberAddress(msgspec.Struct, frozen=True):
    """A member of a generation and where it listens.

    Attributes:
        completed: Number of collectives in its `LossReport`; -1 if it was not a member of the last generation.
        needs_state: Whether it must receive the job's state.
        is_late: Whether it became a member while the job was running.
    """

    incarnation: str
    task: str
    host: str
    address: str
    pid: int
    completed: int = -1
    needs_state: bool = False
    is_late: bool = False

    @classmethod
    def of(
        cls,
        description: TaskDescription | Member,
        completed: int = -1,
        *,
        needs_state: bool = False,
        is_late: bool = False,
    ) -> MemberAddress:
        names = (description.incarnation, description.task, description.host, description.address)
        return cls(*names, description.pid, completed, needs_state, is_late)

    def as_member(self, rank: Rank) -> Member:
        return Member(rank, self.task, self.host, self.address, self.pid, self.incarnation)


class FormGeneration(msgspec.Struct, frozen=True, tag="form"):
    """The members of the next generation, in rank order. They connect to each other and continue.

    Attributes:
        generation: Number of the generation.
        members: All members, in rank order.
        broken: Pairs of incarnations that must replace the link between them.
    """

    generation: int
    members: list[MemberAddress]
    broken: list[tuple[str, str]] = []


class StartOrder(msgspec.Struct, frozen=True, tag="start"):
    """In a job of fixed size: all members have all links, and the job starts."""


class GenerationEnded(msgspec.Struct, frozen=True, tag="ended"):
    """To members that have not reported: this generation has ended. The links between members may not show this when a
    connection is half open or the network is cut."""

    generation: int


class RegroupRequest(msgspec.Struct, frozen=True, tag="regroup"):
    """To the chief: leave this generation before the next training step, so that others can join or leave."""

    generation: int


class EntryAlreadyFinished(msgspec.Struct, frozen=True, tag="past"):
    """The entry that the receiver has reached has already finished; see `EntryFinished`."""

    entry: int
    result: bytes
    state: bytes = b""


class Dismissed(msgspec.Struct, frozen=True, tag="dismissed"):
    """The receiver no longer takes part in the job.

    Attributes:
        reason: Explanation for the user.
        cause: `evicted` (it was stuck), `surplus` (fewer workers are requested), `over` (the job has finished),
            `failed` (the job has failed); before a job of fixed size starts, `disagreement`, or `lost` (a task has
            exited).
        task: The task that has exited.
    """

    reason: str
    cause: str
    task: str = ""


ToCoordinator = (
    EntryQuery
    | ReadyToJoin
    | LossReport
    | LinkReport
    | EntryStarted
    | EntryFinished
    | EntryLeft
    | Heartbeat
    | LeaveNotice
)
FromCoordinator = (
    FormGeneration | StartOrder | GenerationEnded | EntryStarted | RegroupRequest | EntryAlreadyFinished | Dismissed
)

NOT_KEPT = b"\xc1too large"  # no msgpack value starts with 0xc1
"""Replaces a result that is too large to keep in the launcher's memory."""


def pack(message: ToCoordinator | FromCoordinator) -> tuple[bytes, list[bytes]]:
    """Return header and buffers of a frame; see `unpack`. Result and state may exceed the size limit of a header."""
    if isinstance(message, EntryFinished | EntryAlreadyFinished):
        header = msgspec.msgpack.encode(msgspec.structs.replace(message, result=b"", state=b""))
        return header, [message.result, message.state]
    return msgspec.msgpack.encode(message), []


def unpack(decoder: Decoder[Message], header: bytes, buffers: Sequence[memoryview]) -> Message:
    """Return the message in a frame.

    Raises: FrameError if the frame holds no valid message.
    """
    message = decoder.decode(header)
    if isinstance(message, EntryFinished | EntryAlreadyFinished) and len(buffers) == 2:
        return msgspec.structs.replace(message, result=bytes(buffers[0]), state=bytes(buffers[1]))
    return message


def send(link: Link, message: ToCoordinator | FromCoordinator, timeout_s: float) -> None:
    """Send a message over a link.

    Args:
        link: The link.
        message: The message.
        timeout_s: Seconds for a small message; a large one may take longer.

    Raises: LinkClosedError or LinkTimeoutError if the other end does not read it.
    """
    header, buffers = pack(message)
    link.send(header, buffers, deadline=time.monotonic() + timeout_s + sum(map(len, buffers)) / SLOWEST_BYTES_PER_S)


def receive_one(link: Link, decoder: Decoder[Message], *, deadline: float) -> Message:
    """Return the next message.

    Raises: LinkClosedError, LinkTimeoutError, FrameError as `Link.receive`.
    """
    return unpack(decoder, *link.receive(deadline=deadline))


def receive(link: Link, decoder: Decoder[Message]) -> Iterator[Message]:
    """Yield the messages that arrive over a link, until it ends."""
    while True:
        try:
            yield receive_one(link, decoder, deadline=time.monotonic() + IDLE_S)
        except LinkTimeoutError:
            continue
        except (LinkClosedError, FrameError) as error:
            logger.debug("the link to %s ended: %s", link.peer, error)
            return
