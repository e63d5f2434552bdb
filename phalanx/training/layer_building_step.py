"""Trial step that builds, before the first step, the layers that only a custom step builds.

Keras builds them in the step itself: layers of a model without `call`, or a head that only its `train_step` uses. That
is too late for replicas, whose weights start as the chief's, and for the trial of the step (`step_probe`). So a step is
taken and undone, except for what it has created.
"""

from __future__ import annotations

from typing import Any

from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines import make_engine
from phalanx.engines.local_ranks import LocalRanks
from phalanx.keras_compat.observation.deterministic_steps import running_eagerly
from phalanx.training.program_effects.program_state import ProgramState


def build_layers_by_step(model: Any, data: Any, structure: ElementStructure, step: str) -> None:
    """Run a step to build what it uses.

    Args:
        data: Local batch, `(x, y, sample_weight)`.
        structure: Structure of the batch.
        step: The step, "train_step" or "test_step".
    """
    with ProgramState(model).restored_on_exit(), running_eagerly(model):
        engine = make_engine(model, LocalRanks())
        engine.set_batch_structure(structure)
        engine.build(data)
        # The declared rules suffice: nothing that is computed here is kept.
        engine.metric_rules.decide(engine.metric_rules.rules)
        engine.begin()
        try:
            (engine.train if step == "train_step" else engine.test)(data, 1.0)
        finally:
            engine.end()
