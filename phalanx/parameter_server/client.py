"""A worker's side: one link to each server, and questions to one or all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx import errors
from phalanx.cluster.admission import DISAGREEMENT
from phalanx.cluster.agreement import Statement
from phalanx.cluster.dialling import ATTEMPT_TIMEOUT_S, HANDSHAKE_FAILURES_S
from phalanx.cluster.roll_call import Identity
from phalanx.cluster.spec import PS
from phalanx.collectives.segment import Offer
from phalanx.errors import (
    DisagreementError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    PeerLostError,
    PhalanxError,
    RendezvousError,
)
from phalanx.parameter_server.lanes import TO_SERVER, Lanes, place_bytes
from phalanx.parameter_server.messages import (
    Answer,
    Bye,
    Done,
    Push,
    Question,
    Refusal,
    Share,
    Sharing,
    Values,
)
from phalanx.parameter_server.placement import Shard, Variable, rows, shard_shape
from phalanx.parameter_server.schedule import lost
from phalanx.parameter_server.server import PURPOSE
from phalanx.transport.dial import RefusedError, retry_delay_s
from phalanx.transport.link import Link

Array = np.ndarray[Any, Any]

HEAD = 0
"""The first server, which also keeps the schedule."""
GOODBYE_S = 5.0
"""For taking leave: a server that is busy is not waited for longer."""

_ANSWERS = msgspec.msgpack.Decoder(Answer)
_encode = msgspec.msgpack.Encoder().encode


class Client:
    """The links of one worker to all servers. One thread at a time may ask.

    Making one waits until all servers are there.

    Attributes:
        starting: whether an answer may have to wait for tasks that are only starting.

    Raises:
        RendezvousError: a server did not come in time.
        DisagreementError: a server and this task differ in what must be equal.
    """

    def __init__(self, me: Identity):
        self._me = me
        self.starting = True
        self.tasks = tuple(task for task in me.spec.tasks if task.type == PS)
        deadline = time.monotonic() + me.settings.rendezvous_timeout_s
        self._links: list[Link] = []
        self._hosts: list[str] = []
        self._lanes: dict[int, Lanes] = {}
        try:
            for task in self.tasks:
                link, host = _connect(me, task, deadline)
                self._links.append(link)
                self._hosts.append(host)
        except BaseException:
            self.hang_up()
            raise

    @property
    def servers(self) -> int:
        return len(self.tasks)

    def ask(self, server: int, question: Question, buffers: Sequence[Array] = ()) -> tuple[Answer, list[memoryview]]:
        """One question to one server.

        Raises: PeerLostError if the server is gone; what the server refused with.
        """
        self.send(server, question, buffers)
        return self.receive(server)

    def send(self, server: int, question: Question, buffers: Sequence[Array] = ()) -> None:
        """Ask without waiting for the answer, which `receive` must fetch before the next question to this server."""
        lanes = self._lanes.get(server)
        if lanes is not None and isinstance(question, Push):
            lengths = lanes.write(TO_SERVER, buffers)
            if lengths:
                question, buffers = msgspec.structs.replace(question, lengths=lengths), ()
        try:
            self._links[server].send(
                _encode(question),
                [np.ascontiguousarray(buffer) for buffer in buffers],
                deadline=time.monotonic() + self._me.settings.timeout_s,
            )
        except LinkClosedError as error:
            raise lost(str(self.tasks[server]), type(question).__name__.lower()) from error

    def receive(self, server: int) -> tuple[Answer, list[memoryview]]:
        # More than the time after which the servers themselves give up on somebody, and say whom.
        settings = self._me.settings
        patience_s = max(settings.timeout_s, settings.rendezvous_timeout_s) if self.starting else settings.timeout_s
        deadline = time.monotonic() + settings.timeout_s + patience_s
        try:
            header, buffers = self._links[server].receive(deadline=deadline)
        except LinkClosedError as error:
            raise lost(str(self.tasks[server]), "training") from error
        answer = _ANSWERS.decode(header)
        if isinstance(answer, Refusal):
            raise _refused(answer, str(self.tasks[server]))
        if isinstance(answer, Values) and answer.lengths:
            return answer, self._lanes[server].read(answer.place, answer.lengths)
        return answer, buffers

    def share_memory(self, server: int, lengths: Sequence[int]) -> None:
        """Let gradients and values of these lengths in bytes pass through memory, if the server is on this host. Values
        that come so are overwritten by those that come after the next ones."""
        need = place_bytes(lengths)
        lanes = self._lanes.get(server)
        if self._hosts[server] != self._me.statement.host or (lanes is not None and lanes.place_bytes >= need):
            return

        def accepts(offer: Offer) -> bool:
            answer, _ = self.ask(server, Share(offer))
            assert isinstance(answer, Sharing)
            return answer.accepted

        made = Lanes.offer(need, accepts)
        if made is not None:
            self._lanes[server] = made

    def ask_all(self, questions: Sequence[tuple[Question, Sequence[Array]]]) -> list[tuple[Answer, list[memoryview]]]:
        """A question to each server, all at once."""
        for server, (question, buffers) in enumerate(questions):
            self.send(server, question, buffers)
        return [self.receive(server) for server in range(self.servers)]

    def close(self) -> None:
        """Take leave of all servers; safe to call twice."""
        for link in self._links:
            try:
                deadline = time.monotonic() + GOODBYE_S
                link.send(_encode(Bye()), deadline=deadline)
                # Answers to what an error kept us from waiting for come before.
                while not isinstance(_ANSWERS.decode(link.receive(deadline=deadline)[0]), Done):
                    continue
            except (LinkClosedError, LinkTimeoutError):
                continue  # it is gone; so are we
        self.hang_up()

    def hang_up(self) -> None:
        """Leave without a goodbye: the servers will miss this worker. Safe to call twice."""
        for link in self._links:
            link.close()
        for lanes in self._lanes.values():
            lanes.close()
        self._links, self._lanes = [], {}


def _refused(answer: Refusal, server: str) -> PhalanxError:
    """The error that a server has named."""
    if answer.kind == PeerLostError.__name__:
        return PeerLostError(answer.reason, rank=0, task=server, host="")
    kind: type[PhalanxError] = getattr(errors, answer.kind, PhalanxError)
    return kind(answer.reason)


def _connect(me: Identity, task: Any, deadline: float) -> tuple[Link, str]:
    """A link to a server, and the identity of its host."""
    started_at = time.monotonic()
    failing_since: float | None = None
    details = msgspec.msgpack.encode(me.statement)
    while True:
        now = time.monotonic()
        failure: PhalanxError
        try:
            link, welcome = me.dial(task, PURPOSE, details, deadline=now + ATTEMPT_TIMEOUT_S)
            return link, msgspec.msgpack.decode(welcome.details, type=Statement).host
        except (LinkClosedError, LinkTimeoutError) as error:
            failing_since, failure = None, error
        except RefusedError as error:
            if error.welcome.refusal == DISAGREEMENT:
                raise DisagreementError(error.welcome.reason) from error
            failing_since, failure = failing_since or now, error
        except HandshakeError as error:
            failing_since, failure = failing_since or now, error
        if failing_since is not None and now - failing_since > HANDSHAKE_FAILURES_S:
            raise failure
        if now > deadline:
            raise RendezvousError(
                f"{task} did not come to the job in time ({failure}). Start it with the same cluster."
            )
        time.sleep(retry_delay_s(now - started_at))


class Placed:
    """The variables of a model on the servers: cuts arrays for the way there, and joins those that come back."""

    def __init__(self, variables: Sequence[Variable], shards: Sequence[Shard], servers: int):
        self.variables = tuple(variables)
        self.shards = tuple(shards)
        self.of_server = [tuple(s for s in shards if s.server == server) for server in range(servers)]
        self._pieces = [[s for s in shards if s.variable == index] for index in range(len(variables))]

    def cut(self, arrays: Sequence[Array], server: int) -> list[Array]:
        """The parts of the variables' arrays that are this server's, in its order."""
        return [rows(arrays[shard.variable], shard) for shard in self.of_server[server]]

    def lengths(self, shards: Sequence[Shard]) -> list[int]:
        """Of the shards, in bytes."""
        return [
            math.prod(shard_shape(self.variables[s.variable], s)) * np.dtype(self.variables[s.variable].dtype).itemsize
            for s in shards
        ]

    def join(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """The variables' arrays from the parts of all servers."""
        by_shard = {
            shard: array
            for shards, arrays in zip(self.of_server, parts, strict=True)
            for shard, array in zip(shards, arrays, strict=True)
        }
        return [
            by_shard[pieces[0]] if len(pieces) == 1 else np.concatenate([by_shard[piece] for piece in pieces])
            for pieces in self._pieces
        ]

    def shaped(self, server: int, arrays: Sequence[Array]) -> list[Array]:
        """A server's flat arrays in the shapes of its shards; none, if it sent none."""
        return [
            array.reshape(shard_shape(self.variables[s.variable], s))
            for s, array in zip(self.of_server[server], arrays, strict=False)
        ]
