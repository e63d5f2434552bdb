"""Messages between the coordinator and a worker: a header of one of these kinds, and pickles as raw buffers.

The worker handles the coordinator's messages in the order in which they were sent, and answers each `CallFunction`. It
answers a `Ping` immediately, even while a function runs.
"""

from __future__ import annotations

import msgspec

from phalanx.training.scope_registry import ScopedName

VariableName = tuple[ScopedName, int]
"""The object created in scope that a variable belongs to, and the index of the variable."""

# From the coordinator, to workers that run no program of their own.


class JoinJob(msgspec.Struct, frozen=True, tag="join"):
    """How to take part in the job. Buffer: `WorkerSettings`."""


class Define(msgspec.Struct, frozen=True, tag="define"):
    """Create what the chief's program has created in the strategy's scope. Buffers: a `Definition` for each object.

    Attributes:
        names: Names of each object and its parts, in the order of `parts_of`; "" for parts without one.
        digests: Digests of the objects' recipes. An object created before from the same recipe is kept.
        dtype_policy: Keras's dtype policy on the chief.
    """

    names: tuple[tuple[ScopedName, ...], ...]
    digests: tuple[bytes, ...]
    dtype_policy: str


class CallMethod(msgspec.Struct, frozen=True, tag="method"):
    """Call a method of a model, in which all workers take part. Buffers: `MethodState`; the arguments.

    Attributes:
        fit: Number of the `fit`.
    """

    model: ScopedName
    method: str
    fit: int


# From the coordinator, to all workers.


class DeclareVariables(msgspec.Struct, frozen=True, tag="declare"):
    """The servers now have variables, declared as those of this `fit`. Buffer: the layers' other state.

    Attributes:
        optimizer: Optimizer that updates the variables; None if there is none.
        variables: Names of the variables, in order; None for a variable that belongs to nothing created in scope.
    """

    fit: int
    optimizer: ScopedName | None
    variables: tuple[VariableName | None, ...] = ()

    def names(self) -> list[ScopedName]:
        """Objects that workers must have created before."""
        owners = [name[0] for name in self.variables if name is not None]
        return owners if self.optimizer is None else [*owners, self.optimizer]


class StoreObject(msgspec.Struct, frozen=True, tag="store"):
    """Store a large value that functions refer to by this number. Buffer: the value."""

    number: int


class CreateObject(msgspec.Struct, frozen=True, tag="create"):
    """Create this worker's value of this number. Buffer: the function that creates it.

    Attributes:
        iterator_of: Number of a value to create an iterator over instead.
    """

    number: int
    iterator_of: int | None = None


class DropObject(msgspec.Struct, frozen=True, tag="drop"):
    """Drop the object that was stored or created under this number."""

    number: int


class CallFunction(msgspec.Struct, frozen=True, tag="call"):
    """Call a function. Buffers: the function, if this worker does not have it; its arguments; the results that they
    refer to.

    Attributes:
        function: Digest of its pickle.
        is_new: Whether the pickle is included.
        results: Numbers of the functions whose results follow.
    """

    call: int
    function: bytes
    is_new: bool
    results: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Check whether the worker is alive."""


class StopWorker(msgspec.Struct, frozen=True, tag="stop"):
    """There are no more orders."""


# From the worker.


class FunctionReturned(msgspec.Struct, frozen=True, tag="returned"):
    """A function has returned. Buffers: the result; its effects (`phalanx.coordinator.function_effects`).

    Attributes:
        global_step: Newest global step that the worker knows.
    """

    call: int
    global_step: int


class FunctionRaised(msgspec.Struct, frozen=True, tag="raised"):
    """A function has raised an error. Buffer: the error (`phalanx.runtime.function_call`).

    Attributes:
        lost_server: Server that this worker has lost, or that did not answer it, and that is the reason why it ends.
    """

    call: int
    lost_server: str = ""


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker without a program ends, with an error in a method or in its preparation. Buffer: the error."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to `Ping`."""


Order = (
    JoinJob
    | Define
    | CallMethod
    | DeclareVariables
    | StoreObject
    | CreateObject
    | DropObject
    | CallFunction
    | Ping
    | StopWorker
)
Answer = FunctionReturned | FunctionRaised | WorkerFailed | Pong

MAX_FUNCTIONS = 256
"""Number of functions that a worker keeps unpickled, the most recently used. Both ends count in the same way."""
