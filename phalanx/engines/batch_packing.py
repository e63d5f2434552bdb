"""The structure in which a model's steps receive their batches."""

from __future__ import annotations

from typing import Any

import keras

from phalanx.data.dataset_elements import ElementStructure


class BatchPacking:
    """Packs a batch as Keras passes it to `train_step`: without absent parts, so that `x, y = data` works, except for
    absent parts that the elements of the program's data have.

    Attributes:
        structure: Structure of the elements of the program's data.
    """

    def __init__(self) -> None:
        self.structure = ElementStructure.PARTS

    def pack(self, data: tuple[Any, Any, Any], structure: ElementStructure | None = None) -> Any:
        """Return `(x, y, sample_weight)` as an element of the program's data, or of another `structure`."""
        match structure or self.structure:
            case ElementStructure.PARTS:
                return keras.utils.pack_x_y_sample_weight(*data)
            case ElementStructure.ALONE:
                return (data[0],)
            case ElementStructure.TWO_ITEMS:
                return data[:2]
            case ElementStructure.THREE_ITEMS:
                return data
            case ElementStructure.WHOLE:
                return data[0]

    def for_keras(self, data: tuple[Any, Any, Any]) -> Any:
        """Return the batch for Keras's own methods, which unpack such a tuple, or raise if they cannot."""
        return data[0] if self.structure is ElementStructure.WHOLE else data
