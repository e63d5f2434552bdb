"""One worker's copy of a model whose variables parameter servers train."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from phalanx.data import ShardedInput
from phalanx.engines import make_engine
from phalanx.engines.engine import Batch, Engine
from phalanx.errors import DisagreementError
from phalanx.parameter_server.client.parameter_client import HEAD
from phalanx.parameter_server.server_messages import HoldSteps, Values
from phalanx.training import callback_hooks
from phalanx.training.checks.model_checks import check_normalization, check_served, check_stateless
from phalanx.training.checks.program_probes import IndependentProbing, ProgramProbes
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.remote_variables import RemoteVariables
from phalanx.training.sparse_embeddings import EmbeddingTable, SparseEmbeddings, find_tables, select_tables
from phalanx.training.steps.optimizer_properties import set_step_count
from phalanx.training.steps.parameter_server_step import ParameterServerMerge

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

CONSISTENCY_S = 2.0
"""How long the servers may take to apply updates that are still in flight. A server that a lost worker's last update
did not reach never catches up with the others."""


class RemoteModel:
    """The model, the engine that computes its gradients, and the values that the servers have of it.

    During `fit` the servers have the newest values. This object fetches them for callers that read the model, and sends
    what callbacks of the chief have changed.

    Attributes:
        merge: takes gradients to the servers, and new values back.
        embeddings: of which only the rows that a batch uses travel, if there are any.
        is_training: whether a `fit` runs.
    """

    def __init__(self, model: Any, worker: ParameterServerWorker) -> None:
        self.model = model
        self.merge = ParameterServerMerge(worker)
        self.embeddings: SparseEmbeddings | None = None
        self.is_training = False
        self._worker = worker
        self._engine: Engine | None = None
        self._variables: RemoteVariables | None = None
        # In asynchronous training, each worker's batch is a step.
        divides_batches = worker.workers > 1 and worker.rules.synchronous
        self._probes = ProgramProbes(model, IndependentProbing(divides_batches=divides_batches))
        self._sample: Batch | None = None  # the first batch
        # Whether the servers have newer embedding tables than the model, and newer optimizer state of these.
        self._tables_stale = self._slots_stale = False
        self._version_offsets: list[int] = []  # by how much the servers' versions differ for good, once that is known

    @property
    def engine(self) -> Engine:
        """Of this model; there once it was prepared."""
        assert self._engine is not None, "the model is prepared before the first step"
        return self._engine

    @property
    def variables(self) -> RemoteVariables:
        """The variables on the servers; there once this worker was attached to a `fit`."""
        assert self._variables is not None, "the model is declared before the first step"
        return self._variables

    # Before the first step.

    def prepare(self, source: ShardedInput) -> Engine:
        """The engine, with all variables created for the batches of the source.

        Raises: UnsupportedError for models that parameter servers can't train.
        """
        model, worker = self.model, self._worker
        check_served(model)
        if worker.workers > 1:
            check_stateless(model)
        if self._engine is None:
            self._engine = make_engine(model, self.merge)
        engine = self._engine
        self._sample = source.peek(restart=engine.builds_from_a_batch).data
        engine.expect(source.structure)
        engine.build(self._sample)
        self._probes.run(engine, self._sample, source.structure, ["train_step"])
        if worker.workers > 1 and not worker.rules.is_lockstep:
            check_normalization(model)
        return engine

    def attach(self, fit: int, first_epoch: int, callbacks: Any) -> int | None:
        """Agree with the servers on the variables; returns the first epoch, which the chief knows, or None if the chief
        is in a later `fit`.

        Args:
            fit: number of this call of `fit` in the program.
            first_epoch: index of the epoch with which the chief begins; ignored on other workers.
            callbacks: the `CallbackList` of this worker.
        """
        model = self.model
        self._variables = variables = RemoteVariables(
            self._worker, self.merge, model.optimizer, model.trainable_variables
        )
        found = find_tables(model, variables.slots)
        chosen = tuple(table.number for table in self._choose(found, callbacks)) if self._worker.is_chief else ()
        epoch = variables.begin(fit, first_epoch, chosen)
        self.is_training = True  # not before: if that fails, no server has anything to pull
        if epoch is not None:
            self._use_tables(found, variables.tables)
        return epoch

    def _choose(self, found: Sequence[EmbeddingTable], callbacks: Any) -> list[EmbeddingTable]:
        """On the chief: the tables of which single rows travel."""
        wanted = self._worker.embedding_rows
        if wanted is not False and found and callback_hooks.saves_between_batches(callbacks):
            logger.warning(
                "Whole embedding tables are sent at every step, because a callback saves the model between batches."
            )
            wanted = False
        sample = self._sample
        return select_tables(found, wanted, lambda tables: SparseEmbeddings(self.model, tables).count(sample))

    def _use_tables(self, found: Sequence[EmbeddingTable], numbers: Sequence[int]) -> None:
        """Let single rows travel of the tables that the chief has chosen, by numbers of variables."""
        tables = [table for table in found if table.number in numbers]
        for table in tables:
            if table.problem:
                raise DisagreementError(
                    f"The chief sends single rows of the table {table}; this task cannot, because "
                    f"{table.problem}. Every task must build the same model, or pass embedding_rows=False to "
                    f"ParameterServerStrategy."
                )
        assert len(tables) == len(numbers), "the variables have been compared"
        if not (self.embeddings.serves(tables) if self.embeddings is not None else not tables):
            self.embeddings = SparseEmbeddings(self.model, tables) if tables else None
            if self._engine is not None:
                # Other layers look up rows now, so what was traced holds the wrong variables.
                self._engine.retrace()

    # From the servers.

    def pull(self) -> None:
        """Put the servers' newest weights into the model, embedding tables excepted."""
        self.variables.assign(self.merge.pull())

    def pull_optimizer(self, *, tables: bool = True) -> None:
        """Put the servers' optimizer state into the model's optimizer; without `tables`, not that of these."""
        self.variables.pull_optimizer(tables=tables)
        self._slots_stale &= not tables

    def pull_tables(self) -> None:
        """Put the servers' embedding tables into the model, if they are newer than its own."""
        if self.embeddings is not None and self._tables_stale:
            self.merge.flush()
            self.embeddings.assign(self.merge.rows.pull_tables())
            self._tables_stale = False

    def mark_stale(self) -> None:
        """Steps were taken: the servers have newer embedding tables."""
        self._tables_stale = self._slots_stale = self.embeddings is not None

    def pull_after_epoch(self, *, tables: bool) -> None:
        """On the chief: put everything that it may save into the model, and note that the servers have just that.

        Args:
            tables: whether anything reads the embedding tables.
        """
        self.send_learning_rate()  # set after the last batch, it would be overwritten by what is pulled
        self.pull()
        self.pull_optimizer(tables=tables)
        if tables:
            self.pull_tables()
        # The next `send_changes` compares with this: what differs then was set by a callback.
        self.variables.record_values(tables=tables)

    def pull_final(self) -> None:
        """At the end of `fit`: put the final weights into the model, on the chief also the optimizer's state."""
        self.pull()
        if self._slots_stale and self._worker.is_chief:
            self.pull_optimizer()
        self.pull_tables()
        self.is_training = False

    def leave_steps(self) -> None:
        """Give the model its whole tables again, and all variables their values."""
        self.engine.end()
        if self.embeddings is not None:
            self.embeddings.leave()

    def refresh(self) -> None:
        """During `fit`, perhaps between two batches: put the newest weights into the model. After it the model has the
        last ones, or others on purpose."""
        if self.is_training:
            self.leave_steps()
            self._tables_stale = self.embeddings is not None
            self.pull()
            self.pull_tables()

    def pull_consistent(self) -> None:
        """During `fit`, for a callback of the chief that saves the model, or at a failure: put weights and optimizer
        state of one step into it. No worker is in the middle of a step, and all servers have applied as many."""
        if not self.is_training:
            return
        self.leave_steps()
        self.send_learning_rate()
        with self._between_steps():
            until = time.monotonic() + CONSISTENCY_S
            # Servers apply a step independently: at any moment some may have one more. Pull until all agree, or until
            # they differ as they did before, which a lost update makes permanent.
            while True:
                self._tables_stale = True
                self.pull()
                self.pull_tables()
                versions = [*self.merge.transfer.dense_versions(), *self.variables.pull_optimizer()]
                offsets = [version - versions[0] for version in versions]
                if not any(offsets) or offsets == self._version_offsets:
                    break
                if time.monotonic() > until:
                    self._version_offsets = offsets
                    break
                time.sleep(0.001)
            count_steps(self, self._worker)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """While inside, no worker takes a step. Where all take each step together the chief's own pause is enough."""
        if self._worker.rules.is_lockstep:
            yield
            return
        self.merge.flush()
        answer, _ = self._worker.client.request(HEAD, HoldSteps(True))
        assert isinstance(answer, Values)
        self._worker.global_step = self.merge.tickets.note_count(answer)
        try:
            yield
        finally:
            self._worker.client.request(HEAD, HoldSteps(False))

    # To the servers.

    def send_changes(self) -> None:
        """Send the chief's learning rate and weights, which a callback may have set between two epochs."""
        self.send_learning_rate()
        if self._worker.is_chief and self.variables.send_changes():
            self.merge.pull()  # else it would have the former values while its first step is not answered yet

    def send_learning_rate(self) -> None:
        """Send the chief's learning rate, if a callback has set it."""
        if self._worker.is_chief:
            self.variables.send_learning_rate()


def count_steps(remote_model: RemoteModel, worker: ParameterServerWorker) -> None:
    """Set the count of steps of this worker's optimizer from the job's."""
    set_step_count(remote_model.model.optimizer, worker.global_step - remote_model.merge.tickets.ahead)
