"""Begins and ends this process's part of a job's timeline (`phalanx.monitoring.timeline`).

The file lies on the host of rank 0. Who is on that host writes to it. Who is on another one sends its events to a rank
that can write, over a link of their own, over which it has first measured how far the two clocks are apart.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from phalanx.cluster.link_benchmark import fastest
from phalanx.cluster.membership import Member, Membership
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.config.job_config import JobConfig
from phalanx.errors import FrameError, HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.monitoring import timeline
from phalanx.transport.address import Address
from phalanx.transport.dial import dial
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.tls import load_tls

logger = logging.getLogger(__name__)

TIMELINE = "timeline"
"""Purpose of the links over which events travel."""
STEP_S = 5.0
"""For one message."""
FAREWELL_S = 2.0
"""How long who writes for others waits at the end for what they still have: what has come in half a second."""
BATCH = 5000
"""Events in one message."""
SEPARATOR = b"\n"
"""Between events; within one it would be escaped."""


class _Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for the other end's clock."""


class _Pong(msgspec.Struct, frozen=True):
    clock_ns: int


class _Events(msgspec.Struct, frozen=True, tag="events"):
    """Events follow."""


_Message = _Ping | _Events
_LOST = (LinkClosedError, LinkTimeoutError, FrameError, HandshakeError, msgspec.MsgspecError)


class TimelineNode(Protocol):
    """What is needed of a `Node` or `ElasticNode`."""

    @property
    def task(self) -> Task: ...

    @property
    def cluster_spec(self) -> ClusterSpec: ...

    @property
    def config(self) -> JobConfig: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def listener(self) -> Listener | None: ...


class TimelineRelay:
    """Writes for ranks of other hosts (a `transport.listener.Service`)."""

    def __init__(self, sink: timeline.TimelineSink):
        self._sink = sink
        self._changed = threading.Condition()  # protects `_served`
        self._served = 0

    def admit(self, hello: Hello) -> Welcome:
        """See `Service.admit`."""
        del hello  # it knows the secret
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        """See `Service.adopt`."""
        with self._changed:
            self._served += 1
        threading.Thread(
            target=self._serve, args=(hello.task, link), name=f"phalanx-timeline-{hello.task}", daemon=True
        ).start()

    def wait_for_the_others(self, timeout_s: float) -> None:
        """Return when nobody sends any more, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._served == 0, timeout=timeout_s)

    def _serve(self, task: str, link: Link) -> None:
        try:
            while True:
                if not link.wait_readable(deadline=time.monotonic() + STEP_S):
                    continue
                header, buffers = link.receive(deadline=time.monotonic() + STEP_S)
                if isinstance(_decoder.decode(header), _Ping):
                    pong = msgspec.msgpack.encode(_Pong(timeline.now()))
                    link.send(pong, deadline=time.monotonic() + STEP_S)
                else:
                    self._sink.write([event for buffer in buffers for event in bytes(buffer).split(SEPARATOR)])
        except _LOST as error:
            logger.debug("no more of the timeline of %s: %s", task, error)  # it hangs up when it has finished
        except OSError as error:
            logger.warning("the timeline of %s cannot be written: %s", task, error)
        finally:
            link.close()
            with self._changed:
                self._served -= 1
                self._changed.notify_all()


class RemoteTimelineSink:
    """Sends events to a rank that can write (a `timeline.Sink`)."""

    def __init__(self, link: Link):
        self._link = link

    def clock_offset(self) -> tuple[float, float]:
        """By how much the other clock is ahead of this one, and how uncertain that is, in ns (Cristian 1989)."""
        round_trip, offset = fastest(self._ask)
        return offset, round_trip / 2

    def write(self, events: Sequence[bytes]) -> bool:
        """See `Sink.write`."""
        for start in range(0, len(events), BATCH):
            content = SEPARATOR.join(events[start : start + BATCH])
            try:
                self._link.send(_EVENTS, [content], deadline=time.monotonic() + STEP_S)
            except _LOST as error:
                raise OSError(f"the rank that writes it does not take it: {error}") from error
        return True

    def close(self) -> None:
        """See `Sink.close`."""
        self._link.finish()
        self._link.close()

    def _ask(self) -> tuple[int, float]:
        deadline = time.monotonic() + STEP_S
        before = timeline.now()
        self._link.send(_PING, deadline=deadline)
        header, _ = self._link.receive(deadline=deadline)
        taken = timeline.now() - before
        pong = msgspec.msgpack.decode(header, type=_Pong)
        return taken, pong.clock_ns - (before + taken / 2)


_decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)
_PING = msgspec.msgpack.encode(_Ping())
_EVENTS = msgspec.msgpack.encode(_Events())
_relay: TimelineRelay | None = None


def start_recording(node: TimelineNode, path: Path, *, anew: bool = False, marks_cycles: bool = False) -> None:
    """Record this process into the job's timeline, until `end`.

    Args:
        path: on the host of rank 0.
        anew: rank 0 makes the file anew, even if it is of this job.

    Raises:
        ConfigurationError: the file cannot be written.
        ValueError: this process records already.
    """
    global _relay
    if timeline.current.on:
        raise ValueError("The timeline has been started already; stop it first.")
    membership, config = node.membership, node.config
    me = membership.me
    if membership.members[0].host == me.host:
        if membership.rank == 0:
            timeline.create(path, config.job_id, anew=anew)
        sink: timeline.TimelineSink = timeline.TimelineFileSink(path, config.job_id)
        if node.listener is not None and len(membership.hosts) > 1:
            _relay = TimelineRelay(timeline.TimelineFileSink(path, config.job_id))
            node.listener.register(TIMELINE, _relay)
        offset = uncertain = 0.0
    else:
        found = _find_writer(membership.members[0], str(node.task), config)
        if found is None:
            return
        sink, (offset, uncertain) = found
    tasks = [str(task) for task in node.cluster_spec.ranked_tasks]
    number = tasks.index(me.task) if me.task in tasks else me.rank  # the same for a task that comes back
    recorder = timeline.TimelineFileRecorder(
        sink, number, f"{me.task} (rank {me.rank} on {me.host})", offset_ns=round(offset), marks_cycles=marks_cycles
    )
    about = {"job": config.job_id, "world_size": membership.world_size, "generation": membership.generation}
    clock = {"clock_offset_ms": offset / 1e6, "uncertain_by_ms": uncertain / 1e6}
    recorder.instant(timeline.MEMBERSHIP, "begins", {**about, **clock})
    timeline.start(recorder)


def start_worker_recording(me: TaskIdentity, path: Path) -> None:
    """As `begin`, for a worker among parameter servers, which has no links to other workers: those on other hosts than
    the first one are not in the timeline."""
    config = me.config
    if timeline.current.on:
        return
    if me.rank == 0:
        timeline.create(path, config.job_id)
    sink = timeline.TimelineFileSink(path, config.job_id)
    timeline.start(
        timeline.TimelineFileRecorder(sink, me.rank, f"{me.task} (worker {me.rank} on {me.description.host})")
    )


def stop_recording() -> None:
    """Record no more; rank 0's host waits a moment for what others have to write. Safe to call twice."""
    global _relay
    timeline.stop()
    relay, _relay = _relay, None
    if relay is not None:
        relay.wait_for_the_others(FAREWELL_S)


def _find_writer(chief: Member, task: str, config: JobConfig) -> tuple[RemoteTimelineSink, tuple[float, float]] | None:
    """The chief, as soon as it listens for events, and its clock (see `RemoteSink.clock_offset`); None, with a warning,
    if it does not."""
    hello = Hello(purpose=TIMELINE, task=task, job=config.job_id)
    until = time.monotonic() + STEP_S
    while True:
        try:
            link, _ = dial(
                Address.parse(chief.address, where=chief.task),
                hello,
                peer=chief.task,
                secret=config.secret,
                tls=load_tls(config.tls),
                deadline=time.monotonic() + STEP_S,
            )
            sink = RemoteTimelineSink(link)
            return sink, sink.clock_offset()
        except _LOST as error:
            if time.monotonic() >= until:
                logger.warning("%s is not in the timeline: %s does not write for it: %s", task, chief.task, error)
                return None
            time.sleep(0.05)
