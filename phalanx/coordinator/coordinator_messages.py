"""Messages between the coordinator and a worker: a header of one of these kinds, and pickles as raw buffers.

The worker handles the coordinator's messages in the order in which they were sent, and answers each `CallFunction`. It
answers a `Ping` at once, even while a function runs.
"""

from __future__ import annotations

import msgspec

from phalanx.training.scope_registry import ScopedName

# From the coordinator.


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The servers have variables now, declared as those of this `fit`. Buffer: the layers' other state.

    Attributes:
        optimizer: which one updates them; None: none does.
    """

    fit: int
    optimizer: ScopedName | None


class KeepObject(msgspec.Struct, frozen=True, tag="keep"):
    """Buffer: a large value that functions refer to by this number."""

    number: int


class MakeObject(msgspec.Struct, frozen=True, tag="make"):
    """Make this worker's own value of this number. Buffer: the function that makes it.

    Attributes:
        iterator_of: instead, it is an iterator over the value of that number.
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
        function: the digest of its pickle.
        is_new: whether the pickle is there.
        results: numbers of the functions whose results follow.
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
        global_step: the newest that the worker knows.
    """

    call: int
    global_step: int


class FunctionRaised(msgspec.Struct, frozen=True, tag="raised"):
    """Buffer: the error (`phalanx.runtime.function_call`).

    Attributes:
        missed: the server that this worker has lost, or that did not answer it, and because of which it ends.
    """

    call: int
    missed: str = ""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Yes."""


Order = Begin | KeepObject | MakeObject | ForgetObject | CallFunction | Ping | StopWorker
Answer = FunctionReturned | FunctionRaised | Pong

FUNCTIONS_KEPT = 256
"""Functions that a worker keeps unpickled, those used last. Both ends count in the same way."""
