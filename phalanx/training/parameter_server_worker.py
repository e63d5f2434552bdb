"""This process as a worker among parameter servers: its links, its rules, its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.compression import BFloat16, Float16
from phalanx.parameter_server.client import HEAD, ParameterServerClient
from phalanx.parameter_server.partitioners import Partitioner
from phalanx.parameter_server.server_messages import BeginSession, Broadcast, FitOver, RequestBroadcast, UpdateRules
from phalanx.training.scope_registry import ScopeRegistry

Array = np.ndarray[Any, Any]


@dataclass
class ParameterServerWorker:
    """What training needs to know of the job.

    Attributes:
        client: the links to the servers.
        number: of this worker; 0 is the chief.
        workers: how many there are.
        rules: how updates meet; those of the chief count.
        partitioner: how variables are cut.
        compression: names the dtype in which gradients travel; None: their own.
        global_step: of the job, when this worker's last update was applied.
        embedding_rows: whether single rows of embeddings travel: True, False or "auto"; the chief's counts.
        seed: equal on all tasks; orders of data that is shuffled here follow from it.
        made: what the program has made in the strategy's scope.
        coordinator: this process's, if it has one.
        in_function: whether this process runs functions that a coordinator has scheduled.
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
    made: ScopeRegistry = field(default_factory=ScopeRegistry)
    coordinator: Any = None
    in_function: bool = False
    _fits: int = field(default=-1)
    _sessions: int = field(default=-1)
    _told: dict[str, tuple[Broadcast, list[Array]]] = field(default_factory=dict)

    @property
    def is_chief(self) -> bool:
        return self.number == 0

    def next_fit(self) -> int:
        """Numbers the calls of `fit` in the program, equally on all workers."""
        self._fits += 1
        return self._fits

    def requests_to_repeat(self) -> list[tuple[BeginSession | Broadcast, list[Array]]]:
        """What the chief has said of managed sessions, and told the others, for a head that comes back."""
        said: list[tuple[BeginSession | Broadcast, list[Array]]] = [*self._told.values()]
        return said if self._sessions < 0 else [(BeginSession(self._sessions), []), *said]

    def broadcast(self, subject: str, arrays: list[Array], fit: int = -1) -> None:
        """On the chief: what the others hear of this from now on."""
        self._told[subject] = (Broadcast(subject, fit), arrays)
        self.client.request(HEAD, *self._told[subject])

    def broadcast_first(self, subject: str, array: Array) -> memoryview:
        """On the chief: what the others hear of this for good; returns it: what the chief told in a former life, if it
        did."""
        _, buffers = self.client.request(HEAD, Broadcast(subject, keep_first=True), [array])
        self._told[subject] = (Broadcast(subject), [np.frombuffer(bytes(buffers[0]), np.uint8)])
        return buffers[0]

    def repeat_broadcasts(self) -> None:
        """On the chief: what holds for the whole program, to a first server that may be another process by now."""
        for told, arrays in [*self._told.values()]:
            if told.fit < 0:
                self.client.request(HEAD, told, arrays)

    def receive_broadcast(self, subject: str, fit: int = -1) -> list[memoryview] | None:
        """On the others: what the chief tells of this, for this `fit` or a later one; None if it left without.

        Raises: CollectiveTimeoutError or PeerLostError naming the chief.
        """
        answer, buffers = self.client.request(HEAD, RequestBroadcast(subject, fit))
        return None if isinstance(answer, FitOver) else list(buffers)

    def begin_session(self) -> None:
        """On the chief: what this managed session starts from is restored. On others: wait until it is.

        Raises: CollectiveTimeoutError or PeerLostError naming the chief.
        """
        self._sessions += 1
        self.client.request(HEAD, BeginSession(self._sessions))

    @property
    def last_fit(self) -> int:
        """The number of the last `fit`; -1 before the first."""
        return self._fits

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
