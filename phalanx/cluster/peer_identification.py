"""Identifies the task that listens at an address, before, during and after the rendezvous."""

from __future__ import annotations

import time

import msgspec

from phalanx.cluster.spec import Task
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import FrameError, HandshakeError, PhalanxError
from phalanx.transport.decoding import decode_message
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

PROBE = "probe"
"""Purpose of a connection that only identifies the task."""
PROBE_TIMEOUT_S = 1.0
"""Time limit for one answer: the user waits for the message that contains it."""


class ProbeService:
    """Sends the description of this task to the processes that connect."""

    def __init__(self, identity: TaskIdentity):
        self._identity = identity

    def admit(self, hello: Hello) -> Welcome:
        del hello
        return Welcome(details=msgspec.msgpack.encode(self._identity.description))

    def adopt(self, hello: Hello, link: Link) -> None:
        del hello
        link.close()


def identify_task(
    identity: TaskIdentity, task: Task, timeout_s: float = PROBE_TIMEOUT_S
) -> TaskDescription | PhalanxError:
    """Return the description of the task that listens at a task's address, or the reason for no answer."""
    try:
        link, welcome = identity.dial(task, PROBE, deadline=time.monotonic() + timeout_s)
        link.close()
        return decode_message(welcome.details, TaskDescription)
    except FrameError as error:
        return HandshakeError(f"{task} runs another version of Phalanx ({error})")
    except PhalanxError as error:
        return error
