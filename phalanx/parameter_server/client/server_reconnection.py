"""Reconnects to lost servers, and finds the server that now leads a group."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from phalanx import errors
from phalanx.cluster.membership import SEE_TASK_OUTPUT
from phalanx.cluster.peer_identification import PROBE
from phalanx.cluster.spec import PS, Task
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import LinkClosedError, LinkTimeoutError, PeerLostError, PhalanxError, RendezvousError
from phalanx.parameter_server.client.lease_grants import LeaseGrants
from phalanx.parameter_server.client.server_connection import RequestArrays, ServerConnection
from phalanx.parameter_server.client.server_dialing import connect_first
from phalanx.parameter_server.server_messages import Refusal
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, GROUP_PURPOSE, PROMOTE_PURPOSE, peer_lost
from phalanx.transport.decoding import decode_message
from phalanx.transport.dial import ATTEMPT_TIMEOUT_S
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
RejoinRequests = Callable[[int], Sequence[RequestArrays]]

PREFER_REPLICA_S = 3.0
"""Seconds for which a worker that has lost a leader dials only the replica: a dead process's port may still be open."""
REPLICA_ATTEMPT_TIMEOUT_S = 1.0
"""Seconds for one attempt in that time."""


class ServerReconnection:
    """Replaces the client's broken connections. Used by the client's thread.

    Args:
        me: This task.
        return_timeout_s: Seconds to wait for a lost server; 0: do not wait.
        is_replicated: Whether each server's shards have a replica on the next one.
        send: Sends requests over a connection.
        receive: Receives a response over a connection, and calls a function while it waits.

    Attributes:
        connections: Connections to the groups' leaders, by number of the group.
        grants: Leases of the leaders, on the chief and if there are replicas; else None.
        tasks: The servers.
        rejoin_requests: Returns, given a server's number, the requests that tell a returning server this worker's
            position in a `fit`; None outside a `fit`.
    """

    def __init__(
        self,
        me: TaskIdentity,
        return_timeout_s: float,
        *,
        is_replicated: bool,
        send: Callable[[ServerConnection, RequestArrays], None],
        receive: Callable[..., Any],
    ):
        self._me = me
        self.return_timeout_s = return_timeout_s
        self._is_replicated = is_replicated
        self._send = send
        self._receive = receive
        self.connections: list[ServerConnection] = []
        self.grants = LeaseGrants(me) if is_replicated and me.rank == CHIEF_WORKER else None
        self.tasks = tuple(task for task in me.spec.tasks if task.type == PS)
        self.rejoin_requests: RejoinRequests | None = None
        self._probe_s = me.config.timeout_s / 4
        self._probed_at = 0.0

    # Connecting.

    def connect_all(self, deadline: float) -> None:
        """Connect to the leaders of all groups."""
        for group in range(len(self.tasks)):
            link, leader, host = self._connect(group, deadline)
            self.connections.append(ServerConnection(group, link, leader, host))
            if self.grants is not None:
                self.grants.begin(group, self.tasks[leader])

    def _connect(self, group: int, deadline: float) -> tuple[Link, int, str]:
        """Connect to the server that leads a group. Returns the link, the server's number and its host."""
        attempt_s = REPLICA_ATTEMPT_TIMEOUT_S if self._is_known(group) and self._is_replicated else ATTEMPT_TIMEOUT_S

        def candidates(waited_s: float) -> list[tuple[Task, str]]:
            return [(self.tasks[s], f"{purpose}/{group}") for s, purpose in self._candidates(group, waited_s)]

        link, welcome, task = connect_first(self._me, candidates, deadline, attempt_s=attempt_s, bulk=True)
        return link, self.tasks.index(task), decode_message(welcome.details, TaskDescription).host

    def _is_known(self, group: int) -> bool:
        return group < len(self.connections)

    def _candidates(self, group: int, waited_s: float) -> list[tuple[int, str]]:
        """The servers to dial, and the purpose for each: the group's own server, or the one with the replica."""
        leader = self.connections[group].leader if self._is_known(group) else group
        if not self._is_replicated:
            return [(leader, GROUP_PURPOSE)]
        other = (group + 1) % len(self.tasks) if leader == group else group
        if not self._is_known(group):
            return [(leader, GROUP_PURPOSE), (other, GROUP_PURPOSE)]
        # Only the chief may decide which server leads. The others dial the replica until it has decided.
        if self.grants is None:
            is_unreplicated = self.connections[group].is_unreplicated
        else:
            is_unreplicated = not self.grants.has_replica(group)
        to_other = (other, GROUP_PURPOSE if self.grants is None or is_unreplicated else PROMOTE_PURPOSE)
        prefers_replica = waited_s < PREFER_REPLICA_S and not is_unreplicated
        return [to_other] if prefers_replica else [to_other, (leader, GROUP_PURPOSE)]

    # Lost servers.

    def treat_hang_as_closed(self, error: LinkClosedError | LinkTimeoutError) -> LinkClosedError:
        """Treat a server that hangs as lost if its replica can take over: once that leads, the server is refused."""
        if isinstance(error, LinkClosedError):
            return error
        if not (self._is_replicated and self.return_timeout_s):
            raise error
        return LinkClosedError(str(error))

    def reconnect_broken_links(self, waited_s: float) -> None:
        """Replace broken links: the server whose response is awaited may be waiting for this worker at another server.

        After a while, also replaces links to servers that hang, before a server that works evicts this worker.
        """
        while broken := self._broken():
            group = min(broken)
            peer = self.connections[group].link.peer
            self.reconnect(group, LinkClosedError(f"the connection to {peer} is broken."))
        if self._is_replicated and waited_s > self._probe_s and (hanging := self._hanging()):
            group = min(hanging)
            self.reconnect(group, LinkClosedError(f"{self.leader_of(group)} hangs."), hanging)

    def leader_of(self, group: int) -> Task:
        """The server that leads a group."""
        return self.tasks[self.connections[group].leader]

    def _broken(self) -> set[int]:
        """The groups whose leader has closed its link."""
        return {each.group for each in self.connections if each.link.peer_closed()}

    def _hanging(self) -> set[int]:
        """The groups whose leaders owe a response and whose processes do nothing. Limits how often it probes them.

        Includes their groups that owe nothing: another worker may wait for one of these to get a new leader, while this
        worker waits for that worker.
        """
        if time.monotonic() - self._probed_at < self._probe_s:
            return set()
        self._probed_at = time.monotonic()
        owing = {each.leader for each in self.connections if each.pending is not None}
        silent = {leader for leader in owing if not self._is_alive(self.tasks[leader])}
        return {each.group for each in self.connections if each.leader in silent}

    def _is_alive(self, server: Task) -> bool:
        try:
            link, _ = self._me.dial(server, PROBE, deadline=time.monotonic() + self._probe_s)
        except LinkTimeoutError:
            return False
        except PhalanxError:
            return True  # something answers, or its link is about to break
        link.close()
        return True

    def reconnect(self, group: int, cause: LinkClosedError, hanging: Collection[int] = ()) -> None:
        """Wait until a server has returned, report this worker's position, and repeat the pending request.

        Args:
            group: Number of the group whose leader is lost.
            cause: Error that ended the link.
            hanging: Groups whose leader hangs; they are reconnected too.

        Raises: PeerLostError if the server does not return in time; the error that it refuses with.
        """
        task = self.leader_of(group)
        why = f"{cause} {SEE_TASK_OUTPUT}"
        if not self.return_timeout_s:
            raise peer_lost(str(task), "training", why) from cause
        other = ", or for its copy" if self._is_replicated else ""
        logger.warning("%s is lost; waiting up to %g s for it to return%s.", task, self.return_timeout_s, other)
        until = time.monotonic() + self.return_timeout_s
        # A lost server may have led several groups. All of them must know this worker's position before it waits for
        # one: the other workers may be waiting for it there.
        lost = {group, *hanging, *self._broken()}

        def check(waited_s: float) -> None:
            del waited_s
            if more := self._broken() - lost:
                lost.update(more)
                raise LinkClosedError("more connections are broken.")

        while lost:
            try:
                remaining = {each: self._rejoin(self.connections[each], until) for each in sorted(lost)}
                # All of them know this worker's position now. The following requests may wait for other workers.
                for each, requests in remaining.items():
                    connection = self.connections[each]
                    self._request_all(connection, requests, check)
                    if connection.pending:
                        self._send(connection, connection.pending)
                    lost.discard(each)
            except LinkClosedError as error:  # the server was killed again, or another one too
                if time.monotonic() > until:
                    raise peer_lost(str(task), "training", why) from error
            except RendezvousError as error:
                raise peer_lost(
                    str(task), f"training; it did not return within {self.return_timeout_s:g} s", why
                ) from error
        logger.warning("%s is back.", self.leader_of(group))

    def _rejoin(self, connection: ServerConnection, until: float) -> Sequence[RequestArrays]:
        """Replace the link and report this worker's position. Returns the other requests to repeat."""
        connection.close_channel()  # the next `fit` offers new memory
        if self.grants is not None:  # a second leader begins only after the first one has ended
            self.grants.wait_until_over(connection.group)
        # The new link comes first, so that a live server does not count this worker as lost meanwhile.
        previous = connection.link
        connection.link, connection.leader, connection.host = self._connect(connection.group, until)
        previous.close()
        if self.grants is not None:
            self.grants.begin(connection.group, self.leader_of(connection.group))
        requests = self.rejoin_requests(connection.group) if self.rejoin_requests else ()
        self._request_all(connection, requests[:1])
        return requests[1:]

    def _request_all(
        self,
        connection: ServerConnection,
        requests: Sequence[RequestArrays],
        check: Callable[[float], None] | None = None,
    ) -> None:
        for request in requests:
            self._send(connection, request)
            response, _ = self._receive(connection, check)
            if isinstance(response, Refusal):
                raise refusal_error(response, str(self.leader_of(connection.group)))


def refusal_error(response: Refusal, server: str) -> PhalanxError:
    """The error in a server's refusal."""
    if response.kind == PeerLostError.__name__:
        return PeerLostError(response.reason, rank=response.rank, task=response.task or server, host="")
    kind: type[PhalanxError] = getattr(errors, response.kind, PhalanxError)
    return kind(response.reason)
