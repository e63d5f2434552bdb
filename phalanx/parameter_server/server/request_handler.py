"""What a server answers: one worker's questions, in a thread of their own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.arrays.allocation import copy_arrays
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.errors import EvictedError, FrameError, LinkClosedError, LinkTimeoutError, PeerLostError, PhalanxError
from phalanx.parameter_server.server.connected_workers import Worker
from phalanx.parameter_server.server.recovery import TrainingRecovery
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import Copies, VariableStore
from phalanx.parameter_server.server_messages import (
    Acknowledged,
    AssignVariables,
    BeginSession,
    Broadcast,
    ChiefAlive,
    CollectReports,
    DeclareModel,
    EndEpoch,
    EndFit,
    EpochOver,
    EpochReport,
    FitJoined,
    FitOver,
    HoldSteps,
    JoinFit,
    LeaveJob,
    NoBatch,
    OfferSharedMemory,
    OpenEpoch,
    PullOptimizer,
    PullRows,
    PullTables,
    PullValues,
    PushGradients,
    QueryJobOver,
    Refusal,
    Rejoin,
    Request,
    RequestBroadcast,
    RequestSampleOrder,
    RequestStop,
    RequestTicket,
    Response,
    SetLearningRate,
    SharedMemoryMapped,
    Values,
    arrays_of,
    dtypes_of,
)
from phalanx.parameter_server.shared_memory_channel import TO_SERVER, SharedMemoryChannel
from phalanx.parameter_server.table_rows import NUMBER
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

SEND_S = 60.0
"""How long a worker may take to read an answer. One that is stopped holds up its own thread only."""

_QUESTIONS = msgspec.msgpack.Decoder(Request)
_encode = msgspec.msgpack.Encoder().encode


class RequestHandler:
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
        me: TaskIdentity,
        names: tuple[str, ...],
        store: VariableStore,
        schedule: StepSchedule,
        recovery: TrainingRecovery,
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
        says_goodbye: Callable[[LeaveJob], None],
        is_closing: Callable[[], bool],
    ) -> str:
        """Answer one worker until it says goodbye or its link ends; the link is closed then.

        Returns: how the link ended, a sentence; empty after a goodbye.

        Args:
            says_goodbye: called before that is answered.
            is_closing: whether this server hangs up itself.
        """
        lanes: SharedMemoryChannel | None = None
        try:
            while True:
                # As long as the worker lives: its program may be about something else for hours.
                header, buffers = link.receive(deadline=math.inf)
                question = _QUESTIONS.decode(header)
                if isinstance(question, LeaveJob):
                    says_goodbye(question)
                    _answer(link, Acknowledged())
                    return ""
                if isinstance(question, OfferSharedMemory):
                    made = SharedMemoryChannel.accept(question.offer)
                    lanes = made or lanes
                    _answer(link, SharedMemoryMapped(made is not None))
                    continue
                if isinstance(question, PushGradients) and question.lengths:
                    if lanes is None:
                        raise FrameError("gradients in memory that is not shared")
                    buffers = lanes.read(TO_SERVER, question.lengths)
                copy = copy_arrays if lanes is None else lanes.copies
                answer, arrays = self._reply(worker, incarnation, question, buffers, copy)
                if (
                    lanes is not None
                    and isinstance(answer, Values)
                    and isinstance(question, PushGradients | PullValues)
                ):
                    place, lengths = lanes.write_values(arrays)
                    if lengths:
                        answer, arrays = msgspec.structs.replace(answer, lengths=lengths, place=place), ()
                _answer(link, answer, arrays, max(SEND_S, self._me.config.timeout_s))
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
        self, worker: Worker, incarnation: str, question: Request, buffers: Sequence[memoryview], copy: Copies
    ) -> tuple[Response, Sequence[Array]]:
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
        self, worker: Worker, incarnation: str, question: Request, buffers: Sequence[memoryview], copy: Copies
    ) -> tuple[Response, Sequence[Array]]:
        store, schedule = self._store, self._schedule
        timeout_s = self._me.config.timeout_s
        if not isinstance(
            question, Rejoin | DeclareModel | SetLearningRate | BeginSession | Broadcast | RequestBroadcast
        ):
            schedule.wait_until_rebuilt(worker, timeout_s)
        match question:
            case Rejoin():
                self._recovery.take_back(worker, question, buffers)
            case PushGradients():
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
                    version,
                    step,
                    dtypes_of(arrays),
                    len(values),
                    note,
                    ticket=ticket,
                    is_unreplicated=alone,
                    rows=len(rows),
                )
                return answer, arrays
            case RequestTicket(fit, epoch, era, wait):
                if wait:
                    return schedule.take(worker, incarnation, fit, epoch, era, timeout_s), ()
                return schedule.try_take(worker, incarnation, fit, epoch, era) or Acknowledged(), ()
            case PullValues(fit, version, after):
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
            case DeclareModel():
                self._recovery.declare(question, buffers)
            case JoinFit(fit, variables):
                # Between two fits the chief may be long about something; at the first it must be there in time.
                start_s = self._me.config.rendezvous_timeout_s
                attached = store.attach(worker, fit, variables, max(start_s, timeout_s) if fit else start_s)
                self._recovery.meet(worker)
                if attached is None:
                    return FitOver(), ()
                return FitJoined(schedule.era, step=schedule.global_step, **attached._asdict()), ()
            case SetLearningRate(rate):
                store.set_learning_rate(rate)
            case AssignVariables():
                store.assign(question, buffers)
            case OpenEpoch(fit, epoch, steps):
                order = np.frombuffer(buffers[0], np.int64) if buffers else None
                schedule.open_epoch(fit, epoch, None if steps < 0 else steps, order)
            case RequestSampleOrder(fit, epoch, era):
                found = schedule.order(fit, epoch, era, timeout_s)
                return (Values(0), [found]) if isinstance(found, np.ndarray) else (found, ())
            case EndEpoch(fit, epoch):
                return EpochOver(schedule.end_epoch(fit, epoch)), ()
            case NoBatch(ticket, ends):
                schedule.no_batch(ticket, ends=ends)
            case EpochReport():
                schedule.report(worker, question, arrays_of(buffers, question.dtypes))
            case CollectReports(fit, epoch):
                merged, _, _ = schedule.collect(fit, epoch, timeout_s)
                note = schedule.describe_losses()
                return Values(0, schedule.global_step, dtypes_of(merged), note=note), merged
            case HoldSteps(on):
                if on:
                    schedule.hold(timeout_s)
                else:
                    schedule.go_on()
                return Values(0, schedule.global_step), ()
            case ChiefAlive():
                schedule.heard_of_chief()
            case QueryJobOver():
                return FitOver() if schedule.has_chief_left else Acknowledged(), ()
            case RequestStop(fit, stop):
                if stop:
                    schedule.stop_asked = fit
                return FitOver() if schedule.stop_asked == fit else Acknowledged(), ()
            case BeginSession(session):
                schedule.begin_session(worker, session)
            case Broadcast(subject, fit, once):
                arrays = [np.frombuffer(bytes(buffer), np.uint8) for buffer in buffers]
                holds = schedule.tell(subject, fit, arrays, once=once)
                return (Values(0), holds) if once else (Acknowledged(), ())
            case RequestBroadcast(subject, fit):
                told = schedule.hear(subject, fit)
                return (FitOver(), ()) if told is None else (Values(0), told)
            case EndFit(fit):
                schedule.end_fit(fit)
                store.tell_copy(question)
                self._recovery.write_snapshot()
        return Acknowledged(), ()


def _answer(link: Link, answer: Response, arrays: Sequence[Array] = (), patience_s: float = SEND_S) -> None:
    link.send(
        _encode(answer), [np.ascontiguousarray(array) for array in arrays], deadline=time.monotonic() + patience_s
    )
