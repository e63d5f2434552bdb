"""What is trained both with and without Phalanx, to be compared: importing this package registers all scenarios."""

from tests.training.scenarios import (
    batches,
    callbacks,
    changed_optimizers,
    custom_optimizers,
    disagreement,
    fit_arguments,
    inputs,
    layers,
    logs,
    losses,
    metrics,
    models,
    optimizers,
    precision,
    reading,
    steps,
)
from tests.training.scenarios.registry import SCENARIOS, Scenario, Setting

__all__ = [
    "SCENARIOS",
    "Scenario",
    "Setting",
    "batches",
    "callbacks",
    "changed_optimizers",
    "custom_optimizers",
    "disagreement",
    "fit_arguments",
    "inputs",
    "layers",
    "logs",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "precision",
    "reading",
    "steps",
]
