"""Compressed sums of a model's gradients, and the state that is kept between steps.

The reducer keeps two things for each list of arrays that are summed at once:

- *own*: this rank's error feedback, not yet part of a sum. It is in units of the sum, so that it remains valid if the
  ranks' shares, or their number, change. A rank that joins starts without any.
- *shared*: the state of the compression itself (the factors of PowerSGD), equal on all ranks. A rank that joins must
  receive it from the others: `synchronize`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from phalanx.collectives.communicator import Array, Communicator
from phalanx.collectives.keyed_collectives import broadcast_named, sum_named
from phalanx.compression.base_compression import Compression, State

OWN, SHARED = "own", "shared"


class _Memory(NamedTuple):
    own: tuple[Array, ...]  # empty before the first step
    shared: State


_NOTHING = _Memory((), {})


class CompressedReducer:
    """Sums gradients with a compression and error feedback.

    `all_reduce` does not change the state until `commit` is called, so a failed step may be repeated.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self._memory: dict[str, _Memory] = {}  # by `_key_of`
        self._owners: dict[str, list[Hashable]] = {}  # by the shapes of their arrays, in the order of their first sum
        self._pending: dict[str, _Memory] = {}  # the state after `commit`

    def all_reduce(
        self,
        communicator: Communicator,
        arrays: Sequence[Array],
        scales: Sequence[float],
        out: Sequence[Array],
        *,
        unit: float = 1.0,
        owner: Hashable = None,
    ) -> None:
        """Write the sums over all ranks of `scale * array` to `out`. All ranks must call this.

        Args:
            communicator: Communicator of the ranks.
            arrays: Arrays of shapes and dtypes that the compression takes; not modified.
            scales: A factor for each array; with 0, an array counts as zeros, even if it contains NaN, and is not read.
            out: Arrays that receive the sums.
            unit: Factor that the arrays already contain (the scale of the loss). The state is divided by it, so that it
                may change between steps.
            owner: Distinguishes lists of arrays with equal shapes, such as the gradients of two optimizers. All ranks
                must first use their owners in the same order.
        """
        key = self._key_of(arrays, owner)
        memory = self._memory.get(key, _NOTHING)
        self._pending.pop(key, None)  # Left by a failed step.
        scaled = [_scaled(array, scale) for array, scale in zip(arrays, scales, strict=True)]
        # Stored without a unit, and added in that of the arrays: the scale of the loss may have changed since.
        for array, rest in zip(scaled, memory.own, strict=bool(memory.own)):
            array += rest if unit == 1.0 else rest * np.float32(unit)
        merged = self.compression.all_reduce(communicator, scaled, memory.shared)
        # If a value is not finite, the step will be skipped, or training has diverged: there is nothing to keep.
        # A sum detects it in one pass: infinities and NaN propagate, and infinities of both signs add up to NaN.
        with np.errstate(all="ignore"):
            for target, value in zip(out, merged.values, strict=True):
                np.copyto(target, value, casting="unsafe")
            is_finite = all(np.isfinite(np.sum(value)) for value in merged.values)
        if is_finite:
            left: tuple[Array, ...] = ()
            if self.compression.feedback:
                left = tuple(_residual(b, o, unit) for b, o in zip(scaled, merged.own, strict=True))
            self._pending[key] = _Memory(left, merged.state)

    def commit(self) -> None:
        """Keep the state of the last step."""
        self._memory |= self._pending
        self._pending = {}

    def state(self) -> dict[str, Array]:
        """The state by name: `own/...` belongs to this rank, `shared/...` to all. The arrays are never modified, so the
        state before a step can be loaded again after it."""
        found: dict[str, Array] = {}
        for key, memory in self._memory.items():
            found |= {f"{OWN}/{key}/{index}": array for index, array in enumerate(memory.own)}
            found |= {f"{SHARED}/{key}/{name}": array for name, array in memory.shared.items()}
        return found

    def load(self, state: State) -> None:
        """Continue from what `state` returned, here or on another rank."""
        own: dict[str, dict[int, Array]] = {}
        shared: dict[str, dict[str, Array]] = {}
        for name, array in state.items():
            kind, key, rest = name.split("/", 2)
            if kind == OWN:
                own.setdefault(key, {})[int(rest)] = np.asarray(array, np.float32)
            else:
                shared.setdefault(key, {})[rest] = np.asarray(array, np.float32)
        self._memory = {
            key: _Memory(tuple(array for _, array in sorted(own.get(key, {}).items())), shared.get(key, {}))
            for key in {**own, **shared}
        }
        self._pending = {}
        self._owners = {}  # all ranks do this between two steps, and then number the owners identically

    def synchronize(self, communicator: Communicator, root: int = 0) -> None:
        """Broadcast the shared state of rank `root`; each rank keeps its own error feedback. All ranks must call
        this."""
        own, shared = self._parts()
        self.load(own | broadcast_named(communicator, shared, root))

    def pooled(self, communicator: Communicator) -> dict[str, Array]:
        """Combine the `state` of all ranks, with the sum of their error feedback. All ranks must call this."""
        own, shared = self._parts()
        return shared | sum_named(communicator, own)

    def load_pooled(self, state: State, ranks: int) -> None:
        """Continue on `ranks` ranks from what `pooled` returned. The total error feedback is preserved."""
        self.load({name: array / ranks if name.startswith(OWN) else array for name, array in state.items()})

    def _key_of(self, arrays: Sequence[Array], owner: Hashable) -> str:
        """The name of the state of these arrays: equal on all ranks, and when training resumes."""
        shapes = [array.shape for array in arrays]
        name = shapes_key(shapes)
        owners = self._owners.setdefault(name, [])
        if owner not in owners:
            owners.append(owner)
        number = owners.index(owner)
        return shapes_key([*shapes, ("list", number)]) if number else name

    def _parts(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """The state of this rank alone, and the state shared by all."""
        state = self.state()
        own = {name: array for name, array in state.items() if name.startswith(OWN)}
        return own, {name: array for name, array in state.items() if name not in own}


def shapes_key(shapes: Sequence[Sequence[int | str]]) -> str:
    """A name for arrays of these shapes, equal in every process."""
    return hashlib.blake2b(msgspec.msgpack.encode(shapes), digest_size=8).hexdigest()


def _scaled(array: Array, scale: float) -> Array:
    """`scale * array` as a new float32 array."""
    if scale == 0.0:
        return np.zeros(array.shape, np.float32)
    scaled: Array = np.array(array, np.float32, order="C")
    if scale != 1.0:
        with np.errstate(all="ignore"):
            scaled *= np.float32(scale)
    return scaled


def _residual(scaled: Array, own: Array, unit: float) -> Array:
    rest = scaled - own
    if unit != 1.0:
        rest /= np.float32(unit)
    return rest
