"""The one port of a task: accepts connections and hands authenticated links to the service of their purpose.

One thread with a selector does all of this for the lifetime of the task. `pending_connections` takes each connection
through the handshake.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from typing import Protocol

import msgspec

from phalanx.errors import LinkClosedError, LinkTimeoutError
from phalanx.transport.credentials import Credentials
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.pending_connections import Arrival, ArrivalQueue, RefusalLog

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 2.0
"""To send the answer, a few hundred bytes into an empty buffer. Immediate unless the peer is gone."""
OUT_OF_DESCRIPTORS_PAUSE_S = 0.1
"""Pause in accepting when the process has no descriptor left. Without it, the loop would spin."""
MAX_ACCEPTS = 64
"""Connections accepted in one turn, so that a flood of new ones does not starve those in the handshake."""

UNAVAILABLE = "unavailable"
"""Refusal: this purpose is not served here, or not yet."""
OTHER_JOB = "other job"
"""Refusal: the port belongs to another job."""
OTHER_TASK = "other task"
"""Refusal: the port belongs to a different task than the dialer meant."""


class Service(Protocol):
    """Serves one purpose. Both methods run in the listener's thread and must not block, unless the service was
    registered with `blocks`. In the listener's thread, no other Hello is answered between the two, so what `admit` has
    found still holds in `adopt`."""

    def admit(self, hello: Hello) -> Welcome:
        """Return the answer to a Hello from a peer that knows the secret."""
        ...

    def adopt(self, hello: Hello, link: Link) -> None:
        """Take over the link, after a Welcome without refusal has been sent."""
        ...


class Listener:
    """Owns the listening sockets of a task and the thread that accepts from them.

    Args:
        sockets: Listening sockets (see `open_listening_sockets`); the listener closes them.
        task: Task that listens. Peers that mean a different task are refused.
        credentials: Secret that peers must know, and how connections are encrypted.
        job: Job that peers must belong to.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        *,
        task: str,
        credentials: Credentials,
        job: str = "",
    ):
        self.task = task
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._job = job
        self._lock = threading.Lock()  # protects _services and _is_stopping
        self._services: dict[str, tuple[Service, bool]] = {}  # by purpose: the service, and whether it may block
        self._is_stopping = False
        # Only the thread uses the rest.
        self._refusals = RefusalLog(task, self.port)
        self._selector = selectors.DefaultSelector()
        self._arrivals = ArrivalQueue(self._selector, credentials, self._refusals, self._answer)
        self._resume_accepting_at: float | None = None
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"phalanx-listener-{task}", daemon=True)

    def __enter__(self) -> Listener:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start accepting connections."""
        for sock in (*self._sockets, self._wakeup_receiver):
            sock.setblocking(False)
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ)
        self._set_accepting(True)
        _listeners.add(self)
        self._thread.start()

    def register(self, purpose: str, service: Service, *, blocks: bool = False) -> None:
        """Set the service of a purpose, and replace its previous one.

        Args:
            purpose: Purpose to serve.
            service: Service of the purpose.
            blocks: Whether the service may block; it then runs in a separate thread for each peer.
        """
        with self._lock:
            self._services[purpose] = service, blocks

    def unregister(self, purpose: str) -> None:
        """Stop serving a purpose."""
        with self._lock:
            self._services.pop(purpose, None)

    def refusal_summary(self) -> str:
        """Describe which hosts were refused so far and why, for error messages; empty without refusals."""
        return self._refusals.summary()

    def close(self) -> None:
        """Stop accepting and free the port; safe to call twice. Links that services have adopted stay open."""
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
        with contextlib.suppress(OSError):
            self._wakeup_sender.send(b"\0")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()  # no service blocks it
        else:  # not started, or already ended
            self._release()

    # ------------------------------------------------------- the listener's thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                for key, _ in self._selector.select(self._time_to_next_deadline()):
                    if isinstance(key.data, Arrival):
                        self._arrivals.advance(key.data)
                    elif key.data == "accept":
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                    else:
                        self._wakeup_receiver.recv(64)
                self._arrivals.drop_expired()
                if self._resume_accepting_at is not None and self._resume_accepting_at <= time.monotonic():
                    self._resume_accepting_at = None
                    self._set_accepting(True)
        finally:
            self._release()

    def _release(self) -> None:
        self._arrivals.close()
        self._selector.close()
        for sock in (*self._sockets, self._wakeup_receiver, self._wakeup_sender):
            sock.close()

    def _time_to_next_deadline(self) -> float | None:
        deadlines = [when for when in (self._arrivals.next_deadline, self._resume_accepting_at) if when is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _set_accepting(self, accepting: bool) -> None:
        for sock in self._sockets:
            if accepting:
                self._selector.register(sock, selectors.EVENT_READ, "accept")
            else:
                self._selector.unregister(sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                connection, endpoint = sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # closed before it was accepted
            except OSError as error:
                self._pause_accepting(error)
                return
            self._arrivals.add(connection, endpoint)

    def _pause_accepting(self, error: OSError) -> None:
        """Drop a pending connection, and pause: the process or the system is out of descriptors or memory."""
        if self._resume_accepting_at is not None:
            return
        if self._refusals.may_log():
            logger.warning("%s cannot accept connections for the moment: %s", self.task, error)
        self._arrivals.drop_one("descriptors were short")
        self._resume_accepting_at = time.monotonic() + OUT_OF_DESCRIPTORS_PAUSE_S
        self._set_accepting(False)

    def _answer(self, link: Link, hello: Hello) -> None:
        """Answer a Hello, and hand the link to its service or close it."""
        with self._lock:
            service, blocks = self._services.get(hello.purpose, (None, False))
        if blocks:
            name = f"phalanx-answer-{hello.purpose}"
            threading.Thread(target=self._answer_with, args=(service, link, hello), name=name, daemon=True).start()
        else:
            self._answer_with(service, link, hello)

    def _answer_with(self, service: Service | None, link: Link, hello: Hello) -> None:
        try:
            if hello.job != self._job:
                reason = f"this port is that of {self.task} of job {self._job!r}, not of job {hello.job!r}"
                welcome = Welcome(refusal=OTHER_JOB, reason=reason)
            elif hello.peer != self.task:
                reason = f"this port is that of {self.task}, not of {hello.peer}"
                welcome = Welcome(refusal=OTHER_TASK, reason=reason)
            elif service is None:
                reason = f"{self.task} does not serve {hello.purpose!r}, or not yet"
                welcome = Welcome(refusal=UNAVAILABLE, reason=reason)
            else:
                welcome = service.admit(hello)
            # Before `adopt`: afterward, threads of the service may send on this link, and only one may send at a time.
            link.send(msgspec.msgpack.encode(welcome), deadline=time.monotonic() + WELCOME_TIMEOUT_S)
            if welcome.refusal or service is None:
                logger.info("%s refused %s (%s): %s", self.task, hello.task, hello.purpose, welcome.reason)
                link.close()
            else:
                service.adopt(hello, link)
        except (LinkClosedError, LinkTimeoutError) as error:
            logger.info("%s left before it was answered: %s", hello.task, error)
            link.close()
        except Exception:
            # A defect in a service must not take down the port.
            logger.exception("%s could not serve %s (%s)", self.task, hello.task, hello.purpose)
            link.close()


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_inherited_listeners() -> None:
    """In a forked child: release the port, which would otherwise stay taken as long as the child lives."""
    # The hook of `transport.link` has already run, because this module imports it and so registers later. It has closed
    # the child's copies of the pending links, so `_release` does not shut down the parent's connections.
    for listener in list(_listeners):
        listener._is_stopping = True
        listener._release()


os.register_at_fork(after_in_child=_close_inherited_listeners)
