"""A Keras model on a mesh: creates its variables in their layouts, and moves those that were created elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.engines.spmd.placement import Axes, Placement
from phalanx.keras_compat.model_state import optimizers
from phalanx.keras_compat.variables.variable_layouts import PlacedDistribution, axes_of, lay_out, laying_out_slots


class ModelShardings(NamedTuple):
    """The shardings of the four lists of values, or some of them, that the steps of a model take and return."""

    trainable: list[Any]
    non_trainable: list[Any]
    optimizer: list[Any]
    metrics: list[Any]


@contextmanager
def placement_scope(placement: Placement) -> Iterator[None]:
    """Context in which variables are created in their layouts, and layers lay out their outputs as the program's layout
    map says."""
    activations = None if isinstance(placement.layout_map, str) else placement.layout_map
    distribution = PlacedDistribution(placement.mesh, placement.data_axes[0], activations, placement.resting_layout)
    with distribution.scope(), laying_out_slots(placement.mesh, placement.slot_layout):
        yield


class PlacedModel:
    """The variables of one model on a mesh."""

    def __init__(self, model: Any, placement: Placement) -> None:
        self._model = model
        self._placement = placement
        # The variables that were placed last. Others mean that the model was rebuilt or compiled again.
        self._placed: list[list[Any]] = []
        self._shardings: ModelShardings | None = None

    def place(self) -> bool:
        """Move variables that are elsewhere. Returns whether functions compiled before this call no longer fit.

        Raises: ConfigurationError if the program's layouts do not fit the model's variables.
        """
        model, placement = self._model, self._placement
        found = [list(variables) for variables in self._variables()]
        if _are_same_objects(found, self._placed):
            return False
        weights = [*model.trainable_variables, *model.non_trainable_variables]
        placement.check_names(weights)
        placement.check_divides(weights)
        of_optimizers = {id(v): v for optimizer in optimizers(model) for v in optimizer.variables}
        for weight in weights:
            if id(weight) not in of_optimizers:
                lay_out(weight, placement.resting_layout(weight), placement.mesh)
        # Slots of optimizers that a model keeps may be among its weights. Each is moved once, as a slot.
        for slot in of_optimizers.values():
            # Slots created in `placement_scope` are already in place.
            if axes_of(slot, placement.mesh) is None:
                lay_out(slot, self._slot_layout(slot), placement.mesh)
        for variable in model.metrics_variables:
            lay_out(variable, (None,) * len(variable.shape), placement.mesh)
        # Compiled functions depend on shardings, not on the objects: a model that is compiled again keeps them.
        former, self._placed, self._shardings = self._shardings, found, self.shardings()
        return former != self._shardings

    def shardings(self, mesh: Mesh | None = None) -> ModelShardings:
        """Return the shardings of the placed variables between the steps.

        Args:
            mesh: Mesh of other devices than the variables'; None: theirs.
        """
        mesh = mesh or self._placement.mesh.backend_mesh
        return ModelShardings(
            *[
                [NamedSharding(mesh, PartitionSpec(*(axes_of(v, self._placement.mesh) or ()))) for v in variables]
                for variables in self._variables()
            ]
        )

    def step_layouts(self) -> tuple[list[Axes], list[Axes]]:
        """Return the layouts of trainable and non-trainable variables while the model computes."""
        model, in_step = self._model, self._placement.step_layout
        return [in_step(v) for v in model.trainable_variables], [in_step(v) for v in model.non_trainable_variables]

    def batch_sharding(self, shape: tuple[int, ...], mesh: Mesh | None = None) -> NamedSharding:
        """Return the sharding of an array of a global batch, by its shape."""
        return NamedSharding(
            mesh or self._placement.mesh.backend_mesh, PartitionSpec(*self._placement.batch_layout(shape))
        )

    def _variables(self) -> tuple[Sequence[Any], ...]:
        model = self._model
        of_optimizer = () if getattr(model, "optimizer", None) is None else model.optimizer.variables
        return model.trainable_variables, model.non_trainable_variables, of_optimizer, model.metrics_variables

    def _slot_layout(self, slot: Any) -> Axes:
        """Return the layout of an optimizer variable created elsewhere: its name begins with the weight's path."""
        for weight in self._model.trainable_variables:
            # Keras names it so (`add_variable_from_reference`). The layout of another weight of this shape would not
            # change any number.
            if slot.name.startswith(weight.path.replace("/", "_")) and tuple(slot.shape) == tuple(weight.shape):
                return self._placement.slot_layout(weight)
        return (None,) * len(slot.shape)


def _are_same_objects(left: Sequence[Sequence[Any]], right: Sequence[Sequence[Any]]) -> bool:
    """Whether these are the same objects in the same lists."""
    return [[id(each) for each in one] for one in left] == [[id(each) for each in one] for one in right]
