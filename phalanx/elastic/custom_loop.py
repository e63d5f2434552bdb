"""Loops of one's own in jobs whose members come and go (`phalanx run --workers 2:4`), as `horovod.elastic` has them.

    state = phalanx.elastic.State(model=model, optimizer=optimizer, step=0)

    @phalanx.elastic.run
    def train(state):
        while state.step < 1000:
            ...                       # a step, with collectives of the strategy
            state.step += 1
            state.commit()            # what is done is done

    train(state)

When a member is lost, or one joins, all go back to their last commit and call the function again. A single `fit` needs
none of this; where the function calls `fit` itself, others join at its commits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from phalanx.elastic.elastic_communicator import ElasticCommunicator
from phalanx.errors import ConfigurationError, MembershipChangedError, PeerLostError
from phalanx.strategies import current_job as jobs
from phalanx.training import state_sync as model_states
from phalanx.training.replica import EntryOverError, Replica
from phalanx.transport.serialization import decode, encode, is_serializable

T = TypeVar("T")
logger = logging.getLogger(__name__)


class State:
    """What a loop must have the same of on all members.

    Args:
        model: a Keras model; its weights, layer state and optimizer, if it is compiled.
        optimizer: a Keras optimizer that is not the model's own. One that is not built yet is built for the model's
            trainable variables: all that a loop goes back to must be there at its first commit.
        values: anything plain by name (numbers, strings, NumPy arrays, lists and dictionaries of them); each becomes an
            attribute.

    Raises: ConfigurationError if a value is not plain.

    Example:
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
        self._names = tuple(values)
        self._callbacks: list[Callable[[], None]] = []
        self._elastic: ElasticCommunicator | None = None  # while a loop runs
        for name, value in values.items():
            setattr(self, name, value)
        if model is not None and model.built:
            for each in (getattr(model, "optimizer", None), optimizer):
                if each is not None and not each.built:
                    each.build(model.trainable_variables)
        self.commit()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to be called after each change of the members, before the loop is begun again: to cut the data
        anew, or to scale the learning rate."""
        self._callbacks += callbacks

    def commit(self) -> None:
        """Keep what there is now: a change of the members leads back here. It copies the model; call it every few steps
        where that takes long, and on all members alike.

        Raises: MembershipChangedError, for `run`, if others came while the loop was in methods of Keras.
        """
        self._keep()
        if self._elastic is not None:
            self._elastic.let_others_in()

    def _keep(self) -> None:
        self._check()
        self._committed = (
            encode({name: getattr(self, name) for name in self._names}),
            [(variable, np.array(keras.ops.convert_to_numpy(variable.value))) for variable in self._variables()],
        )

    def restore(self) -> None:
        """Go back to the last commit.

        Raises: ConfigurationError if variables have been made since: nobody knows what they were.
        """
        values, arrays = self._committed
        known = {id(variable) for variable, _ in arrays}
        for variable in self._variables():
            if id(variable) not in known:
                raise ConfigurationError(
                    f"The variable {variable.path!r} was made after the last commit: there is nothing to go back to. "
                    f"Make all variables, and commit, before the first step."
                )
        vars(self).update(decode(values))
        for variable, array in arrays:
            variable.assign(array)

    def sync(self, replica: Replica) -> None:
        """Give all members the chief's state, and commit it."""
        own = encode({name: getattr(self, name) for name in self._names})
        vars(self).update(decode(replica.communicator.broadcast_bytes(own)))
        arrays = [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in self._variables()]
        for variable, array in zip(self._variables(), replica.communicator.broadcast(arrays), strict=True):
            variable.assign(array)
        self._keep()

    def _check_built(self) -> None:
        for thing, how in ((self._model, "build(shape)"), (self._optimizer, "build(model.trainable_variables)")):
            if thing is not None and not thing.built:
                raise ConfigurationError(
                    f"The state's {thing.name!r} has no variables yet, and members that come later could not be given "
                    f"them. Call its {how} before the State is made."
                )

    def _reset(self) -> None:
        for callback in self._callbacks:
            callback()

    def _variables(self) -> list[Any]:
        found = [] if self._model is None else model_states.variables_of(self._model)
        own = (
            [] if self._optimizer is None else [v for v in self._optimizer.variables if all(v is not f for f in found)]
        )
        return [*found, *own]

    def _check(self) -> None:
        for name in self._names:
            if not is_serializable(getattr(self, name)):
                raise ConfigurationError(
                    f"The state's {name!r} is a {type(getattr(self, name)).__name__}, which cannot be given to other "
                    f"members. Use numbers, strings, NumPy arrays, or lists and dictionaries of them; models and "
                    f"optimizers as `model=` and `optimizer=`."
                )


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Let a function go on over changes of the members: `function(state, ...)`, with a `State`.

    In a job of fixed members, and on one process, it is called once.

    Returns: a function whose result is that of the call that came to its end. A process that comes when it is over is
        given the chief's result, which must be plain for that (see `State`), or None.
    """

    @functools.wraps(function)
    def repeated(state: State, *args: Any, **kwargs: Any) -> T:
        replica = jobs.current_replica()
        elastic = None if replica is None else replica.elastic
        if replica is None or elastic is None:
            return function(state, *args, **kwargs)
        try:
            with replica.entry() as entry:
                if replica.is_candidate:
                    replica.join_entry()
                result = _until_done(replica, elastic, state, lambda: function(state, *args, **kwargs))
                entry.result = encode(result) if is_serializable(result) else encode(None)
                return result
        except EntryOverError as over:
            logger.warning(
                "The others have finished this loop: here is its result, and not the state that it ended with."
            )
            state._keep()
            return decode(over.result)  # type: ignore[no-any-return]

    return repeated


def _until_done(replica: Replica, elastic: ElasticCommunicator, state: State, body: Callable[[], T]) -> T:
    began = elastic.fresh and elastic.late  # a newcomer: what the others do after a change, it does as well
    with elastic.open_to_others():
        while True:
            generation = elastic.generation
            try:
                if replica.rank == 0 and elastic.fresh:
                    raise PeerLostError(
                        "All members that had the state of the job were lost.", rank=0, task="chief", host=""
                    )
                replica.announce_entry()  # a chief that was lost may not have come to it
                state._check_built()
                state.sync(replica)
                elastic.welcomed()
                if began:
                    state._reset()
                began = True
                state._elastic = elastic
                return body()
            except Exception as error:
                if not _is_change(error) or elastic.generation == generation:
                    raise
                state.restore()
            finally:
                state._elastic = None


def _is_change(error: Exception) -> bool:
    """Whether the members have changed. TensorFlow wraps what is raised inside of its functions."""
    return isinstance(error, MembershipChangedError) or MembershipChangedError.__name__ in str(error)
