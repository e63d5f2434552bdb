"""The loop that moves an elastic process from one generation to the next, for strategies and for Horovod.

A `Participant` works among the members of a generation: a strategy's collectives, or Horovod's controllers. When it
loses a member, `form_next_generation` abandons the generation, reports to the coordinator, connects to the members of
the next generation and starts the participant there, and repeats this until a generation is formed.

Programs that repeat a function after a membership change (`phalanx.elastic.run`, `hvd.elastic.run`) run the same loop
one level higher: `run_until_complete`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from phalanx.cluster.member_links import GenerationNotFormedError
from phalanx.cluster.membership_messages import EntryAlreadyFinished, LossReport
from phalanx.elastic.elastic_node import ElasticNode
from phalanx.errors import CollectiveTimeoutError, LinkClosedError, PeerLostError
from phalanx.monitoring import timeline

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOSSES = (PeerLostError, CollectiveTimeoutError, LinkClosedError)
"""Errors that end a generation, but not the job."""


class Position(NamedTuple):
    """The position of a process when its generation ends. The fields are those of `LossReport`, in their order."""

    completed: int
    boundary: bool
    needs_state: bool


class Participant(Protocol):
    """An object that works among the members of a generation."""

    def position(self) -> Position: ...

    def start(self) -> None:
        """Start in the generation that the node has formed.

        Raises: `LOSSES` if another member is lost in the meantime.
        """
        ...

    def abandon(self, error: Exception) -> None:
        """Abandon the current generation because of this error, and notify its other members. Called again if the next
        generation fails."""
        ...


def join_generation(node: ElasticNode, participant: Participant, entry: int) -> EntryAlreadyFinished | None:
    """As a candidate, wait until this process takes part in a generation or the members have finished the entry.

    Raises: RendezvousError if the others did not arrive, or the job has failed.
    """
    try:
        if (past := node.join(entry)) is not None:
            return past
        participant.start()
    except (GenerationNotFormedError, *LOSSES) as error:
        _follow(node, participant, error)
    return None


def form_next_generation(node: ElasticNode, participant: Participant, error: Exception) -> None:
    """Leave the current generation because of an error; return when the participant works in the next one.

    Raises:
        EvictedError, RendezvousError: this process, or the whole job, cannot continue.
        SystemExit: this process is no longer needed.
    """
    started_ns = timeline.now()
    _follow(node, participant, error)
    now = node.membership
    args = {"generation": now.generation, "rank": now.rank, "world_size": now.world_size, "why": str(error)}
    timeline.current.complete(timeline.MEMBERSHIP, "membership change", started_ns, args)


def _follow(node: ElasticNode, participant: Participant, error: Exception) -> None:
    while True:
        logger.debug("%s leaves generation %d: %s", node.task, node.generation, error)
        participant.abandon(error)  # first, so that the others leave immediately
        report = LossReport(
            node.generation,  # the last one ordered, formed or not: the coordinator waits for its reports
            *participant.position(),
            timeout_text=str(error) if isinstance(error, CollectiveTimeoutError) else "",
            unreachable=node.links.pop_unreachable(),
            links_formed=not isinstance(error, GenerationNotFormedError),
        )
        try:
            node.regroup(report)
            participant.start()
            return
        except (GenerationNotFormedError, *LOSSES) as next_error:
            error = next_error


class ElasticProgram(Protocol):
    """Prepares and recovers a function that is repeated after each membership change."""

    def synchronize(self, *, has_changed: bool) -> None:
        """Give all members the chief's state before the function is called.

        Args:
            has_changed: Whether the members have changed since the function was last called.
        """
        ...

    def recover(self, error: Exception) -> bool:
        """If the error means that the members have changed, return to the last commit and a working generation. Return
        whether it does."""
        ...


def run_until_complete(function: Callable[[], T], program: ElasticProgram) -> T:
    """Call a function until it returns, repeating it after each membership change, and return its result.

    Raises: what the function raises for other reasons.
    """
    has_changed = False
    while True:
        try:
            program.synchronize(has_changed=has_changed)
            return function()
        except Exception as error:
            if not program.recover(error):
                raise
        has_changed = True


def is_caused_by(error: BaseException, kind: type[Exception]) -> bool:
    """Whether an error is of this kind. TensorFlow wraps errors raised inside its functions and keeps only the text."""
    return isinstance(error, kind) or kind.__name__ in str(error)
