"""Decides whether a task may link to this one: pure functions, and the kinds of refusal."""

from __future__ import annotations

from collections.abc import Callable, Container

import msgspec

from phalanx.cluster.membership import Rank
from phalanx.cluster.task_comparison import TaskDescription, describe_disagreement
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import FrameError
from phalanx.transport.decoding import decode_message
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

DISAGREEMENT = "disagreement"
"""Refusal: the two tasks differ in what must be equal. Permanent."""
DUPLICATE = "duplicate"
"""Refusal: another process has the same task. Permanent if it comes from the chief."""
RUNNING = "running"
"""Refusal: the job has started with other processes. Permanent."""
LEAVING = "leaving"
"""Refusal: this task has not yet left the previous job of the same process. Temporary."""


def link_name(incarnation: str, number: int) -> str:
    """Return the name of one link of a process. It keeps requests over a lost link apart from those over the next."""
    return f"{incarnation}#{number}"


def incarnation_from_link_name(link: str) -> str:
    """Return the incarnation of the process that a link name belongs to."""
    return link.partition("#")[0]


def admit_worker(
    identity: TaskIdentity,
    hello: Hello,
    ranks: Container[Rank | None],
    link_of: Callable[[Rank], tuple[str, Link] | None],
) -> Welcome:
    """Decide whether a worker may link to this task for a purpose other than the rendezvous.

    Args:
        identity: Identity of this task.
        hello: The introduction of the other task, with its `TaskDescription` as details.
        ranks: The allowed ranks.
        link_of: Function that returns the name of a rank's current link, and the link. The same process may replace its
            link, which may have broken without notice here.

    Returns: the answer, with this task's description if it is positive.
    """
    newcomer = decode_newcomer(hello, str(identity.task))
    if isinstance(newcomer, Welcome):
        return newcomer
    if disagreement := describe_disagreement(identity.description, newcomer):
        return Welcome(refusal=DISAGREEMENT, reason=disagreement)
    rank = identity.rank_of(newcomer.task)
    if rank is None or rank not in ranks:
        return Welcome(refusal=DISAGREEMENT, reason=f"{newcomer.task} is not a worker of this cluster.")
    name, present = link_of(rank) or ("", None)
    # A dead process leaves a closed link; a live one keeps the task.
    if present is not None and incarnation_from_link_name(name) != newcomer.incarnation and not present.peer_closed():
        return refuse_duplicate(newcomer)
    return Welcome(details=msgspec.msgpack.encode(identity.description))


def decode_newcomer(hello: Hello, local_task: str) -> TaskDescription | Welcome:
    """Return the description of a task that wants to link to `local_task`, or a refusal if it is not decodable."""
    try:
        return decode_message(hello.details, TaskDescription)
    except FrameError as error:
        reason = f"{hello.task} and {local_task} run different versions of Phalanx ({error})."
        return Welcome(refusal=DISAGREEMENT, reason=f"{reason} Install the same one everywhere.")


def refuse_duplicate(newcomer: TaskDescription, where: str = "") -> Welcome:
    """Return the refusal of a task that another process has; `where` names that process."""
    return Welcome(
        refusal=DUPLICATE,
        reason=f"{newcomer.task} has joined already{where}. This process, pid {newcomer.pid} on {newcomer.host}, has "
        f"the same task: give it another task.index in TF_CONFIG, or stop the other one.",
    )
