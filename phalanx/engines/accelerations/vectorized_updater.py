"""On parameter servers: many variables updated as one vector, by optimizers that treat each number by itself.

Purpose: a backend takes tens of microseconds for each array of an update, which is most of the work of a server for a
model with many small layers. Gradients arrive and values leave as vectors too, so nothing has to be joined first.

Measured: Adam on 100 arrays of 4,096 numbers takes six to eight times as long as on one array of the same size.

Same numbers: such an optimizer computes each number from its own gradient and state, in any variable. Only the Keras
optimizers listed here are grouped, without clipping by norm. Variables with a constraint, and those that differ in
dtype or weight decay, stay ungrouped. `tests/engines/test_vectorized_updater.py` compares all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.arrays.flat_buffer import FlatBuffer
from phalanx.engines.accelerations.registry import is_enabled
from phalanx.engines.updater import Updater, UpdaterPiece
from phalanx.keras_compat.variables.optimizer_slots import OptimizerSlot

Array = np.ndarray[Any, Any]
MakeUpdater = Callable[[str, Sequence[UpdaterPiece]], Updater]

ELEMENTWISE = frozenset({"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD"})
"""Keras's optimizers that compute each number by itself, unless they clip by norm."""


def make_vectorized_updater(
    make: MakeUpdater, optimizer: str, pieces: Sequence[UpdaterPiece], ungrouped: Collection[int] = ()
) -> Updater:
    """Return the updater that `make` creates for these pieces, grouped into vectors where that changes nothing.

    Args:
        make: Creates an updater.
        optimizer: The optimizer's config, as JSON.
        pieces: The pieces to update.
        ungrouped: Indices of pieces that are not grouped.
    """
    if not is_enabled("vectorized_updater"):
        return make(optimizer, pieces)
    groups = _group_pieces(json.loads(optimizer), pieces, ungrouped)
    if len(groups) == len(pieces):
        return make(optimizer, pieces)
    vectors = [_Vector({number: pieces[number] for number in numbers}) for numbers in groups]
    return VectorizedUpdater(make(optimizer, [vector.piece for vector in vectors]), vectors)


def is_elementwise(described: Mapping[str, Any]) -> bool:
    """Whether an optimizer with this config treats each number by itself."""
    config = described.get("config") or {}
    return (
        str(described.get("module")).startswith("keras.")
        and described.get("class_name") in ELEMENTWISE
        and config.get("clipnorm") is config.get("global_clipnorm") is None
    )


def _group_pieces(
    described: dict[str, Any], pieces: Sequence[UpdaterPiece], ungrouped: Collection[int]
) -> list[list[int]]:
    """Return the indices of the pieces, in groups that can be one vector."""
    elementwise = is_elementwise(described)
    groups: dict[object, list[int]] = {}
    for number, piece in enumerate(pieces):
        fits = elementwise and number not in ungrouped and piece.constraint is None
        # A number is a unique key: that piece forms its own group.
        groups.setdefault((piece.value.dtype, piece.decays) if fits else number, []).append(number)
    return list(groups.values())


class _Vector:
    """Pieces joined into one variable. A single piece stays as it is.

    Args:
        pieces: The pieces by their indices among all pieces.
    """

    def __init__(self, pieces: Mapping[int, UpdaterPiece]):
        self.piece_indices = tuple(pieces)
        first, *others = pieces.values()
        values = [piece.value for piece in pieces.values()]
        # None for a single piece: it keeps its shape, and nothing is copied.
        self._vector = FlatBuffer([value.shape for value in values]) if others else None
        self.piece = first._replace(value=self.filled(values))

    def unpack(self, vector: Array) -> list[Array]:
        """Return the pieces of such a variable, as views."""
        return [vector] if self._vector is None else self._vector.unpack(vector)

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Return these values of the pieces as one variable."""
        return arrays[0] if self._vector is None else self._vector.pack([np.asarray(array) for array in arrays])


class _PartLocations:
    """Finds parts (the values of the pieces, or the optimizer's variables for them) in the arrays of the inner updater.

    Args:
        vectors: The vector whose layout each array of the inner updater has.
        where: The index of each part's array, and the part's index in that array.
    """

    def __init__(self, vectors: Sequence[_Vector | None], where: Sequence[tuple[int, int]]):
        self._vectors = vectors
        self._where = where

    def __len__(self) -> int:
        return len(self._where)

    def arrays(self, numbers: Iterable[int]) -> list[int]:
        """Return the indices of the arrays that contain these parts."""
        return sorted({self._where[number][0] for number in numbers})

    def parts(self, numbers: Iterable[int], arrays: Mapping[int, Array]) -> list[Array]:
        """Return these parts, as views of the arrays."""
        cut = {place: self._cut(place, array) for place, array in arrays.items()}
        return [cut[place][part] for place, part in (self._where[number] for number in numbers)]

    def filled(self, parts: Mapping[int, Any], arrays: Mapping[int, Array]) -> dict[int, Any]:
        """Return new arrays in which these parts have other values."""
        cut: dict[int, list[Any]] = {place: self._cut(place, array) for place, array in arrays.items()}
        for number, value in parts.items():
            place, part = self._where[number]
            cut[place][part] = value
        return {place: self._filled(place, own) for place, own in cut.items()}

    def _cut(self, place: int, array: Array) -> list[Array]:
        vector = self._vectors[place]
        return [array] if vector is None else vector.unpack(array)

    def _filled(self, place: int, parts: Sequence[Any]) -> Any:
        vector = self._vectors[place]
        return parts[0] if vector is None else vector.filled(parts)


class VectorizedUpdater(Updater):
    """See `Updater`.

    Args:
        updater: Updates the vectors.
        vectors: The vectors into which the pieces are joined.
    """

    def __init__(self, updater: Updater, vectors: Sequence[_Vector]):
        self._updater = updater
        self.shares_buffers = updater.shares_buffers
        self._vectors = vectors
        # By number of the piece: its vector, and its index in that vector.
        of_piece = {
            n: (place, part) for place, vector in enumerate(vectors) for part, n in enumerate(vector.piece_indices)
        }
        self._values = _PartLocations(vectors, [of_piece[number] for number in sorted(of_piece)])
        # The inner optimizer has one variable for each vector and slot (momentum, ...), divided like the vector. What
        # belongs to no variable (the step count) stays whole.
        like = [vectors[slot.variable] if slot.variable >= 0 else None for slot in updater.slots]
        numbers = [(-1,) if vector is None else vector.piece_indices for vector in like]
        self._state = _PartLocations(
            like, [(place, part) for place, own in enumerate(numbers) for part in range(len(own))]
        )
        self.slots = tuple(
            OptimizerSlot(number, slot.name) for slot, own in zip(updater.slots, numbers, strict=True) for number in own
        )

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(vector.piece_indices for vector in self._vectors)

    def apply(self, gradients: Sequence[Any]) -> None:
        self._updater.apply(gradients)

    def values(self) -> list[Array]:
        return self._updater.values()

    def load(self, values: Mapping[int, Any], state: Mapping[int, Any]) -> None:
        # Whole vectors are loaded, so parts that keep their values are read first.
        of_values, of_state = self._fetch(values, state)
        self._updater.load(self._values.filled(values, of_values), self._state.filled(state, of_state))

    def fetch(self, values: Sequence[int], state: Sequence[int]) -> tuple[list[Any], list[Any]]:
        of_values, of_state = self._fetch(values, state)
        return self._values.parts(values, of_values), self._state.parts(state, of_state)

    def set_learning_rate(self, rate: float) -> None:
        self._updater.set_learning_rate(rate)

    def _fetch(self, values: Iterable[int], state: Iterable[int]) -> tuple[dict[int, Array], dict[int, Array]]:
        """Return the arrays that contain these parts, by index."""
        wanted = self._values.arrays(values), self._state.arrays(state)
        of_values, of_state = self._updater.fetch(*wanted)
        return dict(zip(wanted[0], of_values, strict=True)), dict(zip(wanted[1], of_state, strict=True))
