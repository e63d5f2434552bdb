"""A worker's side: one link to each server, and questions to one or all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx import errors
from phalanx.cluster.admission import DISAGREEMENT
from phalanx.cluster.dialling import ATTEMPT_TIMEOUT_S, HANDSHAKE_FAILURES_S
from phalanx.cluster.roll_call import Identity
from phalanx.cluster.spec import PS
from phalanx.errors import (
    DisagreementError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    PeerLostError,
    PhalanxError,
    RendezvousError,
)
from phalanx.parameter_server.messages import Answer, Bye, Done, Question, Refusal
from phalanx.parameter_server.placement import Shard, Variable, rows, shard_shape
from phalanx.parameter_server.rows import Rows, cut
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
        bytes_sent, bytes_received: of all messages until now.

    Raises:
        RendezvousError: a server did not come in time.
        DisagreementError: a server and this task differ in what must be equal.
    """

    def __init__(self, me: Identity):
        self._me = me
        self.starting = True
        self.bytes_sent = self.bytes_received = 0
        self.tasks = tuple(task for task in me.spec.tasks if task.type == PS)
        deadline = time.monotonic() + me.settings.rendezvous_timeout_s
        self._links: list[Link] = []
        try:
            for task in self.tasks:
                self._links.append(_connect(me, task, deadline))
        except BaseException:
            self._close()
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
        header, arrays = _encode(question), [np.ascontiguousarray(buffer) for buffer in buffers]
        self.bytes_sent += len(header) + sum(array.nbytes for array in arrays)
        try:
            self._links[server].send(
                header,
                arrays,
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
        self.bytes_received += len(header) + sum(buffer.nbytes for buffer in buffers)
        answer = _ANSWERS.decode(header)
        if isinstance(answer, Refusal):
            raise _refused(answer, str(self.tasks[server]))
        return answer, buffers

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
        self._close()

    def _close(self) -> None:
        for link in self._links:
            link.close()
        self._links = []


def _refused(answer: Refusal, server: str) -> PhalanxError:
    """The error that a server has named."""
    if answer.kind == PeerLostError.__name__:
        return PeerLostError(answer.reason, rank=0, task=server, host="")
    kind: type[PhalanxError] = getattr(errors, answer.kind, PhalanxError)
    return kind(answer.reason)


def _connect(me: Identity, task: Any, deadline: float) -> Link:
    started_at = time.monotonic()
    failing_since: float | None = None
    details = msgspec.msgpack.encode(me.statement)
    while True:
        now = time.monotonic()
        failure: PhalanxError
        try:
            link, _ = me.dial(task, PURPOSE, details, deadline=now + ATTEMPT_TIMEOUT_S)
            return link
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
    """The variables of a model on the servers: cuts arrays for the way there, and joins those that come back.

    Args:
        tables: numbers of the variables of which single rows travel.
    """

    def __init__(
        self, variables: Sequence[Variable], shards: Sequence[Shard], servers: int, tables: Sequence[int] = ()
    ):
        self.variables = tuple(variables)
        self.shards = tuple(shards)
        self.tables = tuple(tables)
        self.of_server = [tuple(s for s in shards if s.server == server) for server in range(servers)]
        self.dense_of_server = [tuple(s for s in own if s.variable not in tables) for own in self.of_server]
        self.tables_of_server = [tuple(s for s in own if s.variable in tables) for own in self.of_server]
        self._pieces = [[s for s in shards if s.variable == index] for index in range(len(variables))]

    def cut(self, arrays: Sequence[Array | Rows | None], server: int) -> list[Array]:
        """The parts of the variables' arrays that are this server's, in its order; of `Rows` their numbers and their
        values, of None nothing."""
        parts: list[Array] = []
        for shard in self.of_server[server]:
            whole = arrays[shard.variable]
            if isinstance(whole, Rows):
                parts += cut(whole, shard)
            elif whole is not None:
                parts.append(rows(whole, shard))
        return parts

    def join(self, parts: Sequence[Sequence[Array]]) -> list[Array | None]:
        """The variables' arrays from the parts of all servers; None for tables."""
        by_shard = _by_shard(self.dense_of_server, parts)
        return [
            None if index in self.tables else _joined([by_shard[piece] for piece in pieces])
            for index, pieces in enumerate(self._pieces)
        ]

    def join_tables(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """For each table the rows that the servers sent, or all of them; the parts may be flat."""
        by_shard = _by_shard(self.tables_of_server, parts)
        return [
            _joined([by_shard[piece].reshape(-1, *self.variables[table].shape[1:]) for piece in self._pieces[table]])
            for table in self.tables
        ]

    def shaped(self, server: int, arrays: Sequence[Array]) -> list[Array]:
        """A server's flat arrays in the shapes of its shards, tables excepted; none, if it sent none."""
        return [
            array.reshape(shard_shape(self.variables[s.variable], s))
            for s, array in zip(self.dense_of_server[server], arrays, strict=False)
        ]


def _by_shard(of_server: Sequence[Sequence[Shard]], parts: Sequence[Sequence[Array]]) -> dict[Shard, Array]:
    return {
        shard: array
        for shards, arrays in zip(of_server, parts, strict=True)
        for shard, array in zip(shards, arrays, strict=True)
    }


def _joined(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
