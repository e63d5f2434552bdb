"""Starts and stops this process's part of a job's timeline (`phalanx.monitoring.timeline`).

The file is on the host of rank 0, and all ranks of that host write to it. Ranks on other hosts send their events to
rank 0 over a separate link, after they have measured the offset of the two clocks over it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from phalanx.cluster.clock_offset import ClockRequest, answer_ping, fastest_ping
from phalanx.cluster.membership import Member
from phalanx.cluster.node import Node
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import FrameError, HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.monitoring import timeline
from phalanx.transport.address import Address
from phalanx.transport.decoding import Decoder
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener

logger = logging.getLogger(__name__)

TIMELINE = "timeline"
"""Purpose of the links that carry events."""
MESSAGE_TIMEOUT_S = 5.0
"""Time limit for one message and its answer."""
DRAIN_TIMEOUT_S = 2.0
"""How long the writer waits at the end for the last events of others, which send them every half second."""
BATCH = 5000
"""Number of events in one message."""
SEPARATOR = b"\n"
"""Separator of events; JSON escapes it inside an event."""


class _Events(msgspec.Struct, frozen=True, tag="events"):
    """Events follow as buffers."""


_Message = ClockRequest | _Events
_LOST = (LinkClosedError, LinkTimeoutError, FrameError, HandshakeError)


class TimelineRelay:
    """Writes the events of ranks on other hosts (a `transport.listener.Service`)."""

    def __init__(self, sink: timeline.TimelineSink):
        self._sink = sink
        self._changed = threading.Condition()  # protects `_senders`
        self._senders = 0

    def admit(self, hello: Hello) -> Welcome:
        """See `Service.admit`."""
        del hello  # the handshake has authenticated it
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        """See `Service.adopt`."""
        with self._changed:
            self._senders += 1
        threading.Thread(
            target=self._serve, args=(hello.task, link), name=f"phalanx-timeline-{hello.task}", daemon=True
        ).start()

    def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until all senders have disconnected, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._senders == 0, timeout=timeout_s)

    def _serve(self, task: str, link: Link) -> None:
        pending: list[bytes] = []  # not yet written: others lock the file, or the link has ended
        try:
            while True:
                # Separate from `receive`: a missing message is normal, half a message is a failure.
                if not link.wait_readable(deadline=time.monotonic() + MESSAGE_TIMEOUT_S):
                    continue
                header, buffers = link.receive(deadline=time.monotonic() + MESSAGE_TIMEOUT_S)
                if isinstance(_decoder.decode(header), ClockRequest):
                    answer_ping(link, timeline.now, timeout_s=MESSAGE_TIMEOUT_S)
                else:
                    pending += [event for buffer in buffers for event in bytes(buffer).split(SEPARATOR)]
                    if self._sink.write(pending):
                        pending.clear()
        except _LOST as error:
            logger.debug("the timeline of %s is complete: %s", task, error)  # the sender closes the link
            self._write_last(task, pending)
        except OSError as error:
            logger.warning("the timeline of %s cannot be written: %s", task, error)
        finally:
            link.close()
            with self._changed:
                self._senders -= 1
                self._changed.notify_all()

    def _write_last(self, task: str, events: list[bytes]) -> None:
        try:
            if events and not self._sink.write(events):
                logger.warning("the last %d events in the timeline of %s are not written", len(events), task)
        except OSError as error:
            logger.warning("the timeline of %s cannot be written: %s", task, error)


class RemoteTimelineSink:
    """Sends events to a rank that can write (a `timeline.TimelineSink`)."""

    def __init__(self, link: Link):
        self._link = link

    def clock_offset(self) -> tuple[float, float]:
        """Return how far the other clock is ahead of this one, and the uncertainty, in ns."""
        round_trip, offset = fastest_ping(self._link, timeline.now, timeout_s=MESSAGE_TIMEOUT_S)
        return offset, round_trip / 2

    def write(self, events: Sequence[bytes]) -> bool:
        """See `TimelineSink.write`."""
        for start in range(0, len(events), BATCH):
            content = SEPARATOR.join(events[start : start + BATCH])
            try:
                self._link.send(_EVENTS, [content], deadline=time.monotonic() + MESSAGE_TIMEOUT_S)
            except _LOST as error:
                raise OSError(f"the rank that writes the timeline does not accept events: {error}") from error
        return True

    def close(self) -> None:
        """See `TimelineSink.close`."""
        self._link.finish()
        self._link.close()


_decoder: Decoder[_Message] = Decoder(_Message)
_EVENTS = msgspec.msgpack.encode(_Events())
_relay: tuple[Listener, TimelineRelay] | None = None  # while this process writes for others


def start_recording(node: Node, path: Path, *, overwrite: bool = False, marks_cycles: bool = False) -> None:
    """Record this process in the job's timeline, until `stop_recording`.

    Args:
        node: This process's node.
        path: The file on the host of rank 0.
        overwrite: Whether rank 0 replaces the file even if it belongs to this job.
        marks_cycles: Whether to record negotiation rounds.

    Raises:
        ConfigurationError: the file cannot be written.
        ValueError: this process is already recording.
    """
    global _relay
    if timeline.current.on:
        raise ValueError("The timeline has been started already; stop it first.")
    membership, config = node.membership, node.identity.config
    member = membership.local_member
    if membership.members[0].host == member.host:
        if membership.rank == 0:
            timeline.create(path, config.job_id, overwrite=overwrite)
        sink: timeline.TimelineSink = timeline.TimelineFileSink(path, config.job_id)
        if node.listener is not None and len(membership.hosts) > 1:
            _relay = node.listener, TimelineRelay(timeline.TimelineFileSink(path, config.job_id))
            node.listener.register(TIMELINE, _relay[1])
        offset = uncertainty = 0.0
    else:
        writer = _find_writer(membership.members[0], node.identity)
        if writer is None:
            return
        sink, (offset, uncertainty) = writer
    tasks = [str(task) for task in node.identity.tasks]
    number = tasks.index(member.task) if member.task in tasks else member.rank  # unchanged for a task that rejoins
    recorder = timeline.TimelineSinkRecorder(
        sink,
        number,
        f"{member.task} (rank {member.rank} on {member.host})",
        offset_ns=round(offset),
        marks_cycles=marks_cycles,
    )
    about = {"job": config.job_id, "world_size": membership.world_size, "generation": membership.generation}
    clock = {"clock_offset_ms": offset / 1e6, "uncertain_by_ms": uncertainty / 1e6}
    recorder.instant(timeline.MEMBERSHIP, "begins", {**about, **clock})
    timeline.start(recorder)


def start_worker_recording(identity: TaskIdentity, path: Path) -> None:
    """Start recording a worker of a job with parameter servers. Its workers have no links to each other, so the
    timeline contains only those on the host of the first worker."""
    config = identity.config
    if timeline.current.on:
        return
    if identity.rank == 0:
        timeline.create(path, config.job_id)
    sink = timeline.TimelineFileSink(path, config.job_id)
    name = f"{identity.task} (worker {identity.rank} on {identity.description.host})"
    timeline.start(timeline.TimelineSinkRecorder(sink, identity.rank, name))


def stop_recording() -> None:
    """Stop recording; rank 0 waits briefly for the last events of other hosts. Safe to call twice."""
    global _relay
    timeline.stop()
    served, _relay = _relay, None
    if served is not None:
        listener, relay = served
        listener.unregister(TIMELINE)  # senders of the next timeline wait until rank 0 has started it
        relay.wait_until_idle(DRAIN_TIMEOUT_S)


def _find_writer(chief: Member, identity: TaskIdentity) -> tuple[RemoteTimelineSink, tuple[float, float]] | None:
    """Wait until the chief accepts events; return a sink to it and its `clock_offset`. If the chief does not accept
    them, warn and return None."""
    address = Address.parse(chief.address, where=chief.task)
    until = time.monotonic() + MESSAGE_TIMEOUT_S
    while True:
        try:
            deadline = time.monotonic() + MESSAGE_TIMEOUT_S
            link, _ = identity.dial_address(address, chief.task, TIMELINE, deadline=deadline)
            sink = RemoteTimelineSink(link)
            return sink, sink.clock_offset()
        except _LOST as error:
            if time.monotonic() >= until:
                logger.warning(
                    "%s is not in the timeline: %s does not write for it: %s", identity.task, chief.task, error
                )
                return None
            time.sleep(0.05)
