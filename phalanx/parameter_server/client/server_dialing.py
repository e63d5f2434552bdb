"""Connects to a parameter server, or to the first of several tasks that accepts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from phalanx.cluster.admission_control import DISAGREEMENT
from phalanx.cluster.spec import Task
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import (
    DisagreementError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    PhalanxError,
    RendezvousError,
)
from phalanx.parameter_server.server_protocol import NOT_LEADING, NOTICE_AFTER_S
from phalanx.transport.dial import ATTEMPT_TIMEOUT_S, HANDSHAKE_FAILURES_S, RefusedError, retry_delay_s
from phalanx.transport.handshake import Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import UNAVAILABLE

TRANSIENT_REFUSALS = frozenset({NOT_LEADING, UNAVAILABLE})
"""Refusals that waiting may resolve: another server leads, or this one soon will; a chief prepares its data."""

logger = logging.getLogger(__name__)


def connect(
    me: TaskIdentity, task: Task, purpose: str, deadline: float, check: Callable[[], None] = lambda: None
) -> Link:
    """Connect to a task for a purpose; retries until it succeeds. Arguments and errors as for `connect_first`."""
    return connect_first(me, lambda waited_s: [(task, purpose)], deadline, check=check)[0]


def connect_first(
    me: TaskIdentity,
    candidates: Callable[[float], Sequence[tuple[Task, str]]],
    deadline: float,
    *,
    attempt_s: float = ATTEMPT_TIMEOUT_S,
    bulk: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[Link, Welcome, Task]:
    """Connect to the first of several tasks that accepts; retries until one does.

    Args:
        me: This task.
        candidates: Returns the tasks and the purpose for each, given the number of seconds waited so far.
        deadline: Deadline as a value of `time.monotonic()`.
        attempt_s: Seconds for one attempt.
        bulk: See `TaskIdentity.dial_address`.
        check: Called between two rounds; an error that it raises ends the attempts.

    Returns: the link, the task's answer, and the task.

    Raises:
        RendezvousError: no task accepted in time.
        DisagreementError: a task and this one differ in what must be equal.
        HandshakeError: the process at an address is not part of the job, or refuses for good.
    """
    started_at = time.monotonic()
    failing_since: float | None = None  # when failures began that waiting does not resolve
    has_noticed = deadline - started_at < NOTICE_AFTER_S
    details = msgspec.msgpack.encode(me.description)
    while True:
        failure: PhalanxError | None = None
        for task, purpose in candidates(time.monotonic() - started_at):
            now = time.monotonic()
            try:
                return *me.dial(task, purpose, details, deadline=now + attempt_s, bulk=bulk), task
            except (LinkClosedError, LinkTimeoutError) as error:
                failing_since, failure = None, error
            except RefusedError as error:
                if error.welcome.refusal == DISAGREEMENT:
                    raise DisagreementError(error.welcome.reason) from error
                failing_since = None if error.welcome.refusal in TRANSIENT_REFUSALS else failing_since or now
                failure = error
            except HandshakeError as error:
                failing_since, failure = failing_since or now, error
        now = time.monotonic()
        if failure is not None and failing_since is not None and now - failing_since > HANDSHAKE_FAILURES_S:
            raise failure
        task, _ = candidates(0.0)[0]
        if now > deadline:
            raise RendezvousError(f"{task} did not join the job in time ({failure}). Start it with the same cluster.")
        if not has_noticed and now - started_at > NOTICE_AFTER_S:
            has_noticed = True
            logger.warning("%s waits, for up to %.0f s, for %s: %s", me.task, deadline - now, task, failure)
        check()
        time.sleep(retry_delay_s(now - started_at))
