"""`ModelParallelStrategy`: divides layers over devices."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from phalanx.engines.spmd.placement import AUTO, DATA, MODEL, Placement, make_mesh
from phalanx.errors import ConfigurationError
from phalanx.strategies.device_meshes import mesh_devices
from phalanx.strategies.spmd_job import join_spmd_job, with_mesh
from phalanx.strategies.strategy import Strategy
from phalanx.training.training_policy import TrainingPolicy


class ModelParallelStrategy(Strategy):
    """One compiled program on all devices, over which layers are divided (tensor parallelism). JAX only.

    Training gives the numbers of a single device, with any batch size.

    Args:
        layout_map: A `keras.distribution.LayoutMap` from the paths of variables to axes of its mesh. Or "auto": derive
            the layout from the names and shapes of the variables, as Megatron-LM divides a transformer.
        mesh_shape: Numbers of devices (data, model), for layout_map="auto". None: (1, all devices). A LayoutMap has its
            own mesh, whose first axis divides the batches.

    Raises:
        ConfigurationError: the mesh does not fit the devices; or, when a variable is created, its layout does not fit
            it; or, before the first step, a key of the layout map matches no variable, or nothing is divided.
        UnsupportedError: Keras does not run on JAX.
    """

    def __init__(self, layout_map: keras.distribution.LayoutMap | str = AUTO, mesh_shape: Sequence[int] | None = None):
        replica = join_spmd_job("ModelParallelStrategy")
        devices = mesh_devices()
        if isinstance(layout_map, keras.distribution.LayoutMap):
            mesh = _mesh_of(layout_map, mesh_shape, devices)
            placement = Placement(mesh, (mesh.axis_names[0],), mesh.axis_names[0], layout_map=layout_map)
        elif layout_map == AUTO:
            mesh = make_mesh(mesh_shape or (1, len(devices)), (DATA, MODEL), devices)
            placement = Placement(mesh, (DATA,), DATA, layout_map=AUTO)
        else:
            raise ConfigurationError(
                f"ModelParallelStrategy(layout_map={layout_map!r}): it is a keras.distribution.LayoutMap or 'auto'."
            )
        super().__init__(with_mesh(replica, placement), policy=TrainingPolicy(placement=placement))


def _mesh_of(
    layout_map: keras.distribution.LayoutMap, mesh_shape: Sequence[int] | None, devices: Sequence[str]
) -> keras.distribution.DeviceMesh:
    """The mesh of a layout map. Raises ConfigurationError if it does not fit these devices."""
    mesh = layout_map.device_mesh
    if mesh is None:
        raise ConfigurationError(
            "The layout map has no mesh. Write keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 2), "
            "['data', 'model'])), with your own numbers of devices."
        )
    if mesh_shape is not None and tuple(mesh_shape) != tuple(mesh.shape):
        raise ConfigurationError(
            f"mesh_shape={tuple(mesh_shape)}, but the mesh of the layout map has the shape {tuple(mesh.shape)}. Leave "
            f"out mesh_shape."
        )
    make_mesh(mesh.shape, mesh.axis_names, devices)
    return mesh
