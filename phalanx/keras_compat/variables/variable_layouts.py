"""Layouts of Keras variables on a mesh of devices: sets those of new variables, and moves existing ones.

Uses `_layout`, `_value`, `add_variable_from_reference` and `apply` of optimizers. Tested with Keras 3.15 on JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from phalanx.keras_compat.patching import PatchedFunction, defining_class


class PlacedDistribution(keras.distribution.ModelParallel):  # type: ignore[misc]
    """The distribution from which Keras gets the layout of each new variable.

    Args:
        mesh: Mesh of devices.
        data_axis: The mesh axis over which batches are divided.
        layout_map: Layouts of layer outputs (keys that end in "/output"); None: none.
        layout_of: Returns the layout of a variable: for each of its axes, a mesh axis or None.
    """

    def __init__(self, mesh: Any, data_axis: str, layout_map: Any, layout_of: Callable[[Any], Any]) -> None:
        layouts = keras.distribution.LayoutMap(mesh) if layout_map is None else layout_map
        super().__init__(layout_map=layouts, batch_dim_name=data_axis)
        self._layout_of = layout_of

    def get_variable_layout(self, variable: Any) -> Any:
        """See `keras.distribution.ModelParallel`."""
        if variable._layout is not None:
            return variable._layout
        return keras.distribution.TensorLayout(self._layout_of(variable), self.device_mesh)


@contextmanager
def laying_out_slots(mesh: Any, layout_of_slot: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which optimizers create the variables that belong to a weight in the layout returned for the weight.

    Keras gives them the weight's layout. Here they get their own at creation: all may not fit into one device.
    """

    def add(optimizer: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
        made = f"{reference_variable.path.replace('/', '_')}_{name or 'var'}"
        layout = keras.distribution.TensorLayout(layout_of_slot(reference_variable), mesh)
        return optimizer.add_variable(
            shape=reference_variable.shape,
            initializer=initializer,
            dtype=reference_variable.dtype,
            name=made,
            layout=layout,
        )

    kind = defining_class(keras.optimizers.Optimizer, "add_variable_from_reference")
    with PatchedFunction(kind, "add_variable_from_reference", add):
        yield


@contextmanager
def laying_out_gradients(lay_out: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Context in which every optimizer applies what `lay_out(gradient, variable)` returns."""

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        grads = [g if g is None else lay_out(g, v) for g, v in zip(grads, variables, strict=True)]
        return patch.original(optimizer, grads, trainable_variables)

    patch = PatchedFunction(defining_class(keras.optimizers.Optimizer, "apply"), "apply", apply)
    with patch:
        yield


@contextmanager
def laying_out_updates(lay_out: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Context in which each `stateless_apply` returns its new values as `lay_out(value, variable)` does."""

    def stateless_apply(optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        values = patch.original(optimizer, optimizer_variables, grads, trainable_variables)
        known = (optimizer._trainable_variables, optimizer.variables)
        return tuple([lay_out(*pair) for pair in zip(*both, strict=True)] for both in zip(values, known, strict=True))

    kind = keras.optimizers.Optimizer
    patch = PatchedFunction(defining_class(kind, "stateless_apply"), "stateless_apply", stateless_apply)
    with patch:
        yield


def axes_of(variable: Any, mesh: Any) -> tuple[Any, ...] | None:
    """Return the layout in which a variable was created for this mesh; None if it was not."""
    layout = variable._layout
    is_ours = isinstance(layout, keras.distribution.TensorLayout) and layout.device_mesh is mesh
    return tuple(layout.axes) if is_ours else None


def lay_out(variable: Any, axes: tuple[Any, ...], mesh: Any) -> None:
    """Move a variable's value into a layout, which also applies to all later values."""
    if axes_of(variable, mesh) == axes:
        return
    # `_direct_assign` places this value and all later ones as `_layout` says.
    variable._layout = keras.distribution.TensorLayout(axes, mesh)
    variable._direct_assign(variable._value)
