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
from phalanx.training.checks.model_checks import check_normalization, check_server_support, check_stateless
from phalanx.training.checks.program_probes import LocalFindings, ProgramProbes
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.remote_variables import RemoteVariables
from phalanx.training.sparse_embeddings import EmbeddingTable, SparseEmbeddings, find_tables, select_tables
from phalanx.training.steps.optimizer_properties import set_step_count
from phalanx.training.steps.parameter_server_step import ParameterServerMerge

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

CONSISTENCY_TIMEOUT_S = 2.0
"""Seconds that the servers may take to apply updates that are still in flight. A server that did not receive a lost
worker's last update never catches up with the others."""


class RemoteModel:
    """The model, the engine that computes its gradients, and its values on the servers.

    During `fit` the servers have the newest values. This object fetches them for callers that read the model, and sends
    what the chief's callbacks have changed.

    Attributes:
        merge: Sends gradients to the servers and returns new values.
        embeddings: Embeddings whose rows are sent only when a batch uses them, if there are any.
        is_training: Whether a `fit` is running.
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
        self._probes = ProgramProbes(model, LocalFindings(divides_batches=divides_batches))
        self._sample: Batch | None = None  # the first batch
        # Whether the servers have newer embedding tables than the model, and newer optimizer state for these tables.
        self._tables_stale = self._slots_stale = False
        self._version_offsets: list[int] = []  # lasting differences between the servers' versions, once known

    @property
    def engine(self) -> Engine:
        """Engine of this model; available after `prepare`."""
        assert self._engine is not None, "the model is prepared before the first step"
        return self._engine

    @property
    def variables(self) -> RemoteVariables:
        """The variables on the servers; available after `attach`."""
        assert self._variables is not None, "the model is declared before the first step"
        return self._variables

    # Before the first step.

    def prepare(self, source: ShardedInput) -> Engine:
        """Return the engine, with all variables created for the batches of the source.

        Raises: UnsupportedError for models that parameter servers can't train.
        """
        model, worker = self.model, self._worker
        check_server_support(model)
        if worker.workers > 1:
            check_stateless(model)
        if self._engine is None:
            self._engine = make_engine(model, self.merge)
        engine = self._engine
        self._sample = source.peek(restart=engine.needs_batch_to_build).data
        engine.set_batch_structure(source.structure)
        engine.build(self._sample)
        self._probes.run(engine, self._sample, source.structure, ["train_step"])
        if worker.workers > 1 and not worker.rules.is_lockstep:
            check_normalization(model)
        return engine

    def attach(self, fit: int, first_epoch: int, callbacks: Any) -> int | None:
        """Agree with the servers on the variables. Returns the chief's first epoch; None if it is in a later `fit`.

        Args:
            fit: Number of this `fit` call in the program.
            first_epoch: Index of the epoch with which the chief begins; ignored on other workers.
            callbacks: The `CallbackList` of this worker.
        """
        model = self.model
        self._variables = variables = RemoteVariables(
            self._worker, self.merge, model.optimizer, model.trainable_variables
        )
        found = find_tables(model, variables.slots)
        chosen = tuple(table.number for table in self._choose_tables(found, callbacks)) if self._worker.is_chief else ()
        epoch = variables.begin(fit, first_epoch, chosen)
        self.is_training = True  # not before: if that fails, no server has anything to pull
        if epoch is not None:
            self._use_tables(found, variables.tables)
        return epoch

    def _choose_tables(self, found: Sequence[EmbeddingTable], callbacks: Any) -> list[EmbeddingTable]:
        """On the chief, the tables that are sent by rows."""
        wanted = self._worker.embedding_rows
        if wanted is not False and found and callback_hooks.saves_between_batches(callbacks):
            logger.warning(
                "Whole embedding tables are sent at every step, because a callback saves the model between batches."
            )
            wanted = False
        sample = self._sample
        return select_tables(found, wanted, lambda tables: SparseEmbeddings(self.model, tables).count(sample))

    def _use_tables(self, found: Sequence[EmbeddingTable], numbers: Sequence[int]) -> None:
        """Send by rows the tables that the chief has chosen, given as numbers of variables."""
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
                # Other layers look up rows now, so traced functions hold the wrong variables.
                self._engine.retrace()

    # From the servers.

    def pull(self) -> None:
        """Copy the servers' newest weights, except embedding tables, into the model."""
        self.variables.assign(self.merge.pull())

    def pull_optimizer(self, *, tables: bool = True) -> None:
        """Copy the servers' optimizer state into the model's optimizer; without `tables`, not that of the tables."""
        self.variables.pull_optimizer(tables=tables)
        self._slots_stale &= not tables

    def pull_tables(self) -> None:
        """Copy the servers' embedding tables into the model, if they are newer."""
        if self.embeddings is not None and self._tables_stale:
            self.merge.flush()
            self.embeddings.assign(self.merge.rows.pull_tables())
            self._tables_stale = False

    def mark_stale(self) -> None:
        """Record that steps were taken, so that the servers have newer embedding tables."""
        self._tables_stale = self._slots_stale = self.embeddings is not None

    def pull_after_epoch(self, *, tables: bool) -> None:
        """On the chief, copy everything that it may save into the model, and record that the servers have the same.

        Args:
            tables: Whether anything reads the embedding tables.
        """
        self.send_learning_rate()  # pulling would overwrite a rate that was set after the last batch
        self.pull()
        self.pull_optimizer(tables=tables)
        if tables:
            self.pull_tables()
        # The next `send_changes` compares with this: any difference was set by a callback.
        self.variables.record_values(tables=tables)

    def pull_final(self) -> None:
        """At the end of `fit`, copy the final weights into the model, and on the chief also the optimizer's state."""
        self.pull()
        if self._slots_stale and self._worker.is_chief:
            self.pull_optimizer()
        self.pull_tables()
        self.is_training = False

    def leave_steps(self) -> None:
        """Restore the model's whole tables, and the values of all variables."""
        self.engine.end()
        if self.embeddings is not None:
            self.embeddings.restore_tables()

    def refresh(self) -> None:
        """During `fit`, perhaps between two batches, copy the newest weights into the model. After `fit`, the model
        already has the final weights, or others on purpose."""
        if self.is_training:
            self.leave_steps()
            self._tables_stale = self.embeddings is not None
            self.pull()
            self.pull_tables()

    def pull_consistent(self) -> None:
        """During `fit`, copy weights and optimizer state of one step into the model: for a callback of the chief that
        saves the model, or at a failure. No worker is in the middle of a step, and all servers have applied the same
        steps."""
        if not self.is_training:
            return
        self.leave_steps()
        self.send_learning_rate()
        with self._between_steps():
            until = time.monotonic() + CONSISTENCY_TIMEOUT_S
            # Servers apply a step independently: at any moment some may be one step ahead. Pull until all agree, or
            # until they differ as before, because a lost update makes the difference permanent.
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
        """Prevent workers from taking steps inside the block. In lockstep, the chief's own pause is enough."""
        if self._worker.rules.is_lockstep:
            yield
            return
        self.merge.flush()
        answer, _ = self._worker.client.request(HEAD, HoldSteps(True))
        assert isinstance(answer, Values)
        self._worker.global_step = self.merge.tickets.record_step_count(answer)
        try:
            yield
        finally:
            self._worker.client.request(HEAD, HoldSteps(False))

    # To the servers.

    def send_changes(self) -> None:
        """Send the chief's learning rate and weights, which a callback may have set between two epochs."""
        self.send_learning_rate()
        if self._worker.is_chief and self.variables.send_changes():
            self.merge.pull()  # otherwise it would have the previous values until its first step is answered

    def send_learning_rate(self) -> None:
        """Send the chief's learning rate, if a callback has set it."""
        if self._worker.is_chief:
            self.variables.send_learning_rate()


def count_steps(remote_model: RemoteModel, worker: ParameterServerWorker) -> None:
    """Set the step count of this worker's optimizer from the job's."""
    set_step_count(remote_model.model.optimizer, worker.global_step - remote_model.merge.tickets.step_offset)
