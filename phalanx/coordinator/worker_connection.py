"""One connected worker, as the coordinator sees it: what it has received, and what it is sent next."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.coordinator.coordinator_messages import MAX_FUNCTIONS, CallFunction, Order, StoreObject
from phalanx.coordinator.scheduled_calls import ScheduledCall
from phalanx.transport.link import Link

Message = tuple[Order, Sequence[bytes | memoryview]]


class DeferredMessage:
    """A message that is packed when a worker first needs it. Any thread may use it."""

    def __init__(self, pack: Callable[[], Message]) -> None:
        self._pack = pack
        self._lock = threading.Lock()
        self._packed: Message | None = None

    def packed(self) -> Message:
        """The message. Raises: the error of packing it."""
        with self._lock:
            if self._packed is None:
                self._packed = self._pack()
            return self._packed


@dataclass(eq=False)
class WorkerConnection:
    """A connected worker.

    Attributes:
        number: Rank of its task.
        name: Its task, such as `worker/1`.
        incarnation: Identifies its process and this link.
        link: The open link to it.
        has_program: Whether it also runs the chief's program.
        outbox: Messages to send before the next function.
        functions: Digests of the functions that it has, most recently used last.
        stored: Numbers of the large values that it has.
        last_sent_at: Time when the last message was sent (monotonic seconds).
    """

    number: int
    name: str
    incarnation: str
    link: Link
    has_program: bool
    outbox: deque[Message | DeferredMessage]
    functions: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    stored: set[int] = field(default_factory=set)
    last_sent_at: float = field(default_factory=time.monotonic)

    def enqueue(self, number: int, call: ScheduledCall) -> None:
        """Put a call into the outbox, after the values that it refers to and the worker lacks.

        Raises: the error of pickling a large value, if it changed since the call was scheduled.
        """
        for stored, pickle in call.stored_objects.items():
            if stored not in self.stored:
                self.outbox.append((StoreObject(stored), [pickle()]))
                self.stored.add(stored)
        # The worker drops the least recently used function in the same way, when it handles the message. Nothing may
        # raise from here on: the worker would lack what is recorded as sent.
        is_new = call.digest not in self.functions
        self.functions[call.digest] = None
        self.functions.move_to_end(call.digest)
        if len(self.functions) > MAX_FUNCTIONS:
            self.functions.popitem(last=False)
        results = tuple(need.number for need in call.needs)
        buffers: list[bytes | memoryview] = [
            *([call.function] if is_new else []),
            call.arguments,
            *[need.finished() for need in call.needs],  # all succeeded: a failure would have cancelled this call
        ]
        self.outbox.append((CallFunction(number, call.digest, is_new, results), buffers))
