"""This process as a worker among parameter servers, and what the chief broadcasts to the other workers."""

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
"""The subject of the broadcast, without arrays, that a managed session has begun."""


@dataclass
class ParameterServerWorker:
    """What training needs to know of the job.

    Attributes:
        client: The connections to the servers.
        number: Number of this worker; 0 is the chief.
        workers: Number of workers.
        rules: How gradients become updates; the chief's are used.
        partitioner: How variables are cut; None: they are not.
        compression: The dtype in which gradients are sent; None: their own.
        seed: Equal on all tasks; determines the sample orders that are drawn here.
        embedding_rows: Whether embeddings are trained by rows: True, False or "auto"; the chief's is used.
        global_step: Number of updates of the job when this worker's last one was applied.
        scope_registry: The objects that the program has created in the strategy's scope.
        coordinator: The `ClusterCoordinator` of this process, if there is one.
        in_function: Whether this process runs functions that a coordinator has scheduled.
        calls: On the chief: takes calls of a model's methods to workers that run no program of their own; None: there
            are none.
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
    # program; and how many calls of `fit` run, one at most.
    _last: dict[str, int] = field(default_factory=lambda: {"fit": -1, "session": -1, "running": 0})
    # On the chief, by subject: what a head that comes back must have again.
    _broadcasts: dict[str, tuple[Broadcast, list[Array]]] = field(default_factory=dict)

    @property
    def traffic(self) -> Traffic:
        """The bytes sent and the time waited by this worker, for monitoring. May be read from any thread."""
        client = self.client
        on_links = sum(each.bytes_sent for each in client.reconnection.connections if each.channel is None)
        return Traffic(client.bytes_sent, on_links, client.waited_s)

    @property
    def is_chief(self) -> bool:
        return self.number == 0

    def is_job_over(self) -> bool:
        """Whether the chief has left the job."""
        return self.client.ask_head(QueryJobOver())

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """While inside, a `fit` of the program runs.

        Raises: UnsupportedError on entry if one runs already: the servers would give up the first one's schedule.
        """
        if self._last["running"]:
            raise UnsupportedError(
                "fit() was called while another fit() trains on the parameter servers, one model at a time. "
                "Call it after that one has returned; or create the inner model outside of strategy.scope(): Keras "
                "then trains it on each worker by itself."
            )
        self._last["running"] = 1
        try:
            yield
        finally:
            self._last["running"] = 0

    def next_fit(self) -> int:
        """Numbers the calls of `fit` in the program, equally on all workers."""
        self._last["fit"] += 1
        return self._last["fit"]

    def begin_at(self, fit: int) -> None:
        """Let the next `fit` be that of this number."""
        self._last["fit"] = fit - 1

    def requests_to_repeat(self) -> list[tuple[Broadcast, list[Array]]]:
        """On the chief: its broadcasts, for a head that comes back."""
        return [*self._broadcasts.values()]

    def broadcast(self, subject: str, arrays: list[Array], fit: int = -1) -> None:
        """On the chief: send arrays to the other workers.

        Args:
            subject: What the arrays are.
            arrays: Replace those broadcast before.
            fit: First `fit` for which they hold; -1: for the whole program.
        """
        # Kept before it is sent: if the head is lost on the way, its successor gets it with the requests to repeat.
        self._broadcasts[subject] = (Broadcast(subject, fit), arrays)
        self.client.request(HEAD, *self._broadcasts[subject])

    def last_broadcast(self, subject: str) -> list[Array] | None:
        """On the chief: what this process, and no former one, has broadcast last; None if it has not."""
        return self._broadcasts[subject][1] if subject in self._broadcasts else None

    def broadcast_first(self, subject: str, array: Array) -> memoryview:
        """On the chief: send an array to the other workers, unless the chief has sent one before a restart.

        Returns: the bytes of the array that holds.
        """
        _, buffers = self.client.request(HEAD, Broadcast(subject, keep_first=True), [array])
        self._broadcasts[subject] = (Broadcast(subject), [np.frombuffer(bytes(buffers[0]), np.uint8)])
        return buffers[0]

    def repeat_broadcasts(self) -> None:
        """On the chief: repeat what holds for the whole program; the head may be another process by now."""
        for message, arrays in [*self._broadcasts.values()]:
            if message.fit < 0:
                self.client.request(HEAD, message, arrays)

    def receive_broadcast(self, subject: str, fit: int = -1) -> list[memoryview] | None:
        """On the others: the chief's arrays for this `fit` or a later one; None if it leaves without sending any.

        Raises: CollectiveTimeoutError or PeerLostError naming the chief.
        """
        answer, buffers = self.client.request(HEAD, RequestBroadcast(subject, fit))
        return None if isinstance(answer, FitOver) else list(buffers)

    def begin_session(self) -> None:
        """On the chief: the state that this managed session starts from is restored. On others: wait until it is.

        Raises: CollectiveTimeoutError or PeerLostError naming the chief.
        """
        self._last["session"] += 1
        if self.is_chief:
            self.broadcast(SESSION, [], self._last["session"])
        elif self.receive_broadcast(SESSION, self._last["session"]) is None:
            raise peer_lost("the chief", "the start of a managed session", "it has left the job.")

    @property
    def last_fit(self) -> int:
        """The number of the last `fit`; -1 before the first."""
        return self._last["fit"]

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
