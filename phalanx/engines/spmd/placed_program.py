"""Custom training loops on the devices of a mesh, whose steps the program jits over global arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from phalanx.engines.spmd.global_arrays import put_part
from phalanx.engines.spmd.placed_model import placement_scope
from phalanx.engines.spmd.placement import Axes, Placement
from phalanx.keras_compat.variables.variable_layouts import axes_of, laying_out_gradients, laying_out_updates


@contextmanager
def placed_step_scope(placement: Placement) -> Iterator[None]:
    """Context in which Keras optimizers leave weights and their own variables where the placement says.

    Otherwise, XLA chooses where the results of a jitted step are, and the next step would begin with another layout.
    """
    mesh = placement.mesh.backend_mesh

    def constrain(value: Any, axes: Axes | None) -> Any:
        if axes is None:  # a variable that was created outside of the scope
            return value
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*axes)))

    def of_gradient(gradient: Any, variable: Any) -> Any:
        return constrain(gradient, placement.gradient_layout(variable) if placement.level >= 2 else None)

    def of_update(value: Any, variable: Any) -> Any:
        return constrain(value, axes_of(variable, placement.mesh))

    with placement_scope(placement), laying_out_gradients(of_gradient), laying_out_updates(of_update):
        yield


def put_on_mesh(placement: Placement, part: Any) -> Any:
    """See `phalanx.engines.put_on_mesh`."""
    rows = len(part) * jax.process_count() if part.ndim else 1
    spec = PartitionSpec(*placement.batch_layout((rows, *part.shape[1:]) if part.ndim else ()))
    return put_part(part, rows, NamedSharding(placement.mesh.backend_mesh, spec))
