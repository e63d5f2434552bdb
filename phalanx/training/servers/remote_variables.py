"""The variables of one task that servers train: declared by the chief, compared by the others."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from phalanx.engines.updater import check_optimizer, clip_gradients, clips_by_norm
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.copies.object_config import config_json_of
from phalanx.keras_compat.global_batch.global_gradients import refuse_overwritten
from phalanx.keras_compat.variables.host_values import host_copy, to_host
from phalanx.keras_compat.variables.optimizer_slots import OptimizerSlot, check_methods, plain_settings, slots_of_model
from phalanx.parameter_server.client.parameter_client import HEAD
from phalanx.parameter_server.client.placed_variables import PlacedVariables
from phalanx.parameter_server.server_messages import (
    AssignVariables,
    DeclareModel,
    FitJoined,
    JoinFit,
    ModelDescription,
    PullOptimizer,
    SetLearningRate,
    Values,
    arrays_of,
)
from phalanx.parameter_server.shard_placement import PlacedVariable, place_shards
from phalanx.runtime import progress
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.steps.parameter_server_step import ParameterServerMerge
from phalanx.transport.frames import byte_view

Array = np.ndarray[Any, Any]

SWAP_TOLERANCE = 1e-5
"""Change that an exchange with the weights and back may cause, relative to an average's largest value."""


class RemoteVariables:
    """Variables of this task, and the optimizer that updates them on the servers.

    Args:
        worker: This process as a worker.
        merge: Sends gradients to the servers.
        optimizer: A built Keras optimizer.
        variables: The built variables to train, in the same order on every task.

    Attributes:
        slots: The variable that each of the optimizer's variables belongs to.
        tables: Numbers of the variables that are trained by rows.

    Raises: UnsupportedError for an optimizer that cannot run on servers.
    """

    def __init__(
        self, worker: ParameterServerWorker, merge: ParameterServerMerge, optimizer: Any, variables: Sequence[Any]
    ) -> None:
        self.optimizer = optimizer
        self.variables = list(variables)
        if not self.variables:
            raise UnsupportedError(
                "The model has no trainable weights (`trainable` is False everywhere?), so there is nothing that "
                "servers could train. Use evaluate() to measure it."
            )
        self._worker = worker
        self._client = worker.client
        self._merge = merge
        # The servers' learning rate; None before it is declared, and for schedules, which the servers compute
        # themselves.
        self._rate: float | None = None
        self._fit = -1
        # Checksum of each variable's value on the servers, by number; empty until an epoch has begun. Copies would take
        # as much memory as the model.
        self._recorded_checksums: dict[int, int] = {}
        self._recorded_optimizer = self._optimizer_settings()
        self.tables: tuple[int, ...] = ()
        self._described = described = [PlacedVariable(v.path, tuple(v.shape), _dtype_of(v)) for v in self.variables]
        self._shards = shards = place_shards(described, self._client.num_servers, worker.partitioner)
        in_pieces = len(shards) > len(described)
        whole = self._client.num_servers == 1 and not in_pieces
        check_optimizer(
            optimizer,
            is_sharded=in_pieces,
            is_on_one_server=whole,
            is_partial=bool(worker.rules.replicas_to_aggregate),
        )
        refuse_overwritten(self.variables, "a parameter server")
        if in_pieces and any(v.constraint is not None for v in self.variables):
            raise UnsupportedError(
                "A variable with a constraint cannot be cut: it may look at all of its rows. Leave out "
                "variable_partitioner, or the constraint."
            )
        self.slots = slots_of_model(optimizer, self.variables)
        self._placed = PlacedVariables(described, shards, self._client.num_servers)
        # If no server sees all gradients, workers clip them.
        self._clip = None if whole or not clips_by_norm(optimizer) else partial(clip_gradients, optimizer)

    def begin(self, fit: int, first_epoch: int = 0, tables: tuple[int, ...] = ()) -> int | None:
        """Agree with the servers on the variables to train.

        Args:
            fit: Number of the `fit` call.
            first_epoch: Number of its first epoch; used on the chief.
            tables: Numbers of the variables that are trained by rows; used on the chief.

        Returns: the chief's first epoch; None if the chief is already in a later `fit`.
        """
        self._fit = fit
        if self._worker.is_chief:
            self._worker.repeat_broadcasts()
            self._declare(fit, first_epoch, tables)
        self._client.is_starting = True
        progress.report("initial values")
        answers = self._client.request_all([(JoinFit(fit, self._placed.variables), ())] * self._client.num_servers)
        attached = [answer for answer, _ in answers if isinstance(answer, FitJoined)]
        if len(attached) < len(answers):
            return None
        answer = attached[HEAD]
        tickets, self.tables = self._merge.tickets, answer.tables
        tickets.era, tickets.step_offset = answer.era, answer.step_offset
        # It may be less than before if the chief was restarted.
        self._worker.global_step = tickets.record_step_count(answer)
        groups = [each.groups for each in attached]
        self._placed = PlacedVariables(self._described, self._shards, self._client.num_servers, self.tables, groups)
        if self._clip is not None and self.tables and self._worker.rules.synchronous:
            raise UnsupportedError(
                "The optimizer clips by the norm of merged gradients, of which each of several servers has only "
                "a part, and embeddings are trained by rows. Pass embedding_rows=False, use one server, or clipvalue."
            )
        self._merge.set_variables(fit, self._placed, self._clip)
        self._client.reconnection.rejoin_requests = self._rejoin_requests
        return answer.first_epoch

    def _rejoin_requests(self, server: int) -> list[tuple[Any, Sequence[Array]]]:
        """Requests for a restarted server, if no schedule issues tickets."""
        of_chief = self._worker.requests_to_repeat() if server == HEAD else []
        return [(self._merge.rejoin(server), []), *self.requests_to_repeat(), *of_chief]

    def assign(self, values: Sequence[Array | None]) -> None:
        """Assign values to this task's variables; a variable whose value is None is unchanged."""
        for variable, value in zip(self.variables, values, strict=True):
            if value is not None:
                variable.assign(value)

    def pull_optimizer(self, *, tables: bool = True) -> list[int]:
        """Copy the optimizer's state from the servers into this task's optimizer, for saving.

        Args:
            tables: Whether to include the state of variables that are trained by rows.

        Returns: the versions of the servers' values.
        """
        concerned = {
            slot: variable
            for slot, variable in zip(self.slots, self.optimizer.variables, strict=True)
            if tables or slot.variable not in self.tables
        }
        state = {slot: host_copy(variable) for slot, variable in concerned.items()}
        answers = self._client.request_all([(PullOptimizer(tables), ())] * self._client.num_servers)
        for server, (answer, buffers) in enumerate(answers):
            assert isinstance(answer, Values)
            places = _slots_on(self.slots, self._placed, server)
            for key, value in zip(answer.slots, arrays_of(buffers, answer.dtypes), strict=True):
                slot, rows = places[key]
                state[slot][rows] = value.reshape(state[slot][rows].shape)
        for slot, variable in concerned.items():
            variable.assign(state[slot])
        return [answer.version for answer, _ in answers if isinstance(answer, Values) and answer.slots]

    def requests_to_repeat(self) -> list[tuple[Any, Sequence[Array]]]:
        """Requests since the start of the `fit` that a restarted server may not have received."""
        return [] if self._rate is None else [(SetLearningRate(self._rate), [])]

    def record_values(self, *, tables: bool) -> None:
        """Record that the variables equal those on the servers; `send_changes` compares with them.

        Args:
            tables: Whether this includes variables that are trained by rows.
        """
        settings = self._unchanged_settings()
        self._recorded_checksums = self._checksums(tables)
        self._recorded_optimizer = {**settings, **self._optimizer_values()}

    def send_changes(self) -> bool:
        """Send the variables that have changed here since `record_values`. Returns whether there were any.

        Raises: UnsupportedError if anything of the optimizer except its learning rate has changed.
        """
        known = self._recorded_checksums
        if not known:
            return False  # no epoch has begun
        settings = self._unchanged_settings()
        _refuse_changes(self._recorded_optimizer, {**settings, **self._optimizer_values()})
        now = self._checksums(any(table in known for table in self.tables))
        changed = tuple(number for number, checksum in now.items() if checksum != known[number])
        if not changed:
            return False
        values = [to_host(v) if number in changed else None for number, v in enumerate(self.variables)]
        message = AssignVariables(self._fit, changed)
        servers = range(self._client.num_servers)
        self._client.request_all([(message, self._placed.split_into_shards(values, server)) for server in servers])
        return True

    def are_averages_in_weights(self) -> bool:
        """Whether a callback has exchanged the weights with their averages since `record_values`, and not back."""
        found = [(slot, average) for slot, average in self._averages() if average.path in self._recorded_optimizer]
        known = [self._recorded_optimizer[average.path] for _, average in found]
        weights = [_Average(to_host(self.variables[slot.variable])) for slot, _ in found]
        return weights == known != [_Average(to_host(average)) for _, average in found]

    def reset_averages(self) -> None:
        """Set the averages to the weights, as if the averages that a callback has put into the weights were lost."""
        for slot, average in self._averages():
            average.assign(self.variables[slot.variable])

    def _averages(self) -> list[tuple[OptimizerSlot, Any]]:
        """The optimizer's averages of weights (`use_ema`)."""
        slots = zip(self.slots, self.optimizer.variables, strict=True)
        return [(slot, variable) for slot, variable in slots if slot.name == "average"]

    def _unchanged_settings(self) -> dict[str, Any]:
        """The optimizer's settings, which must not have changed: other settings may mean other variables."""
        settings = self._optimizer_settings()
        _refuse_changes({name: self._recorded_optimizer.get(name) for name in settings}, settings)
        return settings

    def _optimizer_settings(self) -> dict[str, Any]:
        """The optimizer's arguments by name. A learning rate that can be sent is represented by its kind only."""
        rate = getattr(self.optimizer, "_learning_rate", None)
        kind = "a number" if isinstance(rate, keras.Variable) else f"{type(rate).__name__} at {id(rate)}"
        return {**plain_settings(self.optimizer), "learning_rate": kind}

    def _optimizer_values(self) -> dict[str, Any]:
        """Values, by path, that detect changes to the optimizer's variables, which only the servers may change.
        Excludes the learning rate."""
        # Averages are copied, which takes as much memory as the model, but only with `use_ema`.
        return {
            variable.path: (_Average if slot.name == "average" else checksum)(to_host(variable))
            for slot, variable in zip(self.slots, self.optimizer.variables, strict=True)
            if slot != OptimizerSlot(-1, "learning_rate") and slot.variable not in self.tables
        }

    def _checksums(self, tables: bool) -> dict[int, int]:
        return {
            number: checksum(to_host(variable))
            for number, variable in enumerate(self.variables)
            if tables or number not in self.tables
        }

    def send_learning_rate(self) -> None:
        """Send the optimizer's learning rate to the servers, if it has changed."""
        rate = self._learning_rate()
        if rate is not None and rate != self._rate:
            self._rate = rate
            self._client.request_all([(SetLearningRate(rate), ())] * self._client.num_servers)

    def _declare(self, fit: int, first_epoch: int, tables: tuple[int, ...]) -> None:
        placed, optimizer, trained = self._placed, self.optimizer, self.variables
        check_methods(optimizer)
        description = ModelDescription(
            placed.variables,
            placed.shards,
            config_json_of(optimizer),
            tuple(v.constraint and config_json_of(v.constraint) for v in trained),
            tuple(bool(optimizer._use_weight_decay(v)) for v in trained)
            if optimizer.weight_decay is not None
            else (True,) * len(trained),
            tables,
        )
        values = [to_host(v) for v in trained]
        state = self._optimizer_state()
        # A checkpoint that the program has loaded may be ahead of this worker's view of the job, or behind it.
        iterations = int(to_host(optimizer._iterations))
        step = self._worker.global_step = max(self._worker.global_step, iterations)
        # Greater than that of any chief before a restart, so that its tickets are recognized as void. It need not be
        # exact.
        requests, era, step_offset = [], time.time_ns(), step - iterations
        for server in range(self._client.num_servers):
            places = _slots_on(self.slots, placed, server)
            rules, slots = self._worker.rules, tuple(places)
            message = DeclareModel(fit, first_epoch, description, rules, slots, step, era, step_offset)
            own_state = [state[slot][rows] for slot, rows in places.values()]
            requests.append((message, [*placed.split_into_shards(values, server), *own_state]))
        self._client.request_all(requests)
        self._rate = self._learning_rate()

    def _optimizer_state(self) -> dict[OptimizerSlot, Array]:
        return {slot: host_copy(v) for slot, v in zip(self.slots, self.optimizer.variables, strict=True)}

    def _learning_rate(self) -> float | None:
        rate = getattr(self.optimizer, "_learning_rate", None)
        return float(to_host(rate)) if isinstance(rate, keras.Variable) else None


def _dtype_of(variable: Any) -> str:
    # The value's dtype: without x64 mode, JAX stores Keras's float64 as float32.
    name: str = keras.backend.standardize_dtype(variable.value.dtype)
    return name


def _slots_on(
    slots: Sequence[OptimizerSlot], placed: PlacedVariables, server: int
) -> dict[tuple[int, str], tuple[OptimizerSlot, Any]]:
    """The variables of a server's optimizer, by its names for them: slot in the model's optimizer, and rows."""
    own: dict[tuple[int, str], tuple[OptimizerSlot, Any]] = {
        (-1, slot.name): (slot, ...) for slot in slots if slot.variable < 0
    }
    of_shards: dict[tuple[int, str], tuple[OptimizerSlot, Any]] = {
        (number, slot.name): (slot, slice(shard.start, shard.stop) if placed.variables[slot.variable].shape else ...)
        for number, shard in enumerate(placed.shards_by_server[server])
        for slot in slots
        if slot.variable == shard.variable
    }
    return own | of_shards if placed.shards_by_server[server] else {}


def _refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [name for name, value in before.items() if now.get(name) != value]
    if changed:
        raise UnsupportedError(
            f"The optimizer's {', '.join(changed[:3])} was changed during fit(). The servers run the optimizer, and "
            f"receive only another number as its learning rate, and new weights. Change it before fit(), or call fit() "
            f"once for each setting."
        )


class _Average:
    """A variable's average over the steps. It equals another that differs only by rounding.

    On TensorFlow, Keras's `SwapEMAWeights` exchanges weights and averages by adding and subtracting them, in both
    directions.
    """

    def __init__(self, value: Array) -> None:
        self._value = np.array(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Average):
            return NotImplemented
        # The sum of a weight and its average is what rounds. Either may be near 0 where the other is not.
        largest = np.abs(self._value).max(initial=0)
        return np.allclose(self._value, other._value, rtol=SWAP_TOLERANCE, atol=SWAP_TOLERANCE * largest)

    __hash__ = None  # type: ignore[assignment]


def checksum(value: Array) -> int:
    """Checksum that detects whether a program has changed a variable."""
    return zlib.crc32(byte_view(np.ascontiguousarray(value)))
