"""Builds the layers that only a step of the program's own builds, before the first step.

Keras builds them in the step itself: those of a model without `call`, or a head that only its `train_step` uses. That
is too late for replicas, whose weights begin as the chief's, and for the trial of the step (`step_probe`). So a step is
taken and undone, apart from what it has created.
"""

from __future__ import annotations

from typing import Any

from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines import make_engine
from phalanx.engines.local_ranks import LocalRanks
from phalanx.keras_compat.observation.trial_conditions import running_eagerly
from phalanx.training.program_effects.program_state import ProgramState


def build_parts(model: Any, data: Any, form: ElementStructure, step: str) -> None:
    """Let a step build what it uses.

    Args:
        data: a local batch, `(x, y, sample_weight)`.
        form: its structure.
        step: "train_step" or "test_step".
    """
    with ProgramState(model).kept(), running_eagerly(model):
        engine = make_engine(model, LocalRanks())
        engine.expect(form)
        engine.build(data)
        # What the variables declare will do: nothing that is computed here stays.
        engine.metric_rules.decide(engine.metric_rules.rules)
        engine.begin()
        try:
            (engine.train if step == "train_step" else engine.test)(data, 1.0)
        finally:
            engine.end()
