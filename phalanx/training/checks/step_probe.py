"""Trial of the first step of a program's custom code, as one process would take it and as replicas would.

What a custom `train_step` or layer computes is unknown. So one process takes the step on a few samples, and the steps
of two replicas that each have a part of them (`engines.local_ranks`), under conditions that make them comparable
(`keras_compat.deterministic_steps`), and then undoes them (`program_state`). Gradients, weights, layer state, metrics
and logs must agree. A value that differs raises an error that names it, before the first step. For a `test_step`,
metrics and logs are compared.

If a step fails with so few samples, it is tried with as many as a replica has; if more samples might take another path,
it is tried again. Changes caused by random numbers of other libraries are not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.arrays.tree import leaves
from phalanx.config.environment import process_environment
from phalanx.data.dataset_elements import ElementStructure
from phalanx.devices.gpu_count import count_gpus
from phalanx.devices.tpu_count import count_tpus
from phalanx.engines import make_engine
from phalanx.engines.engine import Engine
from phalanx.engines.local_ranks import LocalRanks, StepsDifferError
from phalanx.engines.metric_rules import MetricRule
from phalanx.engines.step_layout import MergeWeight
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.keras_compat.observation.deterministic_steps import DeterministicSteps
from phalanx.keras_compat.observation.metric_uses import MetricUses
from phalanx.keras_compat.variables.host_values import host_copy
from phalanx.training.checks.model_checks import kept_state_message
from phalanx.training.checks.step_comparison import ROUNDING, StepComparison, StepResults, rounds_coarsely
from phalanx.training.checks.trial_samples import (
    TRIAL_RANKS,
    part_of,
    take_trial_samples,
    trial_part_sizes,
    with_reflected_inputs,
)
from phalanx.training.program_effects.program_objects import may_depend_on_size, reads_iterators
from phalanx.training.program_effects.program_state import ProgramState
from phalanx.training.state_sync import seed_generators, variables_of

Array = np.ndarray[Any, Any]

ATTEMPTS = 3
"""Number of attempts, with other samples if one part alone yields NaN (for example, a ratio whose divisor is empty)."""
MAX_COMPARED_VALUES = 4096
"""Number of values of each variable that are compared."""

logger = logging.getLogger(__name__)


def is_needed(model: Any, step: str) -> bool:
    """Whether there is anything to determine about `train_step` or `test_step`; the same on all ranks."""
    if step == "train_step":
        return model_state.has_custom_code(model)
    return model_state.has_custom_steps(model, step) or bool(model_state.state_of_custom_layers(model))


def find_difference(
    model: Any, engine: Engine, data: Any, structure: ElementStructure, step: str, *, replicas: int
) -> str:
    """Describe what replicas would compute differently from one process, and the remedy; "" if no difference is found.

    Args:
        model: The built model, with its state in its variables.
        engine: Engine of the model, with its metric rules decided.
        data: Local batch, `(x, y, sample_weight)`.
        structure: Structure of the batch.
        step: The step, "train_step" or "test_step".
        replicas: Number of replicas that share the global batch.
    """
    if not can_be_tried(model, data):
        return ""
    for part in trial_part_sizes(data, replicas):
        state = ProgramState(model)
        try:
            keeps_python = engine.runs_python  # conditions may change it
            with (
                state.restored_on_exit(),
                DeterministicSteps(model, state.record_variables, keeps_python_state=keeps_python) as conditions,
            ):
                verdict = _Trial(model, engine, state, conditions, structure, step, part).difference(data)
            if verdict or (verdict is not None and not may_depend_on_size(model)):
                return verdict
        except UnsupportedError as error:
            return str(error)
        except StepsDifferError:
            logger.info("The parts of a %s of %r call other collectives than the batch", step, model.name)
            return ""
        except Exception as error:
            # The step may need a batch of its usual size, or compilation. Errors of either kind show when it is taken.
            logger.info("The %s of %r cannot be tried with %d samples: %r", step, model.name, 2 * part, error)
    return ""


class _Trial:
    """Trial of one step, with a given number of samples in each part."""

    def __init__(
        self,
        model: Any,
        engine: Engine,
        state: ProgramState,
        conditions: DeterministicSteps,
        structure: ElementStructure,
        step: str,
        part: int,
    ) -> None:
        self._model = model
        self._name = step
        self._part = part
        self._state = state
        self._conditions = conditions
        self._ranks = LocalRanks()
        self._uses = MetricUses()
        # Separate engines with a local merge: the model's engine would wait for the other ranks.
        self._ranks_engine, self._whole_engine = (make_engine(model, self._ranks) for _ in range(2))
        self._engine = self._whole_engine
        for each in (self._ranks_engine, self._whole_engine):
            each.set_batch_structure(structure)
        self._rules = engine.metric_rules.rules

    def difference(self, data: Any) -> str | None:
        """Return the difference as in `find_difference`; None if the samples yield no numbers to compare."""
        # In one process, metrics at a step include earlier steps; on a rank, only what this step adds.
        whole_rules = [MetricRule(MergeWeight.FIRST, False)] * len(self._rules)
        for engine, rules in ((self._ranks_engine, self._rules), (self._whole_engine, whole_rules)):
            engine.build(take_trial_samples(data, 0, self._part))
            engine.metric_rules.decide(rules)
        for attempt in range(ATTEMPTS):
            samples, others = (take_trial_samples(data, number, self._part) for number in (attempt, attempt + ATTEMPTS))
            second = with_reflected_inputs(others, self._part)
            try:
                found = self._compare(samples, second)
            except UnsupportedError:
                raise
            except Exception as error:  # includes StepsDifferError: a branch of the model that only some samples take
                logger.info("The %s of %r does not know changed samples: %r", self._name, self._model.name, error)
                second = others
                found = self._compare(samples, second)
            verdict = found[0].verdict()
            verdict = self._find_metric_misuse(differs=bool(verdict)) or verdict
            if self._name == "test_step":
                verdict = _find_kept_state(self._model, found[0]) or verdict
            if verdict or found[0].is_conclusive():
                break
        # Values moved by rounding differ on the replicas.
        if verdict or found[0].gradients_are_rounding or not (later := found[1].verdict_of_next_step()):
            return verdict if verdict or found[0].is_conclusive() else None
        # Is the cause what the first step has left, or the samples?
        return self._compare(second)[0].verdict() or later

    def _compare(self, *batches: Any) -> list[StepComparison]:
        """Compare what replicas and one process compute from consecutive batches."""
        self._state.restore()
        before = self._results({})
        # A difference between these two comes from random numbers, and says nothing about the replicas.
        whole, reseeded = self._run_whole(batches), self._run_whole(batches, self._state.change_seeds)
        is_coarse = _has_accelerators() or rounds_coarsely(self._model)
        rounded = [None] * len(batches) if is_coarse else self._run_whole(batches, self._round_weights)
        ranks = self._run_ranks(
            [[part_of(batch, rank, self._part) for batch in batches] for rank in range(TRIAL_RANKS)]
        )
        # Variables that were first assigned by these steps.
        before = before._replace(
            other_variables=self._other_variables({id(v): value for v, value in self._state.variables()})
        )
        model, step = self._model, self._name
        return [
            StepComparison(model, step, before, whole[i], reseeded[i], rounded[i], [rank[i] for rank in ranks])
            for i in range(len(batches))
        ]

    def _find_metric_misuse(self, *, differs: bool) -> str:
        """Return an error message if a step uses metrics in a way that a later merge would change.

        Args:
            differs: Whether the replicas' results differ, so that a number that is not logged may be the cause.
        """
        if name := self._uses.reset_metric:
            return (
                f"The {self._name} of {type(self._model).__name__} resets the metric {name!r}. Replicas merge what a "
                f"step has added to a metric after the step, so what it held before stays. Log the number itself "
                f"instead, or reset the metric in a callback, between two steps."
            )
        if name := self._uses.early_logged_metric or (self._uses.early_read_metric if differs else ""):
            return (
                f"The {self._name} of {type(self._model).__name__} reads the result of the metric {name!r}, and then "
                f"updates it. Replicas merge what a step has added to a metric after the step, so a result is that of "
                f"the whole step. Update metrics first; and keep what a later step uses in a variable "
                f"(self.add_weight)."
            )
        return ""

    def _run_whole(self, batches: Sequence[Any], change: Callable[[], None] = lambda: None) -> list[StepResults]:
        self._state.restore()
        change()
        self._engine = self._whole_engine
        return self._ranks.whole(lambda: self._steps(batches, 1.0))

    def _round_weights(self) -> None:
        """Perturb all weights by as much as rounding may change them."""
        signs = np.random.default_rng(0)
        for variable in self._model.trainable_variables:
            value = host_copy(variable)
            variable.assign(value * (1 + ROUNDING * signs.choice((-1.0, 1.0), value.shape)).astype(value.dtype))

    def _run_ranks(self, parts: Sequence[Sequence[Any]]) -> list[list[StepResults]]:
        self._engine = self._ranks_engine
        share = 1.0 / len(parts)
        return self._ranks.compute(len(parts), lambda rank: self._steps(parts[rank], share), self._state.restore)

    def _steps(self, batches: Sequence[Any], share: float) -> list[StepResults]:
        results: list[StepResults] = []
        for batch in batches:
            if results and not self._conditions.keeps_python_state:
                self._state.restore_python()
            results.append(self._step(batch, share))
        return results

    def _step(self, part: Any, share: float) -> StepResults:
        engine = self._engine
        self._conditions.begin()
        engine.begin()
        try:
            with self._uses.watched(self._model, self._name):
                logs = self._train(part, share) if self._name == "train_step" else self._test(part, share)
        finally:
            engine.end()
        # Logs that equal metric results are compared as metric state: a ratio may divide by rounding error.
        known = model_state.flat_logs(self._model.get_metrics_result())
        found = {name: _array(value) for name, value in model_state.flat_logs(logs).items()}
        return self._results(
            {k: v for k, v in found.items() if k not in known or not np.array_equal(v, _array(known[k]))}
        )

    def _train(self, part: Any, share: float) -> Mapping[str, Any]:
        self._engine.train(part, share)
        return self._engine.logs()

    def _test(self, part: Any, share: float) -> Mapping[str, Any]:
        start = self._engine.metric_rules.values()
        self._engine.test(part, share)
        return self._engine.merged_metrics(share, start, final=True)

    def _results(self, logs: dict[str, Array]) -> StepResults:
        model = self._model
        weights: dict[str, Array] = {}
        state: dict[str, Array] = {}
        metrics: dict[str, Array] = {}
        # The trial replaces the optimizers' update, so their variables are irrelevant; seeds are changed on purpose.
        apart = {id(generator.state) for generator in seed_generators(model)}
        apart |= {id(variable) for optimizer in model_state.optimizers(model) for variable in optimizer.variables}
        trained = {id(variable) for variable in model.trainable_variables}
        for variable in (
            variables_of(model) if self._name == "train_step" else model_state.state_of_custom_layers(model)
        ):
            if id(variable) not in apart:
                _add(weights if id(variable) in trained else state, variable.path, variable.value)
        for metric in model.metrics:
            for variable in metric.variables:
                _add(metrics, f"{metric.name}/{variable.name}", variable.value)
        return StepResults(self._gradients(), weights, state, metrics, self._other_variables(), logs)

    def _other_variables(self, values: Mapping[int, Array] | None = None) -> dict[str, Array]:
        """Return variables unknown to the model, with these values or their current ones."""
        model, found = self._model, dict[str, Array]()
        known = [*variables_of(model), *model.metrics_variables, *self._conditions.optimizer_variables()]
        # If a model's `metrics` omits Keras's own tracker, the model never reads it, but Keras's step updates it.
        known += model._loss_tracker.variables
        apart = {id(variable) for variable in known} | {id(each.state) for each in seed_generators(model)}
        rates = [getattr(each, "_learning_rate", None) for each in self._conditions.optimizers]
        for variable, _ in self._state.variables():
            if id(variable) not in apart or any(variable is rate for rate in rates):
                value = variable.value if values is None else values[id(variable)]
                _add(found, variable.path, value)
        return found

    def _gradients(self) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for update, (layout, arrays) in enumerate(self._ranks.merged):
            for number, (weight, array) in enumerate(zip(layout.weights, arrays, strict=True)):
                if weight is MergeWeight.GRADIENT:
                    found[f"{update}.{number}"] = _array(array)
        return found


def _has_accelerators() -> bool:
    """Whether matrix products may be computed with less precision than float32."""
    return bool(count_gpus(process_environment()) or count_tpus())


def _find_kept_state(model: Any, found: StepComparison) -> str:
    """Return an error message if layers keep data of their samples in a test step, after which no state is merged."""
    for variable in model_state.state_of_custom_layers(model):
        if variable.path not in found.whole.state:
            continue
        whole, *parts = (each.state[variable.path] for each in (found.whole, *found.ranks))
        if not all(np.allclose(part, whole, rtol=1e-5, atol=1e-6) for part in parts):
            return kept_state_message(variable)
    return ""


def can_be_tried(model: Any, data: Any) -> bool:
    """Whether a step can be undone completely, contains nothing that is local on purpose, and all arrays of the batch
    have a row for each sample."""
    if reads_iterators(model):
        return False
    wrapped = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.TorchModuleWrapper)]
    if any("BatchNorm" in type(part).__name__ for layer in wrapped for part in layer.module.modules()):
        return False
    sizes = {len(leaf) if np.ndim(leaf) else 0 for leaf in leaves(data) if leaf is not None}
    return len(sizes) == 1 and 0 not in sizes


def _add(found: dict[str, Array], name: str, value: Any) -> None:
    found[name if name not in found else f"{name} ({len(found)})"] = _array(value)


def _array(value: Any) -> Array:
    flat = np.asarray(keras.ops.convert_to_numpy(value)).reshape(-1)
    # Strided instead of the first ones, which may be a padding row or a bias of zeros.
    return flat[:: max(1, flat.size // MAX_COMPARED_VALUES)].astype(np.float64)
