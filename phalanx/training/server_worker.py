"""This process as a worker among parameter servers: its links, its rules, its place."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.parameter_server.client import Client
from phalanx.parameter_server.messages import Rules
from phalanx.parameter_server.partition import Partitioner


@dataclass
class ServerWorker:
    """What training needs to know of the job.

    Attributes:
        client: the links to the servers.
        number: of this worker; 0 is the chief.
        workers: how many there are.
        rules: how updates meet; those of the chief count.
        partitioner: how variables are cut.
        compression: dtype in which gradients travel; None: their own.
        global_step: of the job, when this worker's last update was applied.
        embedding_rows: whether single rows of embeddings travel: True, False or "auto"; the chief's counts.
        seed: equal on all tasks; orders of data that is shuffled here follow from it.
    """

    client: Client
    number: int
    workers: int
    rules: Rules
    partitioner: Partitioner | None
    compression: str | None
    seed: str
    embedding_rows: bool | str = "auto"
    global_step: int = 0
    _fits: int = field(default=-1)

    @property
    def is_chief(self) -> bool:
        return self.number == 0

    def next_fit(self) -> int:
        """Numbers the calls of `fit` in the program, equally on all workers."""
        self._fits += 1
        return self._fits

    def describe(self) -> str:
        rules = self.rules
        if rules.synchronous:
            mode = f"synchronous, of the first {rules.at_least} workers" if rules.at_least else "synchronous"
        elif rules.staleness >= 0:
            mode = f"asynchronous, at most {rules.staleness} steps apart"
        else:
            mode = "asynchronous"
        return f"Parameter servers: {self.client.servers} for {self.workers} workers, {mode}."
