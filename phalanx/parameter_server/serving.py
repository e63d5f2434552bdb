"""What a server answers: one worker's questions, in a thread of their own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.cluster.roll_call import Identity
from phalanx.errors import EvictedError, FrameError, LinkClosedError, LinkTimeoutError, PeerLostError, PhalanxError
from phalanx.memory import copies
from phalanx.parameter_server.lanes import TO_SERVER, Lanes
from phalanx.parameter_server.messages import (
    Alive,
    Answer,
    Assign,
    Attach,
    Attached,
    BeginSession,
    Bye,
    Collect,
    Declare,
    Done,
    EndEpoch,
    EndFit,
    EpochOver,
    FitOver,
    Hear,
    Hold,
    IsOver,
    NoBatch,
    OpenEpoch,
    Order,
    Pull,
    PullOptimizer,
    PullRows,
    PullTables,
    Push,
    Question,
    Refusal,
    Rejoin,
    Report,
    SetRate,
    Share,
    Sharing,
    Stop,
    Take,
    Tell,
    Values,
    arrays_of,
    dtypes_of,
)
from phalanx.parameter_server.presence import Worker
from phalanx.parameter_server.recovery import Recovery
from phalanx.parameter_server.rows import NUMBER
from phalanx.parameter_server.schedule import Schedule
from phalanx.parameter_server.store import Copies, Store
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

SEND_S = 60.0
"""How long a worker may take to read an answer. One that is stopped holds up its own thread only."""

_QUESTIONS = msgspec.msgpack.Decoder(Question)
_encode = msgspec.msgpack.Encoder().encode


class Serving:
    """Answers the workers of one group of shards.

    Args:
        me: this task.
        names: of the workers, by number.
        copied: whether there should be a copy of the shards on another server.
        wait_for_chief: called before an update and, if its copy is missing, after it; returns once it is certain that
            this server leads the group.
    """

    def __init__(
        self,
        me: Identity,
        names: tuple[str, ...],
        store: Store,
        schedule: Schedule,
        recovery: Recovery,
        *,
        is_head: bool,
        copied: bool,
        wait_for_chief: Callable[[], None],
    ):
        self._me = me
        self._names = names
        self._store = store
        self._schedule = schedule
        self._recovery = recovery
        self._is_head = is_head
        self._copied = copied
        self._wait_for_chief = wait_for_chief

    def serve(
        self,
        worker: Worker,
        incarnation: str,
        link: Link,
        *,
        says_goodbye: Callable[[Bye], None],
        is_closing: Callable[[], bool],
    ) -> str:
        """Answer one worker until it says goodbye or its link ends; the link is closed then.

        Returns: how the link ended, a sentence; empty after a goodbye.

        Args:
            says_goodbye: called before that is answered.
            is_closing: whether this server hangs up itself.
        """
        lanes: Lanes | None = None
        try:
            while True:
                # As long as the worker lives: its program may be about something else for hours.
                header, buffers = link.receive(deadline=math.inf)
                question = _QUESTIONS.decode(header)
                if isinstance(question, Bye):
                    says_goodbye(question)
                    _answer(link, Done())
                    return ""
                if isinstance(question, Share):
                    made = Lanes.accept(question.offer)
                    lanes = made or lanes
                    _answer(link, Sharing(made is not None))
                    continue
                if isinstance(question, Push) and question.lengths:
                    if lanes is None:
                        raise FrameError("gradients in memory that is not shared")
                    buffers = lanes.read(TO_SERVER, question.lengths)
                copy = copies if lanes is None else lanes.copies
                answer, arrays = self._reply(worker, incarnation, question, buffers, copy)
                if lanes is not None and isinstance(answer, Values) and isinstance(question, Push | Pull):
                    place, lengths = lanes.write_values(arrays)
                    if lengths:
                        answer, arrays = msgspec.structs.replace(answer, lengths=lengths, place=place), ()
                _answer(link, answer, arrays, max(SEND_S, self._me.settings.timeout_s))
        except (LinkClosedError, LinkTimeoutError) as error:
            if not is_closing():
                logger.warning("%s: %s", self._me.task, error)
            return str(error)
        except (FrameError, msgspec.MsgspecError) as error:
            logger.warning("%s hangs up on %s: %s", self._me.task, self._names[worker], error)
            return f"what it sent could not be read ({error})."
        finally:
            link.close()
            if lanes is not None:
                lanes.close()

    def _reply(
        self, worker: Worker, incarnation: str, question: Question, buffers: Sequence[memoryview], copy: Copies
    ) -> tuple[Answer, Sequence[Array]]:
        """The answer to a question, a refusal included."""
        try:
            if self._schedule.is_evicted(incarnation):
                raise EvictedError(
                    f"{self._names[worker]} made no progress for too long and was left out; the others went on. Start "
                    f"it again to take part."
                )
            return self._handle(worker, incarnation, question, buffers, copy)
        except PeerLostError as error:
            return Refusal(type(error).__name__, str(error), error.task, error.rank), ()
        except PhalanxError as error:
            return Refusal(type(error).__name__, str(error)), ()
        except Exception as error:
            logger.exception("%s cannot do what %s asked", self._me.task, self._names[worker])
            return Refusal("PhalanxError", f"{self._me.task} failed: {error!r}"), ()

    def _handle(
        self, worker: Worker, incarnation: str, question: Question, buffers: Sequence[memoryview], copy: Copies
    ) -> tuple[Answer, Sequence[Array]]:
        store, schedule = self._store, self._schedule
        timeout_s = self._me.settings.timeout_s
        if not isinstance(question, Rejoin | Declare | SetRate | BeginSession | Tell | Hear):
            schedule.wait_until_rebuilt(worker, timeout_s)
        match question:
            case Rejoin():
                self._recovery.take_back(worker, question, buffers)
            case Push():
                self._wait_for_chief()
                version, values, rows, extras, note = store.push(question, buffers, copy)
                # Not asked where there is no copy: the other workers' updates keep the store's lock.
                alone = self._copied and not store.is_copied
                if alone:
                    self._wait_for_chief()  # the copy may lead by now, and have been lost for that reason
                ticket = None
                if self._is_head and question.gradients:
                    now = question.ticket
                    ticket = schedule.try_take(worker, incarnation, now.fit, now.epoch, now.era)
                arrays = [*values, *rows, *extras]
                step = schedule.global_step
                answer = Values(
                    version, step, dtypes_of(arrays), len(values), note, ticket=ticket, alone=alone, rows=len(rows)
                )
                return answer, arrays
            case Take(fit, epoch, era, wait):
                if wait:
                    return schedule.take(worker, incarnation, fit, epoch, era, timeout_s), ()
                return schedule.try_take(worker, incarnation, fit, epoch, era) or Done(), ()
            case Pull(fit, version, after):
                newest, values = store.pull(fit, version, after, copy)
                return Values(newest, schedule.global_step, dtypes_of(values), len(values)), values
            case PullRows(fit):
                rows = store.pull_rows(fit, arrays_of(buffers, [NUMBER.name] * len(buffers)))
                return Values(store.version, dtypes=dtypes_of(rows), rows=len(rows)), rows
            case PullTables(fit):
                tables = store.pull_tables(fit)
                return Values(store.version, dtypes=dtypes_of(tables), rows=len(tables)), tables
            case PullOptimizer(with_tables):
                slots, state = store.optimizer_values(tables=with_tables)
                return Values(store.version, dtypes=dtypes_of(state), slots=slots), state
            case Declare():
                self._recovery.declare(question, buffers)
            case Attach(fit, variables):
                # Between two fits the chief may be long about something; at the first it must be there in time.
                start_s = self._me.settings.rendezvous_timeout_s
                attached = store.attach(worker, fit, variables, max(start_s, timeout_s) if fit else start_s)
                self._recovery.meet(worker)
                if attached is None:
                    return FitOver(), ()
                return Attached(schedule.era, step=schedule.global_step, **attached._asdict()), ()
            case SetRate(rate):
                store.set_learning_rate(rate)
            case Assign():
                store.assign(question, buffers)
            case OpenEpoch(fit, epoch, steps):
                order = np.frombuffer(buffers[0], np.int64) if buffers else None
                schedule.open_epoch(fit, epoch, None if steps < 0 else steps, order)
            case Order(fit, epoch, era):
                found = schedule.order(fit, epoch, era, timeout_s)
                return (Values(0), [found]) if isinstance(found, np.ndarray) else (found, ())
            case EndEpoch(fit, epoch):
                return EpochOver(schedule.end_epoch(fit, epoch)), ()
            case NoBatch(ticket, ends):
                schedule.no_batch(ticket, ends=ends)
            case Report():
                schedule.report(worker, question, arrays_of(buffers, question.dtypes))
            case Collect(fit, epoch):
                merged, _, _ = schedule.collect(fit, epoch, timeout_s)
                note = schedule.describe_losses()
                return Values(0, schedule.global_step, dtypes_of(merged), note=note), merged
            case Hold(on):
                if on:
                    schedule.hold(timeout_s)
                else:
                    schedule.go_on()
                return Values(0, schedule.global_step), ()
            case Alive():
                schedule.heard_of_chief()
            case IsOver():
                return FitOver() if schedule.has_chief_left else Done(), ()
            case Stop(fit, asks):
                if asks:
                    schedule.stop_asked = fit
                return FitOver() if schedule.stop_asked == fit else Done(), ()
            case BeginSession(session):
                schedule.begin_session(worker, session)
            case Tell(subject, fit, once):
                arrays = [np.frombuffer(bytes(buffer), np.uint8) for buffer in buffers]
                holds = schedule.tell(subject, fit, arrays, once=once)
                return (Values(0), holds) if once else (Done(), ())
            case Hear(subject, fit):
                told = schedule.hear(subject, fit)
                return (FitOver(), ()) if told is None else (Values(0), told)
            case EndFit(fit):
                schedule.end_fit(fit)
                store.tell_copy(question)
                self._recovery.write_snapshot()
        return Done(), ()


def _answer(link: Link, answer: Answer, arrays: Sequence[Array] = (), patience_s: float = SEND_S) -> None:
    link.send(
        _encode(answer), [np.ascontiguousarray(array) for array in arrays], deadline=time.monotonic() + patience_s
    )
