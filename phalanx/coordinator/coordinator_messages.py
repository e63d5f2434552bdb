"""Messages between the coordinator and a worker: a header of one of these kinds, and pickles as raw buffers.

The worker handles the coordinator's messages in the order in which they were sent, and answers each `CallFunction`. It
answers a `Ping` at once, even while a function runs.
"""

from __future__ import annotations

import msgspec

from phalanx.training.scope_registry import ScopedName

VariableName = tuple[ScopedName, int]
"""The object made in scope that a variable belongs to, and which of its variables it is."""

# From the coordinator, to workers that run no program of their own.


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """How to take part in the job. Buffer: `WorkerSettings`."""


class Define(msgspec.Struct, frozen=True, tag="define"):
    """Make what the chief's program has made in the strategy's scope. Buffers: a `Definition` for each object.

    Attributes:
        names: For each object, its own and those of what is in it, in the order of `parts_of`; "" for what has none.
        digests: Of what the objects are made of. One that was made of the same before is kept.
        dtype_policy: Keras's, at the chief.
    """

    names: tuple[tuple[ScopedName, ...], ...]
    digests: tuple[bytes, ...]
    dtype_policy: str


class CallMethod(msgspec.Struct, frozen=True, tag="method"):
    """Call a method of a model, in which all workers take part. Buffers: `MethodState`; the arguments.

    Attributes:
        fit: The number of the `fit`.
    """

    model: ScopedName
    method: str
    fit: int


# From the coordinator, to all workers.


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The servers have variables now, declared as those of this `fit`. Buffer: the layers' other state.

    Attributes:
        optimizer: Which one updates them; None: none does.
        variables: The variables, in order; None for one that belongs to nothing made in scope.
    """

    fit: int
    optimizer: ScopedName | None
    variables: tuple[VariableName | None, ...] = ()

    def names(self) -> list[ScopedName]:
        """What workers must have made before."""
        owners = [name[0] for name in self.variables if name is not None]
        return owners if self.optimizer is None else [*owners, self.optimizer]


class KeepObject(msgspec.Struct, frozen=True, tag="keep"):
    """Buffer: a large value that functions refer to by this number."""

    number: int


class MakeObject(msgspec.Struct, frozen=True, tag="make"):
    """Make this worker's own value of this number. Buffer: the function that makes it.

    Attributes:
        iterator_of: Instead, it is an iterator over the value of that number.
    """

    number: int
    iterator_of: int | None = None


class ForgetObject(msgspec.Struct, frozen=True, tag="forget"):
    """Drop the object that was kept or created under this number."""

    number: int


class CallFunction(msgspec.Struct, frozen=True, tag="call"):
    """Call a function. Buffers: the function, if this worker does not have it; its arguments; results that they refer
    to.

    Attributes:
        function: The digest of its pickle.
        is_new: Whether the pickle is there.
        results: Numbers of the functions whose results follow.
    """

    call: int
    function: bytes
    is_new: bool
    results: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you alive?"""


class StopWorker(msgspec.Struct, frozen=True, tag="stop"):
    """There is no more to do."""


# From the worker.


class FunctionReturned(msgspec.Struct, frozen=True, tag="returned"):
    """Buffers: the result; what it changed (`phalanx.coordinator.function_effects`).

    Attributes:
        global_step: The newest that the worker knows.
    """

    call: int
    global_step: int


class FunctionRaised(msgspec.Struct, frozen=True, tag="raised"):
    """Buffer: the error (`phalanx.runtime.function_call`).

    Attributes:
        missed: The server that this worker has lost, or that did not answer it, and because of which it ends.
    """

    call: int
    missed: str = ""


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker without a program ends: with an error in a method, or in what it was to prepare. Buffer: the error."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Yes."""


Order = Serve | Define | CallMethod | Begin | KeepObject | MakeObject | ForgetObject | CallFunction | Ping | StopWorker
Answer = FunctionReturned | FunctionRaised | WorkerFailed | Pong

FUNCTIONS_KEPT = 256
"""Functions that a worker keeps unpickled, those used last. Both ends count in the same way."""
