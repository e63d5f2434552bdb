"""A worker's side: one link to each server, and questions to one or all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from phalanx import errors
from phalanx.arrays import allocation
from phalanx.cluster.admission import DISAGREEMENT, PROBE
from phalanx.cluster.compatibility import TaskDescription
from phalanx.cluster.membership import SEE_TASK_OUTPUT
from phalanx.cluster.peer_dialing import ATTEMPT_TIMEOUT_S, HANDSHAKE_FAILURES_S
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.cluster.spec import PS, Task
from phalanx.collectives.host.shared_segment import SegmentOffer
from phalanx.errors import (
    DisagreementError,
    EvictedError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    PeerLostError,
    PhalanxError,
    RendezvousError,
)
from phalanx.parameter_server.server.connected_workers import CHIEF, lost
from phalanx.parameter_server.server.shard_group import LEAD, NOT_LEADING, NOTICE_AFTER_S, PURPOSE
from phalanx.parameter_server.server_messages import (
    Acknowledged,
    FitOver,
    LeaveJob,
    OfferSharedMemory,
    PushGradients,
    QueryJobOver,
    Refusal,
    Request,
    Response,
    SharedMemoryMapped,
    Values,
)
from phalanx.parameter_server.shard_packing import Kind, ShardPacking, nbytes_of
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard, rows, shard_shape
from phalanx.parameter_server.shared_memory_channel import SharedMemoryChannel, place_bytes
from phalanx.parameter_server.table_rows import TableRows, cut
from phalanx.transport.dial import RefusedError, retry_delay_s
from phalanx.transport.handshake import Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Asked = tuple[Request, Sequence[Array]]

HEAD = 0
"""The first server, which also keeps the schedule."""
PREFER_COPY_S = 3.0
"""How long a worker that has lost a leader asks the copy alone: the port of a dead process may still be open."""
CALL_S = 1.0
"""For one attempt then."""
LOOK_S = 0.5
"""Between two looks, while one server's answer is waited for, at whether the links to the others still stand."""
ROOMS = 2
"""Memory for what goes to a server that shares none is kept for so many kinds of contents: steps that ask for something
before they push take turns."""
GOODBYE_S = 5.0
"""For taking leave: a server that is busy is not waited for longer."""

_ANSWERS = msgspec.msgpack.Decoder(Response)
_encode = msgspec.msgpack.Encoder().encode


class ParameterServerClient:
    """The links of one worker to all servers. One thread at a time may ask.

    Making one waits until all servers are there. A link that breaks later is made again, if the server may come back,
    and the question that was not answered is repeated: servers answer the same question twice alike.

    Args:
        return_s: how long to wait for a server that was lost; 0: not at all.
        copied: whether each server's shards have a copy on the next one, which may take its place.

    Attributes:
        starting: whether an answer may have to wait for tasks that are only starting.
        without: tasks that do not answer any more, which the servers need not wait for when this one, the chief, ends.
        rejoin_requests: what to tell a server, given its number, that comes back in the middle of a `fit`; else None.
        bytes_sent, bytes_received: of all messages until now, those through shared memory included.

    Raises:
        RendezvousError: a server did not come in time.
        DisagreementError: a server and this task differ in what must be equal.
    """

    def __init__(self, me: TaskIdentity, return_s: float = 0.0, *, copied: bool = False):
        self._me = me
        self.return_s = return_s
        self._copied = copied
        self.is_starting = True
        self.unreachable_tasks: set[str] = set()
        self.rejoin_requests: Callable[[int], Sequence[Asked]] | None = None
        self.bytes_sent = self.bytes_received = 0
        self.tasks = tuple(task for task in me.spec.tasks if task.type == PS)
        deadline = time.monotonic() + me.config.rendezvous_timeout_s
        self._links: list[Link] = []
        self._unanswered: list[Asked | None] = [None] * len(self.tasks)
        self._leaders = list(range(len(self.tasks)))  # of each group, by number of the server
        self._alone = [False] * len(self.tasks)  # whether the group's copy cannot take over
        self._probe_s = me.config.timeout_s / 4
        self._probed_at = 0.0
        self._left_out = False  # whether the servers go on without this process
        self._hosts = [""] * len(self.tasks)
        self._lanes: dict[int, SharedMemoryChannel] = {}
        self._rooms: dict[int, dict[tuple[Kind, ...], list[Array]]] = {}
        try:
            for group in range(len(self.tasks)):
                self._links.append(self._connect(group, deadline))
        except BaseException:
            self.disconnect()
            raise

    @property
    def identity(self) -> TaskIdentity:
        """Who this process is in the cluster."""
        return self._me

    @property
    def timeout_s(self) -> float:
        """After which servers leave a worker out that makes no progress."""
        return self._me.config.timeout_s

    @property
    def is_replicated(self) -> bool:
        """Whether each server's shards have a copy on the next one."""
        return self._copied

    @property
    def num_servers(self) -> int:
        return len(self.tasks)

    def request(
        self, server: int, question: Request, buffers: Sequence[Array] = ()
    ) -> tuple[Response, list[memoryview]]:
        """One question to one server.

        Raises: PeerLostError if the server is gone; what the server refused with.
        """
        self.send(server, question, buffers)
        return self.receive(server)

    def send_buffers(self, server: int, kinds: tuple[Kind, ...]) -> list[Array]:
        """Arrays of these kinds, to be filled with what the next `Push` to a server carries; what is not filled is zero
        or as it was. They must then stay as they are until that has been answered."""
        lanes = self._lanes.get(server)
        shared = lanes.room(kinds) if lanes is not None else None
        if shared is not None:
            return shared
        own = self._rooms.setdefault(server, {})
        if kinds not in own:
            if len(own) >= ROOMS:
                own.clear()
            own[kinds] = [allocation.zeros_aligned(shape, dtype) for shape, dtype in kinds]
        return own[kinds]

    def send(self, server: int, question: Request, buffers: Sequence[Array] = ()) -> None:
        """Ask without waiting for the answer, which `receive` must fetch before the next question to this server. The
        buffers must stay as they are until then."""
        if self._unanswered[server] is not None:
            # An error kept us from its answer, which would be taken for the next one.
            self._links[server].close()
        self._unanswered[server] = (question, buffers)
        try:
            self._send(server, question, buffers)
        except (LinkClosedError, LinkTimeoutError) as error:
            self._return(server, self._as_closed(error))

    def receive(self, server: int) -> tuple[Response, list[memoryview]]:
        """The answer to what was sent to a server. Raises: as `ask`."""
        return self._accepted(server, self._await(server))

    def receive_all(
        self,
        servers: Sequence[int] | None = None,
        on_response: Callable[[int, Response], None] = lambda server, answer: None,
    ) -> list[tuple[Response, list[memoryview]]]:
        """The answers of these servers, or all, to what was sent to each of them.

        Args:
            came: is told each answer as soon as it is there: another server may be lost before it has answered.

        Raises: as `ask`, once all answers are here: one that is left unread would be taken for that to the next
            question.
        """
        asked = range(self.num_servers) if servers is None else servers
        answers = []
        for server in asked:
            answers.append(self._await(server))
            on_response(server, answers[-1][0])
        return [self._accepted(server, answer) for server, answer in zip(asked, answers, strict=True)]

    def _await(self, server: int) -> tuple[Response, list[memoryview]]:
        while True:
            try:
                answer = self._receive(server, self._mend_others if self.return_s else None)
                break
            except (LinkClosedError, LinkTimeoutError) as error:
                self._return(server, self._as_closed(error))
        self._unanswered[server] = None
        return answer

    def _as_closed(self, error: LinkClosedError | LinkTimeoutError) -> LinkClosedError:
        """A server that hangs, or the way to it: its copy is as good, and once that leads this one is refused."""
        if isinstance(error, LinkClosedError):
            return error
        if not (self._copied and self.return_s):
            raise error
        return LinkClosedError(str(error))

    def _mend_others(self, waited_s: float) -> None:
        """Make broken links anew: who is waited for at one server may wait for this worker at another. After a while
        also those to servers that hang, before one that does not leaves this worker out."""
        while broken := self._broken():
            group = min(broken)
            self._return(group, LinkClosedError(f"the connection to {self._links[group].peer} is broken."))
        if self._copied and waited_s > self._probe_s and (hanging := self._hanging()):
            server = min(hanging)
            self._return(server, LinkClosedError(f"{self.tasks[self._leaders[server]]} hangs."), hanging)

    def _hanging(self) -> set[int]:
        """The groups that owe an answer and whose leader's process does nothing; looks not too often."""
        if time.monotonic() - self._probed_at < self._probe_s:
            return set()
        self._probed_at = time.monotonic()
        owing = {group for group, question in enumerate(self._unanswered) if question is not None}
        leaders = {self._leaders[group] for group in owing}
        silent = {leader for leader in leaders if not self._lives(self.tasks[leader])}
        return {group for group in owing if self._leaders[group] in silent}

    def _lives(self, server: Task) -> bool:
        try:
            link, _ = self._me.dial(server, PROBE, deadline=time.monotonic() + self._probe_s)
        except LinkTimeoutError:
            return False
        except PhalanxError:
            return True  # something answers, or its link is about to break
        link.close()
        return True

    def _broken(self) -> set[int]:
        """The groups whose leader has closed its link."""
        return {group for group, link in enumerate(self._links) if link.peer_closed()}

    def _accepted(self, server: int, answer: tuple[Response, list[memoryview]]) -> tuple[Response, list[memoryview]]:
        if isinstance(answer[0], Refusal):
            error = _refused(answer[0], str(self.tasks[self._leaders[server]]))
            self._left_out |= isinstance(error, EvictedError)
            raise error
        return answer

    def _send(self, server: int, question: Request, buffers: Sequence[Array]) -> None:
        lanes = self._lanes.get(server)
        if lanes is not None and isinstance(question, PushGradients) and (lengths := lanes.lengths_of(buffers)):
            question, buffers = msgspec.structs.replace(question, lengths=lengths), ()
            self.bytes_sent += sum(lengths)
        header, arrays = _encode(question), [np.ascontiguousarray(buffer) for buffer in buffers]
        self.bytes_sent += len(header) + sum(array.nbytes for array in arrays)
        # Where a copy can take over, before other servers leave this worker out for what this one keeps it from.
        patience_s = self._me.config.timeout_s / (2 if self._copied else 1)
        self._links[server].send(header, arrays, deadline=time.monotonic() + patience_s)

    def _receive(self, server: int, look: Callable[[float], None] | None = None) -> tuple[Response, list[memoryview]]:
        """The next message of a server. `look` is told from time to time for how long it was waited for."""
        # More than the time after which the servers themselves give up on somebody, and say whom.
        config = self._me.config
        patience_s = max(config.timeout_s, config.rendezvous_timeout_s) if self.is_starting else config.timeout_s
        asked = time.monotonic()
        deadline = asked + config.timeout_s + patience_s
        while True:
            until = min(deadline, time.monotonic() + LOOK_S) if look else deadline
            try:
                header, buffers = self._links[server].receive(deadline=until)
                break
            except LinkTimeoutError:
                if look is None or until == deadline:
                    raise
                look(time.monotonic() - asked)
        self.bytes_received += len(header) + sum(buffer.nbytes for buffer in buffers)
        answer = _ANSWERS.decode(header)
        if isinstance(answer, Values):
            question = self._unanswered[server]
            if question is not None and isinstance(question[0], PushGradients):
                self._alone[server] = answer.is_unreplicated
            if answer.lengths:
                self.bytes_received += sum(answer.lengths)
                return answer, self._lanes[server].read(answer.place, answer.lengths)
        return answer, buffers

    def share_memory(self, server: int, kinds: Sequence[Kind]) -> None:
        """Let gradients and values of these kinds pass through memory, if the server is on this host. Values that come
        so are overwritten by those that come after the next ones."""
        need = place_bytes([nbytes_of(kind) for kind in kinds])
        lanes = self._lanes.get(server)
        if self._hosts[server] != self._me.description.host or (lanes is not None and lanes.place_bytes >= need):
            return

        def accepts(offer: SegmentOffer) -> bool:
            answer, _ = self.request(server, OfferSharedMemory(offer))
            assert isinstance(answer, SharedMemoryMapped)
            return answer.accepted

        made = SharedMemoryChannel.offer(need, accepts)
        if made is not None:
            self._lanes[server] = made

    def _return(self, server: int, cause: LinkClosedError, hanging: Collection[int] = ()) -> None:
        """Wait until a server is back, tell it where this worker is, and repeat what it has not answered; so for others
        that hang."""
        task = self.tasks[self._leaders[server]]
        why = f"{cause} {SEE_TASK_OUTPUT}"
        if not self.return_s:
            raise lost(str(task), "training", why) from cause
        other = ", or for its copy" if self._copied else ""
        logger.warning("%s is gone; waiting up to %g s for it to come back%s.", task, self.return_s, other)
        until = time.monotonic() + self.return_s
        # A server that was lost may have led several groups. All must hear of this worker before one is waited for: the
        # others may wait for this one there.
        away = {server, *hanging, *self._broken()}

        def look(waited_s: float) -> None:
            del waited_s
            if more := self._broken() - away:
                away.update(more)
                raise LinkClosedError("more connections are broken.")

        while away:
            try:
                told = {group: self._rejoin(group, until) for group in sorted(away)}
                for group, more in told.items():
                    self._repeat(group, more, look)
                    away.discard(group)
            except LinkClosedError as error:  # killed once more, or another one too
                if time.monotonic() > until:
                    raise lost(str(task), "training", why) from error
            except RendezvousError as error:
                raise lost(str(task), f"training; it did not come back within {self.return_s:g} s", why) from error
        logger.warning("%s is back.", self.tasks[self._leaders[server]])

    def _rejoin(self, group: int, until: float) -> Sequence[Asked]:
        """Make the link again and say where this worker is; returns what else there is to tell."""
        if lanes := self._lanes.pop(group, None):  # the next `fit` makes others
            lanes.close()
        # The new one is there first, so that a server that lives does not take this worker for gone meanwhile.
        former, self._links[group] = self._links[group], self._connect(group, until, again=True)
        former.close()
        told = self.rejoin_requests(group) if self.rejoin_requests else ()
        self._tell(group, told[:1])
        return told[1:]

    def _repeat(self, group: int, more: Sequence[Asked], look: Callable[[float], None]) -> None:
        self._tell(group, more, look)
        if unanswered := self._unanswered[group]:
            self._send(group, *unanswered)

    def _tell(self, group: int, told: Sequence[Asked], look: Callable[[float], None] | None = None) -> None:
        for question, buffers in told:
            self._send(group, question, buffers)
            answer, _ = self._receive(group, look)
            if isinstance(answer, Refusal):
                raise _refused(answer, str(self.tasks[self._leaders[group]]))

    def _connect(self, group: int, deadline: float, *, again: bool = False) -> Link:
        """A link to the server that leads a group: its own, or the one with the copy."""

        def places(waited_s: float) -> list[tuple[Task, str]]:
            found = self._candidates(group, waited_s, again=again)
            return [(self.tasks[server], f"{purpose}/{group}") for server, purpose in found]

        attempt_s = CALL_S if again and self._copied else ATTEMPT_TIMEOUT_S
        link, welcome, task = connect_one(self._me, places, deadline, attempt_s=attempt_s)
        self._leaders[group] = self.tasks.index(task)
        self._hosts[group] = msgspec.msgpack.decode(welcome.details, type=TaskDescription).host
        return link

    def _candidates(self, group: int, waited_s: float, *, again: bool) -> list[tuple[int, str]]:
        """The servers to dial, and what for."""
        leader = self._leaders[group]
        if not self._copied:
            return [(leader, PURPOSE)]
        other = (group + 1) % len(self.tasks) if leader == group else group
        if not again:
            return [(leader, PURPOSE), (other, PURPOSE)]
        # The chief alone may say who leads. The others ask the copy until it has.
        calls = self._me.rank == CHIEF and not self._alone[group]
        to_other = (other, LEAD if calls else PURPOSE)
        return [to_other] if waited_s < PREFER_COPY_S and not self._alone[group] else [to_other, (leader, PURPOSE)]

    def request_all(
        self, questions: Sequence[tuple[Request, Sequence[Array]]]
    ) -> list[tuple[Response, list[memoryview]]]:
        """A question to each server, all at once."""
        for server, (question, buffers) in enumerate(questions):
            self.send(server, question, buffers)
        return self.receive_all()

    def is_job_over(self) -> bool:
        """Whether the chief has said goodbye."""
        return isinstance(self.request(HEAD, QueryJobOver())[0], FitOver)

    def close(self, failure: str = "") -> None:
        """Take leave of all servers, but as one who was left out: another process may take that place. Safe to call
        twice.

        Args:
            failure: the error because of which this worker ends, if there is one, in a line.
        """
        if self._left_out:
            self.disconnect()
            return
        bye = LeaveJob(failure, tuple(sorted(self.unreachable_tasks)))
        for link in self._links:
            try:
                deadline = time.monotonic() + GOODBYE_S
                link.send(_encode(bye), deadline=deadline)
                # Answers to what an error kept us from waiting for come before.
                while not isinstance(_ANSWERS.decode(link.receive(deadline=deadline)[0]), Acknowledged):
                    continue
            except (LinkClosedError, LinkTimeoutError):
                continue  # it is gone; so are we
        self.disconnect()

    def disconnect(self) -> None:
        """Leave without a goodbye: the servers will miss this worker. Safe to call twice."""
        for link in self._links:
            link.close()
        for lanes in self._lanes.values():
            lanes.close()
        self._links, self._lanes = [], {}


def _refused(answer: Refusal, server: str) -> PhalanxError:
    """The error that a server has named."""
    if answer.kind == PeerLostError.__name__:
        return PeerLostError(answer.reason, rank=answer.rank, task=answer.task or server, host="")
    kind: type[PhalanxError] = getattr(errors, answer.kind, PhalanxError)
    return kind(answer.reason)


def connect(
    me: TaskIdentity, task: Task, purpose: str, deadline: float, check: Callable[[], None] = lambda: None
) -> Link:
    """A link to a task for a purpose; tries until it is there. Arguments and errors as for `connect_one`."""
    return connect_one(me, lambda waited_s: [(task, purpose)], deadline, check=check)[0]


def connect_one(
    me: TaskIdentity,
    places: Callable[[float], Sequence[tuple[Task, str]]],
    deadline: float,
    *,
    attempt_s: float = ATTEMPT_TIMEOUT_S,
    check: Callable[[], None] = lambda: None,
) -> tuple[Link, Welcome, Task]:
    """A link to the first of some tasks that takes it, its answer, and which it is; tries until there is one.

    Args:
        places: the tasks and what for, given how many seconds were waited so far.
        deadline: a value of `time.monotonic()`.
        attempt_s: for one attempt.
        check: called between two rounds; what it raises ends them.

    Raises:
        RendezvousError: none came in time.
        DisagreementError: one and this task differ in what must be equal.
        HandshakeError: what is at an address is none of ours, or refuses for good.
    """
    started_at = time.monotonic()
    failing_since: float | None = None
    noticed = deadline - started_at < NOTICE_AFTER_S
    details = msgspec.msgpack.encode(me.description)
    while True:
        failure: PhalanxError | None = None
        for task, purpose in places(time.monotonic() - started_at):
            now = time.monotonic()
            try:
                return *me.dial(task, purpose, details, deadline=now + attempt_s), task
            except (LinkClosedError, LinkTimeoutError) as error:
                failing_since, failure = None, error
            except RefusedError as error:
                if error.welcome.refusal == DISAGREEMENT:
                    raise DisagreementError(error.welcome.reason) from error
                failing_since = None if error.welcome.refusal == NOT_LEADING else failing_since or now
                failure = error
            except HandshakeError as error:
                failing_since, failure = failing_since or now, error
        now = time.monotonic()
        if failure is not None and failing_since is not None and now - failing_since > HANDSHAKE_FAILURES_S:
            raise failure
        if now > deadline:
            task, _ = places(0.0)[0]
            raise RendezvousError(
                f"{task} did not come to the job in time ({failure}). Start it with the same cluster."
            )
        if not noticed and now - started_at > NOTICE_AFTER_S:
            noticed = True
            task, _ = places(0.0)[0]
            logger.warning("%s waits, for up to %.0f s, for %s: %s", me.task, deadline - now, task, failure)
        check()
        time.sleep(retry_delay_s(now - started_at))


class PlacedVariables:
    """The variables of a model on the servers: cuts arrays for the way there, and joins those that come back.

    Args:
        tables: numbers of the variables of which single rows travel.
        groups: of each server's shards; none: each travels by itself.
    """

    def __init__(
        self,
        variables: Sequence[PlacedVariable],
        shards: Sequence[Shard],
        servers: int,
        tables: Sequence[int] = (),
        groups: Sequence[Sequence[tuple[int, ...]]] = (),
    ):
        self.variables = tuple(variables)
        self.shards = tuple(shards)
        self.tables = tuple(tables)
        self.of_server = [tuple(s for s in shards if s.server == server) for server in range(servers)]
        self.dense_of_server = [tuple(s for s in own if s.variable not in tables) for own in self.of_server]
        self.tables_of_server = [tuple(s for s in own if s.variable in tables) for own in self.of_server]
        self.groups = [self._grouped(*each) for each in zip_longest(self.of_server, groups)]
        self._dense = _places(self.dense_of_server, len(variables))
        self._rows = _places(self.tables_of_server, len(variables))

    def _grouped(self, own: Sequence[Shard], groups: Sequence[tuple[int, ...]] | None) -> ShardPacking:
        kinds = [self.kind(shard) for shard in own]
        tables = [number for number, shard in enumerate(own) if shard.variable in self.tables]
        apart = [(n,) for n in range(len(own)) if n not in tables]
        return ShardPacking(kinds, apart if groups is None else groups, tables)

    def kind(self, shard: Shard) -> Kind:
        variable = self.variables[shard.variable]
        return shard_shape(variable, shard), np.dtype(variable.dtype)

    def cut(self, arrays: Sequence[Array | None], server: int) -> list[Array]:
        """The parts of the variables' arrays that are this server's, in its order; of None nothing."""
        parts = [(arrays[shard.variable], shard) for shard in self.of_server[server]]
        return [rows(whole, shard) for whole, shard in parts if whole is not None]

    def cut_tables(self, arrays: Sequence[Array | TableRows], server: int) -> list[TableRows]:
        """Of the tables' rows those that are this server's."""
        parts = []
        for shard in self.tables_of_server[server]:
            whole = arrays[shard.variable]
            assert isinstance(whole, TableRows)
            parts.append(cut(whole, shard))
        return parts

    def join(self, parts: Sequence[Sequence[Array]]) -> list[Array | None]:
        """The variables' arrays from the parts of all servers; None for tables."""
        return [_joined([parts[server][n] for server, n in places]) if places else None for places in self._dense]

    def join_tables(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """For each table the rows that the servers sent, or all of them; the parts may be flat."""
        return [
            _joined([parts[server][n].reshape(-1, *self.variables[table].shape[1:]) for server, n in self._rows[table]])
            for table in self.tables
        ]


def _places(of_server: Sequence[Sequence[Shard]], variables: int) -> list[list[tuple[int, int]]]:
    """Where each variable's pieces are, in their order: the servers' numbers, and the places in what they send."""
    places: list[list[tuple[int, int, int]]] = [[] for _ in range(variables)]
    for server, shards in enumerate(of_server):
        for number, shard in enumerate(shards):
            places[shard.variable].append((shard.start, server, number))
    return [[(server, number) for _, server, number in sorted(own)] for own in places]


def _joined(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
