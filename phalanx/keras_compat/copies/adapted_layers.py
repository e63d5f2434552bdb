"""State that preprocessing layers have learned by `adapt`: vocabularies, statistics and bin boundaries.

It is in neither the configuration of a layer nor its weights alone: Keras writes it next to the weights when it saves a
model. Uses `_flatten_layers` and what the layers save. Tested with Keras 3.15.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.layers.preprocessing.index_lookup import IndexLookup

Array = np.ndarray[Any, Any]


class AdaptedState(NamedTuple):
    """State that one layer has learned.

    Attributes:
        layer_index: Index of the layer within its root layer; 0 is the root itself.
        shapes: Shapes with which it was built.
        variables: Values that it saves, by name.
        assets: Other files that it saves, by name.
        boundaries: Bin boundaries of `Discretization`, which saves them only in its configuration.
    """

    layer_index: int
    shapes: dict[str, Any] | None
    variables: dict[str, Array]
    assets: dict[str, bytes]
    boundaries: list[float] | None


def adapted_states(root: Any) -> tuple[AdaptedState, ...]:
    """Return the learned state of a layer and of the layers in it."""
    return tuple(_state(number, layer) for number, layer in enumerate(root._flatten_layers()) if _is_adapted(layer))


def restore_adapted(root: Any, states: tuple[AdaptedState, ...]) -> None:
    """Set on a copy of the layer, and on the layers in it, what the original has learned."""
    layers = list(root._flatten_layers())
    for state in states:
        layer = layers[state.layer_index]
        if state.boundaries is not None:
            layer.bin_boundaries = state.boundaries
            continue
        if not layer.built:
            layer.build_from_config(state.shapes)
        layer.load_own_variables(state.variables)
        if state.assets:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in state.assets.items():
                    Path(folder, name).write_bytes(content)
                layer.load_assets(folder)


def _is_adapted(layer: Any) -> bool:
    if isinstance(layer, IndexLookup):  # also the one in `TextVectorization`
        return layer.input_vocabulary is None and int(layer.lookup_table.size()) > 0
    if isinstance(layer, keras.layers.Normalization):
        return layer.input_mean is None and layer.built and _has_statistics(layer)
    return isinstance(layer, keras.layers.Discretization) and bool(layer.num_bins) and layer.bin_boundaries is not None


def _has_statistics(layer: Any) -> bool:
    """Whether the statistics differ from those with which the layer is built."""
    mean, variance = (keras.ops.convert_to_numpy(each) for each in (layer.adapt_mean, layer.adapt_variance))
    return bool(np.any(mean != 0) or np.any(variance != 1))


def _state(number: int, layer: Any) -> AdaptedState:
    if isinstance(layer, keras.layers.Discretization):
        return AdaptedState(number, None, {}, {}, list(layer.bin_boundaries))
    variables: dict[str, Any] = {}
    layer.save_own_variables(variables)
    own = {name: np.array(keras.ops.convert_to_numpy(value)) for name, value in variables.items()}
    assets: dict[str, bytes] = {}
    if isinstance(layer, IndexLookup):
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            assets = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return AdaptedState(number, layer.get_build_config(), own, assets, None)
