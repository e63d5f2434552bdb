"""A worker's side: runs the functions that the coordinator sends, until that has no more to do.

One thread reads what comes and answers questions whether this process is alive; the main thread, which backends like
best, runs the functions.
"""

from __future__ import annotations

import inspect
import logging
import queue
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from phalanx.coordinator import function_effects
from phalanx.coordinator.coordinated_variables import WorkerVariables
from phalanx.coordinator.coordinator_messages import (
    FUNCTIONS_KEPT,
    Answer,
    Begin,
    CallFunction,
    ForgetObject,
    FunctionRaised,
    FunctionReturned,
    KeepObject,
    MakeObject,
    Order,
    Ping,
    Pong,
    StopWorker,
)
from phalanx.coordinator.current_worker import set_index
from phalanx.coordinator.dispatcher import PING_S, PURPOSE
from phalanx.coordinator.function_pickling import References, pack, unpack
from phalanx.coordinator.remote_values import OutOfRangeError
from phalanx.data import DistributedIterator, InputContext
from phalanx.engines import make_tensors
from phalanx.engines.random_state import draw_own_numbers, random_state
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError, PeerLostError, PhalanxError, RendezvousError
from phalanx.parameter_server.server_dialing import connect
from phalanx.parameter_server.server_protocol import peer_lost
from phalanx.runtime import function_call as calls
from phalanx.strategies.parameter_server_strategy import ParameterServerStrategy
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.remote_variables import to_host
from phalanx.training.state_sync import shifted_seed
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

_ORDERS = msgspec.msgpack.Decoder(Order)
_encode = msgspec.msgpack.Encoder().encode


class WorkerReferences(References):
    """What references mean on a worker."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[int, Any] = {}
        self.own: dict[int, Any] = {}
        self.results: dict[int, memoryview] = {}

    def load(self, reference: tuple[Any, ...]) -> Any:
        kind, *rest = reference
        if kind == "result":
            return unpack(self.results[rest[0]], self.load)
        if kind == "kept":
            return self.kept[rest[0]]
        if kind == "own":
            value = self.own[rest[0]]
            if isinstance(value, _NotMade):
                raise value.error
            return value
        return super().load(reference)


class _NotMade:
    """Stands where a value of this worker's own could not be made."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class FunctionServer:
    """Runs functions on this worker.

    Args:
        coordinator: of this task; what functions call by this name.
    """

    def __init__(self, strategy: ParameterServerStrategy, worker: ParameterServerWorker, coordinator: Any) -> None:
        self._strategy = strategy
        self._worker = worker
        self._me = worker.client.identity
        self._chief = self._me.tasks[0]
        self._trainers = len(self._me.tasks) - 1
        set_index(worker.number - 1)
        tensors = make_tensors()
        worker.made.settle()
        self._references = WorkerReferences({"strategy": strategy, "coordinator": coordinator}, worker.made, tensors)
        self._variables = WorkerVariables(worker, self._trainers, tensors)
        self._tally = function_effects.EffectRecorder(worker.made)
        self._functions: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()
        self._calling = False
        self._stopped = False

    def run(self) -> None:
        """Serve until the coordinator has no more to do.

        Raises:
            RendezvousError: the coordinator did not connect in time.
            PeerLostError: it was lost, or stopped, and did not return; so for a server.
            LinkTimeoutError: a server did not answer.
        """
        config = self._me.config
        self._worker.in_function = True
        self._draw_own_numbers()
        deadline = time.monotonic() + config.rendezvous_timeout_s
        link: Link | None = None
        try:
            while not self._stopped:
                try:
                    link = connect(self._me, self._chief, PURPOSE, deadline, self._check)
                except _JobOverError:
                    return
                except RendezvousError as error:
                    if link is None:
                        raise
                    raise peer_lost(
                        str(self._chief), "scheduled functions; it did not return within the time set"
                    ) from error
                self._serve(link)
                deadline = time.monotonic() + config.timeout_s
        except KeyboardInterrupt:
            if not self._stopped:  # otherwise it is our own, to end a function whose result is not awaited
                raise
        finally:
            if link is not None:
                link.close()

    def _draw_own_numbers(self) -> None:
        """Else all workers would drop the same units, as their seeds are alike."""
        number = self._worker.number
        for generator in {id(g): g for _, layer in self._worker.made.layers() for g in layer._seed_generators}.values():
            generator.state.assign(shifted_seed(to_host(generator.state), number))
        draw_own_numbers(random_state(), number)

    def _serve(self, link: Link) -> None:
        """Serve one coordinator, until it has no more to do or is gone."""
        self._references.own.clear()
        self._references.kept.clear()
        self._functions.clear()
        # It asks every PING_S whether this worker is alive, unless its process is stopped; a large order takes longer.
        session = _Session(link, self._stop, patience_s=self._me.config.timeout_s + 2 * PING_S)
        try:
            while (message := session.next()) is not None:
                answer = self._handle(*message)
                if answer is not None:
                    session.send(*answer)
                self._end_without_servers()
        except _ChiefGoneError as error:
            logger.warning("%s: %s Waiting for it to return.", self._me.task, error)
        finally:
            link.close()

    def _check(self) -> None:
        """While the coordinator is not there: has it gone for good?"""
        if self._worker.client.is_job_over():
            raise _JobOverError

    def _stop(self) -> None:
        """In the reading thread: there is no more to do."""
        self._stopped = True
        if self._calling:
            # Its result is not awaited any more. A real signal also ends sleeps and waits.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _handle(self, order: Order, buffers: list[memoryview]) -> tuple[Answer, list[bytes]] | None:
        """Do as told; returns the answer, if one is wanted."""
        references = self._references
        match order:
            case Begin():
                self._variables.begin(order)
                function_effects.set_untrained(self._worker.made, unpack(buffers[0], references.load))
            case KeepObject(number):
                references.kept[number] = unpack(buffers[0], references.load)
            case MakeObject():
                references.own[order.number] = self._make(order, buffers)
            case ForgetObject(number):
                references.kept.pop(number, None)
                references.own.pop(number, None)
            case CallFunction():
                return self._call(order, buffers)
            case Ping() | StopWorker():
                raise AssertionError("the reading thread deals with these")
        return None

    def _make(self, order: MakeObject, buffers: list[memoryview]) -> Any:
        """This worker's own value."""
        references = self._references
        try:
            if order.iterator_of is not None:
                iterator = iter(references.load(("own", order.iterator_of)))
                knows_graphs = isinstance(iterator, DistributedIterator) or _is_of_tensorflow(iterator)
                return iterator if knows_graphs else DistributedIterator(iterator)
            thing = unpack(buffers[0], references.load)
            if not callable(thing) or hasattr(thing, "__iter__"):
                return thing
            context = InputContext(self._trainers, self._worker.number - 1, 1)
            with self._strategy.scope():
                return thing(context) if _takes_an_argument(thing) else thing()
        except Exception as error:  # it is raised where the value is used
            note = f"This happened where {self._me.task} made its own value."
            if note not in getattr(error, "__notes__", ()):  # as of the dataset whose iterator this is
                error.add_note(note)
            return _NotMade(error)

    def _call(self, order: CallFunction, buffers: list[memoryview]) -> tuple[Answer, list[bytes]]:
        """Call a function; returns the answer."""
        self._calling = True
        self._variables.failure = None
        try:
            value = self._run(order, buffers)
            content = pack(value, self._references, "The result of the function")
            changes = self._tally.collect()
            pickled = pack(changes, self._references, "Its metrics") if any(changes) else b""
            return FunctionReturned(order.call, self._worker.global_step), [content, pickled]
        except (Exception, SystemExit) as error:  # a function that ends its process would end the next worker's too
            return FunctionRaised(order.call, self._missed), [calls.encode_error(self._told(error))]
        finally:
            self._calling = False
            self._references.results.clear()

    def _run(self, order: CallFunction, buffers: list[memoryview]) -> Any:
        references = self._references
        if order.is_new:
            # Before it is unpickled, as the coordinator counts it whether that succeeds or not.
            self._functions[order.function] = _Unreadable()
        self._functions.move_to_end(order.function)
        if len(self._functions) > FUNCTIONS_KEPT:
            self._functions.popitem(last=False)
        pickled, *_ = buffers
        arguments, *results = buffers[int(order.is_new) :]
        references.results.update(zip(order.results, results, strict=True))
        if order.is_new:
            self._functions[order.function] = unpack(pickled, references.load)
        function = self._functions[order.function]
        args, kwargs = unpack(arguments, references.load)
        self._variables.pull()
        self._tally.start()
        try:
            with self._strategy.scope():
                return function(*args, **kwargs)
        finally:
            self._variables.finish()

    @property
    def _missed(self) -> str:
        """The server without which this worker can do nothing more."""
        match self._variables.failure:
            case PeerLostError(task=task):
                return task
            case LinkTimeoutError(peer=peer):
                return peer
        return ""

    def _end_without_servers(self) -> None:
        """Each further function would only fail here; another process may reach them."""
        if self._missed and self._variables.failure is not None:
            raise self._variables.failure

    def _told(self, error: BaseException) -> BaseException:
        """An error in the form in which it is told to the coordinator."""
        if self._variables.failure is not None:
            return self._variables.failure  # of which a compiled function made its own
        if isinstance(error, SystemExit):
            return PhalanxError(f"A function called sys.exit({error.code!r}): return from it, or raise an error.")
        if isinstance(error, StopIteration):
            ended = OutOfRangeError(
                "The data of a worker ended: next() in a scheduled function found no more. Repeat the dataset, or "
                "schedule fewer functions."
            )
            ended.__cause__ = error
            return ended
        return error


def _is_of_tensorflow(thing: Any) -> bool:
    return type(thing).__module__.startswith("tensorflow.")


class _Unreadable:
    """Stands where a function could not be unpickled; the first call has said why."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PhalanxError("The function could not be read on this worker, as its first call reported.")


class _JobOverError(Exception):
    """The coordinator had no more to do before this worker came."""


class _ChiefGoneError(Exception):
    """There is no link to the coordinator any more."""


_GONE = (LinkClosedError, LinkTimeoutError, FrameError, msgspec.MsgspecError, _ChiefGoneError)


class _Session:
    """A link to the coordinator, and the thread that reads it.

    Args:
        stop: called in that thread when there is no more to do.
        patience_s: how long the coordinator may say nothing, and may take to read an answer.
    """

    def __init__(self, link: Link, stop: Callable[[], None], *, patience_s: float) -> None:
        self._link = link
        self._stop = stop
        self._patience_s = patience_s
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[Order, list[memoryview]] | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="phalanx-coordinator", daemon=True).start()

    def next(self) -> tuple[Order, list[memoryview]] | None:
        """What to do next; waits for it. None if there is no more.

        Raises: _ChiefGoneError; what else the reading thread met.
        """
        message = self._inbox.get()
        if isinstance(message, _GONE):
            raise _ChiefGoneError(str(message)) from message
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, answer: Answer, buffers: Sequence[bytes] = ()) -> None:
        """Answer. Raises: _ChiefGoneError."""
        try:
            with self._sending:
                self._link.send(_encode(answer), buffers, deadline=time.monotonic() + self._patience_s)
        except _GONE as error:
            raise _ChiefGoneError(str(error)) from error

    def _read(self) -> None:
        try:
            while True:
                header, buffers = self._link.receive(deadline=time.monotonic() + self._patience_s)
                order = _ORDERS.decode(header)
                if isinstance(order, Ping):
                    self.send(Pong())
                elif isinstance(order, StopWorker):
                    self._stop()
                    self._inbox.put(None)
                    return
                else:
                    self._inbox.put((order, buffers))
        except Exception as error:  # for the thread that runs functions
            self._inbox.put(error)


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    """Whether a function wants an InputContext."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one written in C
        return False
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )
