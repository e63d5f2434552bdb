"""The structure in which a model's own steps get their batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import keras

from phalanx.data.elements import ElementStructure


class Packing(ABC):
    """A batch as Keras gives it to steps of a model's own: without what is not there, as in `x, y = data`."""

    _form = ElementStructure.PARTS

    def expect(self, form: ElementStructure) -> None:
        """See `Engine.expect`."""
        if form is not self._form:
            self._form = form
            self.retrace()

    @abstractmethod
    def retrace(self) -> None:
        """See `Engine.retrace`."""

    def _packed(self, data: tuple[Any, Any, Any], form: ElementStructure | None = None) -> Any:
        match form or self._form:
            case ElementStructure.PARTS:
                return keras.utils.pack_x_y_sample_weight(*data)
            case ElementStructure.ALONE:
                return (data[0],)
            case ElementStructure.WHOLE:
                return data[0]

    def _as_given(self, data: tuple[Any, Any, Any]) -> Any:
        """For Keras's own methods, which take such a tuple apart, or say that they cannot."""
        return data[0] if self._form is ElementStructure.WHOLE else data
