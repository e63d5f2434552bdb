"""Answers workers' requests, in a thread for each worker, with the handler of each kind of request."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.arrays.allocation import copy_arrays
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import EvictedError, FrameError, LinkClosedError, LinkTimeoutError, PeerLostError, PhalanxError
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.server.group_requests import Handler, RequestContext
from phalanx.parameter_server.server.schedule_rebuild import ScheduleRebuild
from phalanx.parameter_server.server.worker_membership import WorkerMembership
from phalanx.parameter_server.server_messages import (
    Acknowledged,
    LeaveJob,
    OfferSharedMemory,
    PullValues,
    PushGradients,
    Refusal,
    Request,
    Response,
    SharedMemoryMapped,
    Values,
)
from phalanx.parameter_server.server_protocol import Worker
from phalanx.parameter_server.shared_memory_channel import TO_SERVER, SharedMemoryChannel
from phalanx.transport.decoding import Decoder
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

SEND_TIMEOUT_S = 60.0
"""Seconds that a worker may take to read a response. A stopped worker blocks only its own thread."""
BEFORE_REBUILD = frozenset(
    {
        messages.Rejoin,
        messages.DeclareModel,
        messages.SetLearningRate,
        messages.Broadcast,
        messages.RequestBroadcast,
    }
)
"""Requests that are answered while a new head still waits for the workers' positions; all others wait."""
WITHOUT_LEASE = BEFORE_REBUILD | {messages.JoinFit, messages.ChiefAlive}
"""Requests that change no variable by themselves, and may arrive before the chief does."""

_REQUESTS = Decoder(Request)
_encode = msgspec.msgpack.Encoder().encode


class RequestHandler:
    """Answers the workers of one group of shards.

    Args:
        me: This task.
        members: The workers.
        rebuild: Rebuilds the schedule if this process became the head during a `fit`.
        handlers: Handlers by kind of request.
        wait_for_lease: Returns once this server may answer; see `leader_lease`.
    """

    def __init__(
        self,
        me: TaskIdentity,
        members: WorkerMembership,
        rebuild: ScheduleRebuild,
        handlers: dict[type, Handler],
        wait_for_lease: Callable[[], None],
    ):
        self._me = me
        self._members = members
        self._rebuild = rebuild
        self._handlers = handlers
        self._wait_for_lease = wait_for_lease

    def serve(
        self,
        worker: Worker,
        link_name: str,
        link: Link,
        *,
        on_leave: Callable[[LeaveJob], tuple[str, ...]],
        is_closing: Callable[[], bool],
    ) -> str:
        """Answer one worker until it leaves or its link ends, and close the link.

        Args:
            worker: Number of the worker.
            link_name: Name of its link.
            link: The link.
            on_leave: Called before `LeaveJob` is answered; returns the tasks that are excluded.
            is_closing: Returns whether this server closes the link itself.

        Returns: how the link ended, as a sentence; empty after `LeaveJob`.
        """
        channel: SharedMemoryChannel | None = None  # of this link; a worker that reconnects offers memory again
        try:
            while True:
                # No deadline while the worker is alive: its program may do other things for hours.
                header, buffers = link.receive(deadline=math.inf)
                request = _REQUESTS.decode(header)
                if isinstance(request, LeaveJob):
                    _send(link, Acknowledged(on_leave(request)))
                    return ""
                if isinstance(request, OfferSharedMemory):
                    accepted = SharedMemoryChannel.accept(request.offer)
                    channel = accepted or channel
                    _send(link, SharedMemoryMapped(accepted is not None))
                    continue
                if isinstance(request, PushGradients) and request.lengths:
                    if channel is None:
                        raise FrameError("gradients in memory that is not shared")
                    buffers = channel.read(TO_SERVER, request.lengths)
                copy = copy_arrays if channel is None else channel.copy_values
                answer, arrays = self._answer(RequestContext(worker, link_name, buffers, copy), request)
                # Only the response may still refer to `buffers`: once it is sent, the worker overwrites that memory.
                if channel is not None and isinstance(answer, Values) and isinstance(request, _VIA_MEMORY):
                    region, lengths = channel.write_values(arrays)
                    if lengths:
                        answer, arrays = msgspec.structs.replace(answer, lengths=lengths, memory_region=region), ()
                _send(link, answer, arrays, max(SEND_TIMEOUT_S, self._me.config.timeout_s))
        except (LinkClosedError, LinkTimeoutError) as error:
            if not is_closing():
                logger.warning("%s: %s", self._me.task, error)
            return str(error)
        except FrameError as error:
            logger.warning("%s hangs up on %s: %s", self._me.task, self._members.names[worker], error)
            return f"what it sent could not be read ({error})."
        finally:
            link.close()
            if channel is not None:
                channel.close()

    def _answer(self, context: RequestContext, request: Request) -> tuple[Response, Sequence[Array]]:
        """The response to a request; a refusal if its handler raises."""
        name = self._members.names[context.worker]
        try:
            if self._members.table.is_evicted(context.link):
                raise EvictedError(
                    f"{name} made no progress for too long and was evicted; training continued without it. Start it "
                    f"again to take part."
                )
            # The lease first: a server that no longer leads would wait for positions that never arrive.
            kind = type(request)
            if kind not in WITHOUT_LEASE:
                self._wait_for_lease()
            if kind not in BEFORE_REBUILD:
                self._rebuild.wait(context.worker, self._me.config.timeout_s)
            return self._handlers[kind](context, request) or _ACKNOWLEDGED
        except LinkClosedError:
            raise  # handled by `serve`: another server answers this worker
        except PeerLostError as error:
            return Refusal(type(error).__name__, str(error), error.task, error.rank), ()
        except PhalanxError as error:
            return Refusal(type(error).__name__, str(error)), ()
        except Exception as error:
            logger.exception("%s cannot do what %s asked", self._me.task, name)
            return Refusal("PhalanxError", f"{self._me.task} failed: {error!r}"), ()


_VIA_MEMORY = (PushGradients, PullValues)
_ACKNOWLEDGED: tuple[Response, Sequence[Array]] = (Acknowledged(), ())


def _send(link: Link, answer: Response, arrays: Sequence[Array] = (), timeout_s: float = SEND_TIMEOUT_S) -> None:
    link.send(_encode(answer), [np.ascontiguousarray(array) for array in arrays], deadline=time.monotonic() + timeout_s)
