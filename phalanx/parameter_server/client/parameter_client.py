"""A worker's side: one connection to each server, and requests to one or all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.cluster.spec import Task
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.collectives.host.shared_segment import SegmentOffer
from phalanx.errors import EvictedError, LinkClosedError, LinkTimeoutError
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.client.server_connection import RequestArrays, ServerConnection
from phalanx.parameter_server.client.server_reconnection import ServerReconnection, refusal_error
from phalanx.parameter_server.server_messages import Request, Response
from phalanx.parameter_server.shard_packing import Kind
from phalanx.transport.decoding import Decoder
from phalanx.transport.link import Link

Array = np.ndarray[Any, Any]
ResponseArrays = tuple[Response, list[memoryview]]
"""A response and its buffers."""

HEAD = 0
"""The first server, which also keeps the schedule."""
LEAVE_TIMEOUT_S = 5.0
"""Seconds to leave; a server that is busy for longer is not waited for."""

_RESPONSES = Decoder(Response)
_encode = msgspec.msgpack.Encoder().encode


class ParameterServerClient:
    """The connections of one worker to all servers. Used by one thread at a time.

    The constructor waits until all servers are connected. A link that breaks later is replaced if the server may
    return, and the pending request is repeated: servers answer a repeated request the same way.

    Args:
        me: This task.
        return_timeout_s: Seconds to wait for a lost server; 0: do not wait.
        is_replicated: Whether each server's shards have a replica on the next one, which may take over.

    Attributes:
        is_starting: Whether a response may have to wait for tasks that are still starting.
        waited_s: Seconds that this worker has waited for responses.
        unreachable_tasks: Tasks that no longer answer; servers need not wait for them when this task, the chief, ends.
        is_replicated: Whether there are replicas; see the argument.
        reconnection: Replaces broken links.
        tasks: The servers.

    Raises:
        RendezvousError: a server did not connect in time.
        DisagreementError: a server and this task differ in what must be equal.
    """

    def __init__(self, me: TaskIdentity, return_timeout_s: float = 0.0, *, is_replicated: bool = False):
        self._me = me
        self.is_replicated = is_replicated
        self.is_starting = True
        self.unreachable_tasks: set[str] = set()
        self.waited_s = 0.0
        self._was_evicted = False  # a server has refused this process for good
        self.reconnection = ServerReconnection(
            me, return_timeout_s, is_replicated=is_replicated, send=self._send, receive=self._receive
        )
        self.tasks: tuple[Task, ...] = self.reconnection.tasks
        self._connections: list[ServerConnection] = self.reconnection.connections
        try:
            self.reconnection.connect_all(time.monotonic() + me.config.rendezvous_timeout_s)
        except BaseException:
            self.disconnect()
            raise

    @property
    def identity(self) -> TaskIdentity:
        """This task in the cluster."""
        return self._me

    @property
    def timeout_s(self) -> float:
        """Seconds after which servers evict a worker that makes no progress."""
        return self._me.config.timeout_s

    @property
    def num_servers(self) -> int:
        return len(self.tasks)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of all requests so far, including those through shared memory."""
        return sum(each.bytes_sent for each in self._connections)

    @property
    def bytes_received(self) -> int:
        """Number of bytes of all responses so far, including those through shared memory."""
        return sum(each.bytes_received for each in self._connections)

    # Requests.

    def request(self, server: int, request: Request, buffers: Sequence[Array] = ()) -> ResponseArrays:
        """Send one request to one server and return its response.

        Raises: PeerLostError if the server is lost; the error in the server's refusal.
        """
        self.send(server, request, buffers)
        return self.receive(server)

    def query_head(self, question: messages.QueryJobOver | messages.RequestStop) -> bool:
        """Send a question to the head and return its answer. Raises: see `request`."""
        answer, _ = self.request(HEAD, question)
        assert isinstance(answer, messages.Decision)
        return answer.answer

    def request_all(self, requests: Sequence[RequestArrays]) -> list[ResponseArrays]:
        """Send a request to each server, all at once, and return the responses. Raises: see `request`."""
        for server, (request, buffers) in enumerate(requests):
            self.send(server, request, buffers)
        return self.receive_all()

    def send_buffers(self, server: int, kinds: tuple[Kind, ...]) -> list[Array]:
        """Arrays of these kinds, to be filled for the next `PushGradients` to a server.

        Unfilled arrays are zero or unchanged. The arrays must not change until the request is answered.
        """
        return self._connections[server].send_buffers(kinds)

    def share_memory(self, server: int, kinds: Sequence[Kind]) -> None:
        """Send and receive gradients and values of these kinds through shared memory, if the server is on this host.

        Values received this way are overwritten by the second response after them.
        """

        def accepts(offer: SegmentOffer) -> bool:
            response, _ = self.request(server, messages.OfferSharedMemory(offer))
            assert isinstance(response, messages.SharedMemoryMapped)
            return response.accepted

        self._connections[server].share_memory(self._me.description.host, kinds, accepts)

    def send(self, server: int, request: Request, buffers: Sequence[Array] = ()) -> None:
        """Send a request without waiting; `receive` must fetch the response before the next request to this server.

        The buffers must not change until then.
        """
        connection = self._connections[server]
        if connection.pending is not None:
            # An error prevented this worker from receiving its response, which would be mistaken for the next one.
            connection.link.close()
        connection.pending = (request, buffers)
        try:
            self._send(connection, connection.pending)
        except (LinkClosedError, LinkTimeoutError) as error:
            self.reconnection.reconnect(server, self.reconnection.treat_hang_as_closed(error))

    def receive(self, server: int) -> ResponseArrays:
        """The response to the request that was sent to a server. Raises: see `request`."""
        return self._check_refusal(server, self._wait(server))

    def receive_all(
        self,
        servers: Sequence[int] | None = None,
        on_response: Callable[[int, Response], None] = lambda server, response: None,
    ) -> list[ResponseArrays]:
        """The responses of these servers to the requests sent to them.

        Args:
            servers: Numbers of servers; None: all.
            on_response: Called with each response as soon as it arrives: another server may be lost before it responds.

        Raises: see `request`; once all responses have arrived, because an unread response would be mistaken for the
            response to the next request.
        """
        # One after the other; meanwhile, `reconnect_broken_links` watches the links to the others.
        requested = range(self.num_servers) if servers is None else servers
        responses = []
        for server in requested:
            responses.append(self._wait(server))
            on_response(server, responses[-1][0])
        return [self._check_refusal(server, response) for server, response in zip(requested, responses, strict=True)]

    def _wait(self, server: int) -> ResponseArrays:
        connection, reconnection = self._connections[server], self.reconnection
        began = time.perf_counter()
        while True:
            try:
                response = self._receive(
                    connection, reconnection.reconnect_broken_links if reconnection.return_timeout_s else None
                )
                break
            except (LinkClosedError, LinkTimeoutError) as error:
                reconnection.reconnect(server, reconnection.treat_hang_as_closed(error))
        connection.pending = None  # not earlier: `reconnect` repeats what is pending
        self.waited_s += time.perf_counter() - began
        return response

    def _check_refusal(self, server: int, response: ResponseArrays) -> ResponseArrays:
        if isinstance(response[0], messages.Refusal):
            error = refusal_error(response[0], str(self.reconnection.leader_of(server)))
            self._was_evicted |= isinstance(error, EvictedError)
            raise error
        return response

    def _send(self, connection: ServerConnection, request: RequestArrays) -> None:
        # With a replica, half the time: before other servers evict this worker because this server blocks it.
        connection.send(*request, self._me.config.timeout_s / (2 if self.is_replicated else 1))

    def _receive(self, connection: ServerConnection, check: Callable[[float], None] | None) -> ResponseArrays:
        # Longer than the time after which the servers themselves evict a worker, and report which.
        config = self._me.config
        more_s = max(config.timeout_s, config.rendezvous_timeout_s) if self.is_starting else config.timeout_s
        return connection.receive(config.timeout_s + more_s, check)

    # The end.

    def close(self, failure: str = "") -> None:
        """Leave all servers. An evicted worker only disconnects, since another process may have replaced it.

        Safe to call twice.

        Args:
            failure: Error that this worker ends with, in one line; empty if there is none.
        """
        if self._was_evicted:
            self.disconnect()
            return
        excluded = set(self.unreachable_tasks)
        for connection in self._connections:
            message = _encode(messages.LeaveJob(failure, tuple(sorted(excluded))))
            try:
                # The head, which is first, has evicted workers that the other servers do not know about.
                excluded.update(_send_leave(connection.link, message))
            except (LinkClosedError, LinkTimeoutError):
                continue  # the server is gone too
        self.disconnect()

    def disconnect(self) -> None:
        """Close all links without leaving the job; the servers will count this worker as lost. Safe to call twice."""
        if self.reconnection.grants is not None:
            self.reconnection.grants.close()
        for connection in self._connections:
            connection.close()
        self._connections.clear()


def _send_leave(link: Link, message: bytes) -> tuple[str, ...]:
    """Leave one server. Returns the tasks that it has evicted."""
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    link.send(message, deadline=deadline)
    while True:
        answer = _RESPONSES.decode(link.receive(deadline=deadline)[0])
        if isinstance(answer, messages.Acknowledged):
            return answer.excluded
        # A response that an error prevented this worker from receiving.
