"""Custom training loops in elastic jobs (`phalanx run --workers 2:4`), with the interface of `horovod.elastic`.

    state = phalanx.elastic.State(model=model, optimizer=optimizer, step=0)

    @phalanx.elastic.run
    def train(state):
        while state.step < 1000:
            ...                       # a step, with collectives of the strategy
            state.step += 1
            state.commit()            # keep the progress so far

    train(state)

When a member is lost or a worker joins, all members return to their last commit and call the function again. A single
`fit` needs none of this. If the function itself calls `fit`, workers join at its commits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from phalanx.elastic.elastic_group import ElasticGroup
from phalanx.elastic.generation_loop import is_caused_by, run_until_complete
from phalanx.errors import ConfigurationError, MembershipChangedError
from phalanx.keras_compat.variables.host_values import host_copy, to_host
from phalanx.strategies import current_job
from phalanx.training import state_sync
from phalanx.training.checks.same_model import check_chiefs_model, structure_of
from phalanx.training.replica import EntryFinishedError, Replica
from phalanx.transport.serialization import decode, encode, is_serializable

T = TypeVar("T")
logger = logging.getLogger(__name__)


class State:
    """The state of a custom training loop, equal on all members.

    Args:
        model: A Keras model. The state includes its weights, layer state and, if it is compiled, optimizer.
        optimizer: A Keras optimizer other than the model's. If it is not built yet, it is built for the model's
            trainable variables: every variable must exist at the first commit.
        values: Plain values by name (numbers, strings, NumPy arrays, lists and dictionaries of them); each becomes an
            attribute.

    Raises: ConfigurationError if a value is not plain.

    Examples:
        >>> state = State(step=0)
        >>> state.step += 1
        >>> state.commit()
        >>> state.step = 7
        >>> state.restore()
        >>> state.step
        1
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any):
        self._model, self._optimizer = model, optimizer
        self._names = tuple(values)  # of the plain values, which are attributes
        self._callbacks: list[Callable[[], None]] = []
        self._group: ElasticGroup | None = None  # while a loop runs
        for name, value in values.items():
            setattr(self, name, value)
        if model is not None and model.built:
            for each in (getattr(model, "optimizer", None), optimizer):
                if each is not None and not each.built:
                    each.build(model.trainable_variables)
        self.commit()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions to call after each membership change, before the loop restarts: for example, to partition
        the data or to scale the learning rate."""
        self._callbacks += callbacks

    def commit(self) -> None:
        """Keep the current state. All members return to it when the membership changes.

        This copies the model. If that takes long, commit every few steps, at the same steps on all members.

        Raises: MembershipChangedError, handled by `run`, if workers joined while the loop was in methods of Keras.
        """
        self._keep()
        if self._group is not None:
            self._group.allow_joins()

    def _keep(self) -> None:
        self._check_plain()
        self._committed = (
            encode(self._values()),
            [(variable, host_copy(variable)) for variable in self._variables()],
        )

    def restore(self) -> None:
        """Return to the last commit.

        Raises: ConfigurationError if variables were created since then: their earlier values are unknown.
        """
        values, arrays = self._committed
        known = {id(variable) for variable, _ in arrays}
        for variable in self._variables():
            if id(variable) not in known:
                raise ConfigurationError(
                    f"The variable {variable.path!r} was created after the last commit, so it can't be restored. "
                    f"Create all variables, and commit, before the first step."
                )
        vars(self).update(decode(values))
        for variable, array in arrays:
            variable.assign(array)

    def sync(self, replica: Replica) -> None:
        """Broadcast the chief's state to all members, and commit it.

        Args:
            replica: The replica of this process.

        Raises: DisagreementError on members whose model differs from the chief's; the others continue without them.
        """
        variables = self._variables()
        structure = structure_of(variables)
        own = encode([self._values(), structure])
        values, chiefs = decode(replica.communicator.broadcast_bytes(own))
        check_chiefs_model(chiefs, structure)
        vars(self).update(values)
        arrays = [to_host(variable) for variable in variables]
        for variable, array in zip(variables, replica.communicator.broadcast(arrays), strict=True):
            variable.assign(array)
        self._keep()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _check_built(self) -> None:
        for thing, how in ((self._model, "build(shape)"), (self._optimizer, "build(model.trainable_variables)")):
            if thing is not None and not thing.built:
                raise ConfigurationError(
                    f"The state's {thing.name!r} has no variables yet, so members that join later could not receive "
                    f"them. Call its {how} before you create the State."
                )

    def _variables(self) -> list[Any]:
        found = [] if self._model is None else state_sync.variables_of(self._model)
        others = [] if self._optimizer is None else self._optimizer.variables
        return [*found, *(v for v in others if all(v is not f for f in found))]

    def _check_plain(self) -> None:
        for name in self._names:
            if not is_serializable(getattr(self, name)):
                raise ConfigurationError(
                    f"The state's {name!r} is a {type(getattr(self, name)).__name__}, which can't be sent to other "
                    f"members. Use numbers, strings, NumPy arrays, or lists and dictionaries of them; pass models and "
                    f"optimizers as `model=` and `optimizer=`."
                )


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Repeat a function, `function(state, ...)` with a `State`, when the membership changes.

    In a job of fixed size, and in a single process, it is called once.

    Args:
        function: The custom training loop.

    Returns: a function that returns the result of the completed call. A process that joins after that receives the
        chief's result if it is plain (see `State`), else None.
    """

    @functools.wraps(function)
    def repeated(state: State, *args: Any, **kwargs: Any) -> T:
        replica = current_job.current_replica()
        group = None if replica is None else replica.elastic
        if replica is None or group is None:
            return function(state, *args, **kwargs)
        try:
            with replica.entry() as entry:
                if replica.is_candidate:
                    replica.join_entry()
                loop = _CustomLoop(replica, group, state)
                try:
                    with group.join_points.anywhere():
                        result = run_until_complete(lambda: function(state, *args, **kwargs), loop)
                finally:
                    state._group = None
                entry.result = encode(result) if is_serializable(result) else encode(None)
                return result
        except EntryFinishedError as over:
            logger.warning("The other members have finished this loop: you get its result, but not its final state.")
            state._keep()
            return decode(over.result)  # type: ignore[no-any-return]

    return repeated


class _CustomLoop:
    """A custom training loop as an `ElasticProgram` (see `generation_loop`)."""

    def __init__(self, replica: Replica, group: ElasticGroup, state: State):
        self._replica, self._group, self._state = replica, group, state
        self._generation = group.generation  # of the last call of the function
        # After joining, a process does what the others do after the membership change.
        self._has_joined = group.needs_state and group.joined_late

    def synchronize(self, *, has_changed: bool) -> None:
        state, group = self._state, self._group
        self._generation = group.generation
        self._replica.announce_entry()  # a lost chief may not have done so
        state._check_built()
        state.sync(self._replica)
        group.needs_state = False
        if has_changed or self._has_joined:
            for callback in state._callbacks:
                callback()
        self._has_joined = False
        state._group = group

    def recover(self, error: Exception) -> bool:
        # The collective that detected the loss has already moved this process to the next generation. If the generation
        # is the same, the program has raised an error that it kept from an earlier change.
        if not is_caused_by(error, MembershipChangedError) or self._group.generation == self._generation:
            return False
        self._state.restore()
        return True
