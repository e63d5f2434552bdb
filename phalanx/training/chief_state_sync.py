"""Broadcast, by the chief through the first server, of the state that servers do not train.

Frozen weights and random seeds are broadcast when a `fit` begins; the state that layers change while they compute
(batch-norm statistics) also at each epoch, for a worker that returns in the middle. Seeds are shifted by the worker's
number, so that workers draw different masks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import msgspec
import numpy as np

from phalanx.cluster.task_comparison import describe_difference
from phalanx.engines import buffers
from phalanx.engines.random_state import random_state, seed_from_rank
from phalanx.errors import CollectiveTimeoutError, DisagreementError
from phalanx.keras_compat.variables.host_values import host_copy, to_host
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.state_sync import seed_generators, shifted_seed
from phalanx.transport.decoding import decode_message

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

FROZEN, CHANGING, FINAL, AVERAGES = "frozen weights", "layer state", "final weights", "averages in the weights"


class _Described(msgspec.Struct, array_like=True, frozen=True):
    """A variable: its dtype on the chief, and the dtype of the array that is sent."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    sent_as: str

    def __str__(self) -> str:
        # Integers are seeds and counters, whose dtypes differ between backends: a job may mix backends.
        return f"`{self.path}` {self.dtype if 'float' in self.dtype else 'integer'}{list(self.shape)}"


def send_state(worker: ParameterServerWorker, model: Any, fit: int, changing: Sequence[Any]) -> None:
    """Broadcast all state that servers do not train, on the chief when a `fit` begins.

    Args:
        worker: This process as a worker.
        model: A built Keras model.
        fit: Number of the `fit` call.
        changing: The variables that layers change while they compute.
    """
    worker.broadcast(FROZEN, _packed(_frozen(model, changing)), fit)
    send_layer_state(worker, fit, changing)


def send_layer_state(worker: ParameterServerWorker, fit: int, changing: Sequence[Any]) -> None:
    """Broadcast the state of layers, on the chief when another epoch begins."""
    worker.broadcast(CHANGING, _packed(changing), fit)


def receive_state(worker: ParameterServerWorker, model: Any, fit: int, changing: Sequence[Any]) -> None:
    """Assign the state that the chief has broadcast for this `fit`, on the other workers.

    Raises: DisagreementError naming the first variable that differs.
    """
    seeds = {id(generator.state) for generator in seed_generators(model)}
    for subject, variables in ((FROZEN, _frozen(model, changing)), (CHANGING, changing)):
        received = worker.receive_broadcast(subject, fit)
        if received is None:
            return
        chiefs, chiefs_values = _unpacked(received)
        values = [to_host(variable) for variable in variables]
        own = [_described(variable, value) for variable, value in zip(variables, values, strict=True)]
        if difference := describe_difference([*map(str, chiefs)], [*map(str, own)], "the chief", "this task"):
            raise DisagreementError(
                f"The model is not the same on all tasks, in what is not trained: {difference} Every task must build "
                f"the same model, in the same order."
            )
        for variable, before, value in zip(variables, values, chiefs_values, strict=True):
            if id(variable) in seeds:
                # Use other masks than the chief's, or two workers would drop the same units of their batches.
                value = shifted_seed(value, worker.number)
            if not np.array_equal(value, before):
                variable.assign(value)
    seed_from_rank(random_state(), worker.number)


@contextmanager
def sharing_final_weights(worker: ParameterServerWorker, fit: int, variables: Sequence[Any]) -> Iterator[None]:
    """Run the callbacks at the end of a `fit` inside the context. Changes that the chief's callbacks make to the
    trained variables apply to all workers; those of other workers' callbacks, from their own logs, are undone."""
    # Copies: a callback may write into the same memory (PyTorch).
    before = [host_copy(variable) for variable in variables]
    yield
    changed = {
        number: variable
        for number, (variable, value) in enumerate(zip(variables, before, strict=True))
        if not np.array_equal(to_host(variable), value)
    }
    if worker.is_chief:
        _send_final_weights(worker, fit, changed)
        return
    chiefs = _receive_final_weights(worker, fit)
    # The chief's value if it has set one; otherwise the servers': this worker's callbacks saw only its own logs.
    for number in {*changed, *chiefs}:
        variables[number].assign(chiefs.get(number, before[number]))


def _send_final_weights(worker: ParameterServerWorker, fit: int, changed: Mapping[int, Any]) -> None:
    """Broadcast, on the chief, the trained variables, by number, that callbacks have set at the end of the `fit`."""
    worker.broadcast(FINAL, [np.array([fit, *changed], np.int64), *_packed([*changed.values()])], fit)


def _receive_final_weights(worker: ParameterServerWorker, fit: int) -> dict[int, Array]:
    """Receive the variables of `_send_final_weights`; none, with a warning, if the chief takes too long."""
    try:
        received = worker.receive_broadcast(FINAL, fit)
    except CollectiveTimeoutError as error:
        logger.warning("The weights that the chief's callbacks set at the end did not arrive here: %s", error)
        return {}
    if received is None:
        return {}
    of, *numbers = np.frombuffer(received[0], np.int64).tolist()
    _, values = _unpacked(received[1:])
    # The head keeps the last broadcast of a subject; a late worker may receive that of a later `fit`.
    return dict(zip(numbers, values, strict=True)) if of == fit else {}


def are_chiefs_averages_in_weights(worker: ParameterServerWorker, fit: int, own: bool) -> bool:
    """Return, on all workers, whether the chief's weights and averages are exchanged at the end of a `fit`; `own` is
    whether this worker's are."""
    if worker.is_chief:
        worker.broadcast(AVERAGES, [np.array([fit, own], np.int64)], fit)
        return own
    received = worker.receive_broadcast(AVERAGES, fit)
    if received is None:
        return False
    of, exchanged = np.frombuffer(received[0], np.int64).tolist()
    return of == fit and bool(exchanged)  # as in `_receive_final_weights`


def _frozen(model: Any, changing: Sequence[Any]) -> list[Any]:
    taken = {_key(variable) for variable in changing}
    found = {_key(v): v for v in [*model.non_trainable_variables, *buffers(model)]}
    return [variable for key, variable in found.items() if key not in taken]


def _key(variable: Any) -> Any:
    # A buffer of a PyTorch module is a new object on each access (`module_buffers`), but has a unique path. Paths of
    # Keras's variables need not be unique.
    return id(variable) if isinstance(variable, keras.Variable) else variable.path


def _packed(variables: Sequence[Any]) -> list[Array]:
    values = [to_host(variable) for variable in variables]
    described = [_described(variable, value) for variable, value in zip(variables, values, strict=True)]
    return [np.frombuffer(msgspec.msgpack.encode(described), np.uint8), *values]


def _unpacked(received: Sequence[memoryview]) -> tuple[list[_Described], list[Array]]:
    """The inverse of `_packed`."""
    described = decode_message(received[0], list[_Described])
    pairs = zip(described, received[1:], strict=True)
    return described, [np.frombuffer(buffer, one.sent_as).reshape(one.shape) for one, buffer in pairs]


def _described(variable: Any, value: Array) -> _Described:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return _Described(variable.path, tuple(variable.shape), dtype, value.dtype.name)
