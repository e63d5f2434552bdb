"""This process as a worker with parameter servers, and the chief's broadcasts to the other workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.compression import BFloat16, Float16
from phalanx.errors import UnsupportedError
from phalanx.parameter_server.client.parameter_client import HEAD, ParameterServerClient
from phalanx.parameter_server.partitioners import Partitioner
from phalanx.parameter_server.server_messages import (
    Broadcast,
    FitOver,
    QueryJobOver,
    RequestBroadcast,
    UpdateRules,
)
from phalanx.parameter_server.server_protocol import peer_lost
from phalanx.runtime.traffic_account import Traffic
from phalanx.training.replica import ReplicaCalls
from phalanx.training.scope_registry import ScopeRegistry

Array = np.ndarray[Any, Any]

SESSION = "managed session"
"""Subject of the broadcast, without arrays, that a managed session has begun."""


@dataclass
class ParameterServerWorker:
    """State of the job that training needs.

    Attributes:
        client: The connections to the servers.
        number: Number of this worker; 0 is the chief.
        workers: Number of workers.
        rules: Rules by which gradients become updates; the chief's are used.
        partitioner: Function that decides how variables are cut; None: they are not.
        compression: Format in which gradients are sent; None: their own dtype.
        seed: Value, equal on all tasks, that determines the sample orders drawn here.
        embedding_rows: Whether embeddings are trained by rows: True, False or "auto"; the chief's is used.
        global_step: Number of updates of the job when this worker's last update was applied.
        scope_registry: Objects that the program has created in the strategy's scope.
        coordinator: `ClusterCoordinator` of this process, if there is one.
        in_function: Whether this process runs functions that a coordinator has scheduled.
        calls: Sends calls of a model's methods to workers that run no program of their own; None if there are none.
            Used on the chief.
    """

    client: ParameterServerClient
    number: int
    workers: int
    rules: UpdateRules
    partitioner: Partitioner | None
    compression: Float16 | BFloat16 | None
    seed: str
    embedding_rows: bool | str = "auto"
    global_step: int = 0
    scope_registry: ScopeRegistry = field(default_factory=ScopeRegistry)
    coordinator: Any = None
    in_function: bool = False
    calls: ReplicaCalls | None = None
    # The numbers of the last `fit` and of the last managed session, equal on all workers because all run the same
    # program; and how many calls of `fit` are running, at most one.
    _counters: dict[str, int] = field(default_factory=lambda: {"fit": -1, "session": -1, "running": 0})
    # On the chief, by subject: what a restarted head must receive again.
    _broadcasts: dict[str, tuple[Broadcast, list[Array]]] = field(default_factory=dict)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and time waited by this worker, for monitoring. May be read from any thread."""
        client = self.client
        on_links = sum(each.bytes_sent for each in client.reconnection.connections if each.channel is None)
        return Traffic(client.bytes_sent, on_links, client.waited_s)

    @property
    def is_chief(self) -> bool:
        return self.number == 0

    def is_job_over(self) -> bool:
        """Whether the chief has left the job."""
        return self.client.query_head(QueryJobOver())

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Mark a `fit` of the program as running inside the block.

        Raises: UnsupportedError on entry if one is already running: the servers would abandon its schedule.
        """
        if self._counters["running"]:
            raise UnsupportedError(
                "fit() was called while another fit() trains on the parameter servers, one model at a time. "
                "Call it after that one has returned; or create the inner model outside of strategy.scope(): Keras "
                "then trains it on each worker by itself."
            )
        self._counters["running"] = 1
        try:
            yield
        finally:
            self._counters["running"] = 0

    def next_fit(self) -> int:
        """Return the number of a new `fit` call in the program, equal on all workers."""
        self._counters["fit"] += 1
        return self._counters["fit"]

    def set_next_fit(self, fit: int) -> None:
        """Give the next `fit` this number."""
        self._counters["fit"] = fit - 1

    def requests_to_repeat(self) -> list[tuple[Broadcast, list[Array]]]:
        """The chief's broadcasts, for a restarted head."""
        return [*self._broadcasts.values()]

    def broadcast(self, subject: str, arrays: list[Array], fit: int = -1) -> None:
        """As the chief, send arrays to the other workers.

        Args:
            subject: Name of the arrays' content.
            arrays: Arrays that replace those broadcast before.
            fit: First `fit` to which they apply; -1: the whole program.
        """
        # Stored before it is sent: if the head is lost meanwhile, its successor gets it with the requests to repeat.
        self._broadcasts[subject] = (Broadcast(subject, fit), arrays)
        self.client.request(HEAD, *self._broadcasts[subject])

    def last_broadcast(self, subject: str) -> list[Array] | None:
        """On the chief, the last broadcast of this process, not of a previous one; None if there is none."""
        return self._broadcasts[subject][1] if subject in self._broadcasts else None

    def broadcast_once(self, subject: str, array: Array) -> memoryview:
        """As the chief, send an array to the other workers, unless the chief has sent one before a restart.

        Returns: the bytes of the array in effect.
        """
        _, buffers = self.client.request(HEAD, Broadcast(subject, keep_first=True), [array])
        self._broadcasts[subject] = (Broadcast(subject), [np.frombuffer(bytes(buffers[0]), np.uint8)])
        return buffers[0]

    def repeat_broadcasts(self) -> None:
        """As the chief, repeat the broadcasts that apply to the whole program; the head may be another process now."""
        for message, arrays in [*self._broadcasts.values()]:
            if message.fit < 0:
                self.client.request(HEAD, message, arrays)

    def receive_broadcast(self, subject: str, fit: int = -1) -> list[memoryview] | None:
        """On other workers, the chief's arrays for this `fit` or a later one; None if it leaves without sending any.

        Raises: CollectiveTimeoutError or PeerLostError naming the chief.
        """
        answer, buffers = self.client.request(HEAD, RequestBroadcast(subject, fit))
        return None if isinstance(answer, FitOver) else list(buffers)

    def synchronize_session_start(self) -> None:
        """On the chief, announce that the initial state of this managed session is restored. On others, wait for that.

        Raises: CollectiveTimeoutError or PeerLostError naming the chief.
        """
        self._counters["session"] += 1
        if self.is_chief:
            self.broadcast(SESSION, [], self._counters["session"])
        elif self.receive_broadcast(SESSION, self._counters["session"]) is None:
            raise peer_lost("the chief", "the start of a managed session", "it has left the job.")

    @property
    def last_fit(self) -> int:
        """Number of the last `fit`; -1 before the first."""
        return self._counters["fit"]

    def describe(self) -> str:
        rules = self.rules
        if rules.synchronous:
            mode = (
                f"synchronous, of the first {rules.replicas_to_aggregate} workers"
                if rules.replicas_to_aggregate
                else "synchronous"
            )
        elif rules.staleness >= 0:
            mode = f"asynchronous, at most {rules.staleness} steps apart"
        else:
            mode = "asynchronous"
        return f"Parameter servers: {self.client.num_servers} for {self.workers} workers, {mode}."
