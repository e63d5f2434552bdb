"""The pickles of a call of a model's method, which other processes make too: its arguments, and the model itself."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import keras

from phalanx.engines.tensors import Tensors
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_copies
from phalanx.keras_compat.callback_bases import OnChief
from phalanx.runtime.pickling import Pickler
from phalanx.training.callback_list import runs_on_chief


class CallPickler(Pickler):
    """Pickles one thing: Keras objects as `model_copies` has them, and callbacks that only the chief runs as shells.

    Args:
        tensors: of this process's backend.
        refer: the reference that travels in a thing's place; None if it travels by value.
        with_weights: whether layers that travel by value have their weights with them.
    """

    def __init__(self, tensors: Tensors, refer: Callable[[Any], Any], *, with_weights: bool) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._refer = refer
        self._with_weights = with_weights

    def pickled(self, thing: Any) -> bytes:
        """The pickle of a thing. Raises: whatever the pickling code of some class raises."""
        self.dump(thing)
        return self._file.getvalue()

    def pickled_or_refused(self, thing: Any, refusal: str, alternative: str) -> bytes:
        """The pickle of a thing that a call needs.

        Args:
            refusal: says what cannot travel, and where to; the reason follows it.
            alternative: to passing what can travel, for the end of the error.

        Raises: UnsupportedError.
        """
        try:
            return self.pickled(thing)
        except UnsupportedError:
            raise
        except Exception as error:  # whatever the pickling code of some class raises
            raise UnsupportedError(
                f"{refusal}: {str(error).rstrip('.')}. Pass arrays, a keras.utils.PyDataset, a DataLoader or a "
                f"tf.data.Dataset rather than a running generator, or {alternative}."
            ) from error

    def persistent_id(self, thing: Any) -> Any:
        return self._refer(thing)

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, OnChief):
            return OnChief, (thing.create(),)
        if isinstance(thing, keras.callbacks.Callback) and runs_on_chief(thing):
            return copyreg.__newobj__, (type(thing),)  # type: ignore[attr-defined]  # there it is never called
        for reduced in (
            model_copies.reduced(thing, with_weights=self._with_weights),
            self._tensors.reduce(thing),
        ):
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(thing)
