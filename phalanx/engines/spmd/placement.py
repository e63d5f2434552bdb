"""Placement of the variables of a model and of its batches on a mesh of devices.

For each axis of an array, a *layout* names the mesh axis over which it is divided, or None. A variable has two layouts:

    at rest      between the steps, and for gradients and optimizer state while they are updated
    in a step    while the model computes

They differ only at level 3, where weights are kept in shards and a step gathers them. All axes are those of a
`keras.distribution.DeviceMesh`. Layouts that a user writes are those of a `keras.distribution.LayoutMap`.
Source of the levels: Rajbhandari et al. 2020, ZeRO; Zhao et al. 2023, PyTorch FSDP.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from phalanx.engines.spmd.automatic_layouts import automatic_layout
from phalanx.errors import ConfigurationError

Axes = tuple[str | None, ...]
Shape = tuple[int, ...]

MIN_SHARDED_SIZE = 1024
"""Variables with fewer values stay whole on every device: gathering them would cost more than sharding saves."""

AUTO = "auto"
DATA, MODEL, REPLICA, SHARD = "data", "model", "replica", "shard"


@dataclass(frozen=True)
class Placement:
    """The division of a model over a mesh.

    Attributes:
        mesh: The devices.
        data_axes: The mesh axes over which each batch is divided.
        shard_axis: The mesh axis over which `level` divides.
        level: Extent of division over `shard_axis`: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights.
        layout_map: The program's own layouts, by path of the variable; "auto": see `automatic_layouts`; None: none.
    """

    mesh: keras.distribution.DeviceMesh
    data_axes: tuple[str, ...]
    shard_axis: str
    level: int = 0
    layout_map: keras.distribution.LayoutMap | str | None = None

    def __str__(self) -> str:
        axes = zip(self.mesh.axis_names, self.mesh.shape, strict=True)
        return "(" + ", ".join(f"{name}={size}" for name, size in axes) + ")"

    @property
    def data_shards(self) -> int:
        """Number of parts into which a batch is divided."""
        return math.prod(self.axis_size(axis) for axis in self.data_axes)

    @property
    def divides_models(self) -> bool:
        """Whether weights or optimizer state are divided, not only batches."""
        return self.level > 0 or self.layout_map is not None

    def axis_size(self, axis: str) -> int:
        """Return the number of devices along a mesh axis."""
        return int(self.mesh.shape[self.mesh.axis_names.index(axis)])

    def resting_layout(self, variable: Any) -> Axes:
        """Return the layout of a weight between the steps.

        Raises: ConfigurationError if the program's layout does not fit the variable.
        """
        axes = self.step_layout(variable)
        return self._sharded(variable, axes) if self.level >= 3 else axes

    def step_layout(self, variable: Any) -> Axes:
        """Return the layout of a weight while the model computes; raises as `resting_layout`."""
        whole: Axes = (None,) * len(variable.shape)
        if self.layout_map is None:
            return whole
        if isinstance(self.layout_map, str):
            return automatic_layout(
                variable.path, tuple(variable.shape), MODEL, self.axis_size(MODEL), MIN_SHARDED_SIZE
            )
        layout = self.layout_map[variable.path]
        if layout is None:
            return whole
        self._check(variable, layout.axes)
        return tuple(layout.axes) + (None,) * (len(variable.shape) - len(layout.axes))

    def slot_layout(self, variable: Any) -> Axes:
        """Return the layout of an optimizer variable that belongs to this weight."""
        axes = self.step_layout(variable)
        return self._sharded(variable, axes) if self.level >= 1 else axes

    def gradient_layout(self, variable: Any) -> Axes:
        """Return the layout in which the gradient of this weight is summed."""
        return self.slot_layout(variable) if self.level >= 2 else self.step_layout(variable)

    def batch_layout(self, shape: Shape) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes over which the first axis of a part of a batch is divided: the data axes, or none if the
        samples do not divide equally. Then every device computes the whole batch, which gives the same numbers."""
        return (self.data_axes,) if shape and shape[0] and shape[0] % self.data_shards == 0 else ()

    def on_devices(self, devices: Sequence[Any]) -> Placement:
        """Return the same placement on a mesh of other devices, which need not exist (`jax.experimental.topologies`).

        Raises: ConfigurationError if the number of devices differs.
        """
        size = math.prod(self.mesh.shape)
        if len(devices) != size:
            raise ConfigurationError(
                f"The mesh {self} has {size} devices, and there are {len(devices)}. Give the strategy "
                f"another mesh_shape."
            )
        mesh = keras.distribution.DeviceMesh(self.mesh.shape, self.mesh.axis_names, list(devices))
        if self.layout_map is None or isinstance(self.layout_map, str):
            return replace(self, mesh=mesh)
        # A TensorLayout belongs to one mesh, so each is rebuilt for the other.
        layout_map = keras.distribution.LayoutMap(mesh)
        for key, layout in self.layout_map.items():
            layout_map[key] = tuple(layout.axes)
        return replace(self, mesh=mesh, layout_map=layout_map)

    def check_names(self, variables: Iterable[Any]) -> None:
        """Check that each key of the layout map is the path of a variable, or matches one.

        Raises: ConfigurationError naming the nearest paths.
        """
        if self.layout_map is None or isinstance(self.layout_map, str):
            return
        paths = [variable.path for variable in variables]
        for key in self.layout_map:
            # Keys of this form refer to the output of a layer.
            if key.endswith("/output") or any(path == key or re.fullmatch(key, path) for path in paths):
                continue
            # Nearest to the literal text of the key, without the special characters of a regular expression.
            plain = re.sub(r"[.*+?\\^$()\[\]|]", "", key)
            near = difflib.get_close_matches(plain, paths, n=3, cutoff=0.3) or paths[:3]
            raise ConfigurationError(
                f"The layout map has the key {key!r}, which is the path of no variable of the model, and as a regular "
                f"expression matches none in full. The nearest are {', '.join(map(repr, near))}. Write one of these, "
                f"or an expression such as '.*{near[0].rpartition('/')[2]}'."
            )

    def check_divides(self, variables: Sequence[Any]) -> None:
        """Check that the mesh divides at least one variable, if weights or optimizer state should be divided.

        Args:
            variables: The model's weights.

        Raises: ConfigurationError if every device would hold all of it.
        """
        divided = [variable for variable in variables if any(self.slot_layout(variable))]
        if divided or not variables or not self.divides_models:
            return
        largest = max(variables, key=lambda variable: math.prod(variable.shape))
        raise ConfigurationError(
            f"No variable of the model can be divided over the mesh {self}, so that every device "
            f"would hold all of it. The largest is {largest.path!r} of shape {tuple(largest.shape)}. A variable is "
            f"divided if it has {MIN_SHARDED_SIZE} values or more and one of its axes is a multiple of the number of "
            f"devices. Choose such widths, another mesh_shape, or MirroredStrategy(engine='spmd')."
        )

    def _sharded(self, variable: Any, axes: Axes) -> Axes:
        """Divide the longest free axis that is a multiple of the shard axis over it, and return the new layout."""
        size, shape = self.axis_size(self.shard_axis), tuple(variable.shape)
        free = [axis for axis, taken in enumerate(axes) if taken is None and shape[axis] % size == 0 and shape[axis]]
        # A mesh axis can divide an array only once.
        if self.shard_axis in axes or not free or math.prod(shape) < MIN_SHARDED_SIZE:
            return axes
        chosen = max(free, key=lambda axis: shape[axis])
        return (*axes[:chosen], self.shard_axis, *axes[chosen + 1 :])

    def _check(self, variable: Any, axes: Sequence[str | None]) -> None:
        shape = tuple(variable.shape)
        if len(axes) > len(shape):
            raise ConfigurationError(
                f"The layout map gives {variable.path!r} the layout {tuple(axes)} of {len(axes)} axes, but its shape "
                f"is {shape}. Give it one entry for each axis of the variable."
            )
        for axis, name in enumerate(axes):
            if name is not None and shape[axis] % self.axis_size(name):
                raise ConfigurationError(
                    f"The layout map divides axis {axis} of {variable.path!r}, shape {shape}, over the axis {name!r} "
                    f"of the mesh {self}: {shape[axis]} is no multiple of {self.axis_size(name)}. Divide another axis "
                    f"of it, change its width to a multiple, or choose another mesh_shape."
                )


def make_mesh(shape: Sequence[int], axis_names: Sequence[str], devices: Sequence[Any]) -> keras.distribution.DeviceMesh:
    """Create a mesh of all these devices.

    Raises: ConfigurationError if the shape does not fit them.
    """
    described = ", ".join(map(str, devices[:8])) + (", ..." if len(devices) > 8 else "")
    if len(shape) != len(axis_names) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ConfigurationError(
            f"mesh_shape={tuple(shape)!r}; it must be {len(axis_names)} positive numbers of devices, "
            f"({', '.join(axis_names)})."
        )
    if math.prod(shape) != len(devices):
        raise ConfigurationError(
            f"mesh_shape={tuple(shape)} ({', '.join(axis_names)}) needs {math.prod(shape)} devices, and JAX sees "
            f"{len(devices)}: {described}. Choose a shape whose product is {len(devices)}. To try a mesh without such "
            f"devices, start the program with XLA_FLAGS=--xla_force_host_platform_device_count={math.prod(shape)} and "
            f"JAX_PLATFORMS=cpu."
        )
    return keras.distribution.DeviceMesh(tuple(shape), list(axis_names), list(devices))
