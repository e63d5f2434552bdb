"""Tries the first step of a program's own code, as one process would take it and as replicas would.

What a `train_step` or a layer of the program's own computes, no one knows. So one process takes the step of a few
samples, and those of two replicas that have a part of them each (`engines.local_ranks`), under conditions in which
they compare (`keras_compat.trial_conditions`), and undoes them (`program_state`). Gradients, weights, layer state,
metrics and logs must come out alike. What does not is an error that names it, before the first step. Of a `test_step`,
metrics and logs are compared.

A step that cannot be taken of so few samples is tried with as many as a replica has. What other random numbers of other
libraries change is not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.collectives.reduction import is_float
from phalanx.config.environment import process_environment
from phalanx.data.dataset_elements import ElementStructure
from phalanx.devices.gpu_count import count_gpus
from phalanx.devices.tpu_count import count_tpus
from phalanx.engines import make_engine
from phalanx.engines.engine import Engine
from phalanx.engines.local_ranks import LocalRanks, StepsDifferError
from phalanx.engines.step_layout import MergeWeight
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch.simulated_ranks import simulated_ranks
from phalanx.keras_compat.observation.metric_uses import MetricUses
from phalanx.keras_compat.observation.trial_conditions import LARGEST_CHANGE, TrialConditions
from phalanx.training.checks.model_checks import kept_state
from phalanx.training.checks.tried_samples import scaled
from phalanx.training.program_effects.program_objects import reads_iterators
from phalanx.training.program_effects.program_state import ProgramState
from phalanx.training.state_sync import seed_generators, value_of, variables_of

Array = np.ndarray[Any, Any]

RANKS = 2
PART = 8
"""Samples of each replica: few; as many, so that JAX compiles two steps and not three; and groups of two, four or
eight, as some layers make where they can."""
ATTEMPTS = 3
"""With other samples, where those of a part alone give no number (there is nothing that a ratio divides by)."""
SAMPLED = 4096
"""So many values of each variable are compared."""
TOLERANCE, TOLERANCE_OF_WEIGHTS = 2e-5, 5e-3
"""Of the largest value, and of a weight's largest change: gradients are sums, and tensor cores round to ten bits."""
COARSE_TOLERANCE = 5e-2
"""Of both, where the model computes in half precision, or with quantized values."""
ROUNDING = 1e-6
"""Of a weight itself, and of the largest change of all, for gradients that are nothing but rounding."""
NOISE = 10
"""Times what a change of all weights by `ROUNDING` does to a gradient: where that is known, no more is allowed."""

logger = logging.getLogger(__name__)


class _Results(NamedTuple):
    """The effects of a step, by name: gradients as they were applied, and the state after it.

    Attributes:
        others: variables that the step assigns and that are none of the model's; and learning rates.
    """

    gradients: dict[str, Array]
    weights: dict[str, Array]
    state: dict[str, Array]
    metrics: dict[str, Array]
    others: dict[str, Array]
    logs: dict[str, Array]


def is_needed(model: Any, step: str) -> bool:
    """Whether there is anything to find out about `train_step` or `test_step`; the same on all ranks."""
    if step == "train_step":
        return model_state.has_own_code(model)
    return model_state.has_own_steps(model, step) or bool(model_state.state_of_own_layers(model))


def find_difference(model: Any, engine: Engine, data: Any, form: ElementStructure, step: str) -> str:
    """What replicas would compute otherwise than one process, and what to write instead; "" if nothing is known of.

    Args:
        model: built, with its state in its variables.
        engine: its engine, whose rules of metrics are decided.
        data: a local batch, `(x, y, sample_weight)`.
        form: its structure.
        step: "train_step" or "test_step".
    """
    if not can_be_tried(model, data):
        return ""
    for part in sizes_of_parts(data):
        state = ProgramState(model)
        try:
            keeps_python = engine.runs_python  # conditions may change it
            with state.kept(), TrialConditions(model, state.keep, keeps_python=keeps_python) as conditions:
                verdict = _Trial(model, engine, state, conditions, form, step, part).difference(data)
            if verdict is not None:
                return verdict
        except UnsupportedError as error:
            return str(error)
        except StepsDifferError:
            logger.info("The parts of a %s of %r call other collectives than the batch", step, model.name)
            return ""
        except Exception as error:
            # The step may need a batch of its own size, or compilation. What is wrong with both shows when it is taken.
            logger.info("The %s of %r cannot be tried with %d samples: %r", step, model.name, 2 * part, error)
    return ""


class _Trial:
    """The trial of one step, with so many samples in each part."""

    def __init__(
        self,
        model: Any,
        engine: Engine,
        state: ProgramState,
        conditions: TrialConditions,
        form: ElementStructure,
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
        # An engine of its own, whose merge is local: the model's engine would wait for the other ranks.
        self._engine = make_engine(model, self._ranks)
        self._engine.expect(form)
        self._rules = engine.metric_rules.rules

    def difference(self, data: Any) -> str | None:
        """See `find_difference`; None if the samples give no numbers to compare."""
        self._engine.build(few_samples(data, 0, self._part))
        self._engine.metric_rules.decide(self._rules)
        for attempt in range(ATTEMPTS):
            samples, others = (few_samples(data, number, self._part) for number in (attempt, attempt + ATTEMPTS))
            second = _with_unlike_parts(others, self._part)
            try:
                found = self._compare(samples, second)
            except UnsupportedError:
                raise
            except Exception as error:  # among them StepsDifferError: a branch of the model that only some samples take
                logger.info("The %s of %r does not know changed samples: %r", self._name, self._model.name, error)
                second = others
                found = self._compare(samples, second)
            verdict = found[0].verdict()
            verdict = self._misuse(differs=bool(verdict)) or verdict
            if self._name == "test_step":
                verdict = _kept_by_layers(self._model, found[0]) or verdict
            if verdict or found[0].tells():
                break
        # What moved by rounding is elsewhere on the replicas.
        if verdict or found[0].moves_by_rounding or not (later := found[1].verdict_of_next_step()):
            return verdict if verdict or found[0].tells() else None
        # Is it because of what the first step has left, or because of the samples?
        return self._compare(second)[0].verdict() or later

    def _compare(self, *batches: Any) -> list[_Comparison]:
        """What replicas make of some batches, one after the other, and what one process makes of them."""
        self._state.restore()
        before = self._results({})
        # What differs between these two follows from random numbers, and says nothing about the replicas.
        whole, other = self._whole(batches), self._whole(batches, self._state.change_seeds)
        is_coarse = _has_accelerators() or rounds_coarsely(self._model)
        rounded = [None] * len(batches) if is_coarse else self._whole(batches, self._round_weights)
        ranks = self._of_ranks([[part_of(batch, rank, self._part) for batch in batches] for rank in range(RANKS)])
        # Variables that the steps were the first to assign.
        before = before._replace(others=self._others({id(v): value for v, value in self._state.variables()}))
        model, step = self._model, self._name
        return [
            _Comparison(model, step, before, whole[i], other[i], rounded[i], [rank[i] for rank in ranks])
            for i in range(len(batches))
        ]

    def _misuse(self, *, differs: bool) -> str:
        """The error text if a step uses metrics in a way that a later merge would change.

        Args:
            differs: whether replicas compute something else, so that a number that is not logged may be the cause.
        """
        if name := self._uses.resets:
            return (
                f"The {self._name} of {type(self._model).__name__} resets the metric {name!r}. Replicas merge what a "
                f"step has added to a metric after the step, so what it held before stays. Log the number itself "
                f"instead, or reset the metric in a callback, between two steps."
            )
        if name := self._uses.logs_early or (self._uses.reads_early if differs else ""):
            return (
                f"The {self._name} of {type(self._model).__name__} reads the result of the metric {name!r}, and then "
                f"updates it. Replicas merge what a step has added to a metric after the step, so a result is that of "
                f"the whole step. Update metrics first; and keep what a later step uses in a variable "
                f"(self.add_weight)."
            )
        return ""

    def _whole(self, batches: Sequence[Any], change: Callable[[], None] = lambda: None) -> list[_Results]:
        self._state.restore()
        change()
        self._ranks.be_whole()
        with simulated_ranks(1):
            return self._steps(batches, 1.0)

    def _round_weights(self) -> None:
        """Change all weights by what rounding may change in them."""
        signs = np.random.default_rng(0)
        for variable in self._model.trainable_variables:
            value = value_of(variable)
            variable.assign(value * (1 + ROUNDING * signs.choice((-1.0, 1.0), value.shape)).astype(value.dtype))

    def _of_ranks(self, parts: Sequence[Sequence[Any]]) -> list[list[_Results]]:
        def steps(rank: int) -> list[_Results]:
            with simulated_ranks(len(parts)):
                return self._steps(parts[rank], 1.0 / len(parts))

        return self._ranks.compute(len(parts), steps, self._state.restore)

    def _steps(self, batches: Sequence[Any], share: float) -> list[_Results]:
        results: list[_Results] = []
        for batch in batches:
            if results and not self._conditions.keeps_python:
                self._state.restore_python()
            results.append(self._step(batch, share))
        return results

    def _step(self, part: Any, share: float) -> _Results:
        engine = self._engine
        self._conditions.begin()
        engine.begin()
        try:
            with self._uses.watched(self._model, self._name):
                logs = self._train(part, share) if self._name == "train_step" else self._test(part, share)
        finally:
            engine.end()
        # What follows from the state of metrics is compared there: a ratio may divide by what rounding leaves.
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

    def _results(self, logs: dict[str, Array]) -> _Results:
        model = self._model
        weights: dict[str, Array] = {}
        state: dict[str, Array] = {}
        metrics: dict[str, Array] = {}
        # The trial replaces the optimizers' update, so their variables say nothing; and seeds are changed on purpose.
        apart = {id(generator.state) for generator in seed_generators(model)}
        apart |= {id(variable) for optimizer in model_state.optimizers(model) for variable in optimizer.variables}
        trained = {id(variable) for variable in model.trainable_variables}
        for variable in variables_of(model) if self._name == "train_step" else model_state.state_of_own_layers(model):
            if id(variable) not in apart:
                _add(weights if id(variable) in trained else state, variable.path, variable.value)
        for metric in model.metrics:
            for variable in metric.variables:
                _add(metrics, f"{metric.name}/{variable.name}", variable.value)
        return _Results(self._gradients(), weights, state, metrics, self._others(), logs)

    def _others(self, values: Mapping[int, Array] | None = None) -> dict[str, Array]:
        """Variables of which the model does not know, with these values or their own."""
        model, found = self._model, dict[str, Array]()
        known = [*variables_of(model), *model.metrics_variables, *self._conditions.optimizer_variables()]
        # A model whose `metrics` leaves Keras's own tracker out never reads it, but Keras's step updates it.
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
    """Whether products of matrices may be computed with fewer bits than float32 has."""
    return bool(count_gpus(process_environment()) or count_tpus())


def _kept_by_layers(model: Any, found: _Comparison) -> str:
    """The error text if layers keep something of their samples in a test step, after which nothing of it is merged."""
    for variable in model_state.state_of_own_layers(model):
        if variable.path not in found.whole.state:
            continue
        whole, *parts = (each.state[variable.path] for each in (found.whole, *found.ranks))
        if not all(np.allclose(part, whole, rtol=1e-5, atol=1e-6) for part in parts):
            return kept_state(variable)
    return ""


@dataclass(frozen=True)
class _Comparison:
    """Results of a step: before it, of the batch, of the batch with other seeds, and of the replicas.

    Attributes:
        rounded: of the batch with weights that rounding has changed; None if products are rounded more than that.
    """

    model: Any
    step: str
    before: _Results
    whole: _Results
    other: _Results
    rounded: _Results | None
    ranks: list[_Results]

    def verdict(self) -> str:
        """The first difference, in the order in which one causes another; "" if there is none."""
        name = type(self.model).__name__
        if apart := self._apart():
            return (
                f"The train_step of {name} updates weights with gradients that are not merged: after one step the "
                f"replicas' weights differ ({apart}). Update them with a Keras optimizer (`apply`, "
                f"`apply_gradients`), whose gradients are merged; or train in a custom loop with "
                f"strategy.reduce('MEAN', gradients)."
            )
        start = f"Replicas that each see a part of a batch would not compute what one process does with {name}: "
        if self._different("gradients", self._allowed_gradient):
            return f"{start}the gradients of a few samples are others. {self._advice()}"
        if weight := self._different("weights", self._allowed_change):
            return f"{start}after one step of a few samples the weight {weight!r} differs. {self._advice()}"
        if variable := self._different("state", self._allowed):
            return (
                f"{start}a step leaves another value in {variable!r}. Layer state is averaged over the replicas, so a "
                f"layer may keep means over the samples of a batch, and count calls. Keep a mean instead of a sum or "
                f"a maximum, clip it where it is used, or count in a metric of the layer."
            )
        if variable := self._different("metrics", self._allowed):
            if variable.startswith("loss/") and not model_state.has_own_steps(self.model, self.step):
                return f"{start}the loss of a few samples is another. {self._advice()}"
            return (
                f"{start}the metric's variable {variable!r} differs after a step. What a {self.step} updates metrics "
                f"with must be one value for each sample, or a mean over samples (a loss that is a sum over the batch "
                f"is neither); and what a metric keeps must be a sum. Compute everything else in its result(), or in a "
                f"callback with model.predict()."
            )
        if variable := self._different("others", self._allowed_change):
            return f"{start}{self._of_another(variable)}"
        if log := self._different("logs", self._allowed):
            return (
                f"{start}its {self.step} logs {log!r}, which for a batch does not follow from the values for the "
                f"batch's parts (a norm, a root, a ratio). Log means over the samples and results of metrics, and "
                f"compute everything else in the result() of a metric or, from results, in compute_metrics()."
            )
        return ""

    def verdict_of_next_step(self) -> str:
        """The difference that the state left by the first step makes to the second; "" if there is none."""
        limits = {"gradients": self._allowed_gradient, "weights": self._allowed_change, "others": self._allowed_change}
        for kind in _Results._fields:
            if name := self._different(kind, limits.get(kind, self._allowed)):
                what = "the gradients are others" if kind == "gradients" else f"{name!r} differs"
                return (
                    f"Replicas that each see a part of a batch would not compute what one process does with "
                    f"{type(self.model).__name__}: in the second {self.step}, {what}. So it uses what an earlier one "
                    f"has kept of its samples, of which each replica has seen its own part: a mean or a queue in an "
                    f"attribute or a list, a variable that is clipped. Keep a mean over the samples in a variable "
                    f"(self.add_weight), and clip it where it is used."
                )
        return ""

    def _of_another(self, name: str) -> str:
        rates = [getattr(each, "_learning_rate", None) for each in model_state.optimizers(self.model)]
        if any(isinstance(rate, keras.Variable) and rate.path == name for rate in rates):
            return (
                f"its {self.step} sets the learning rate {name!r} to what follows from samples. Set it in a callback, "
                f"from the logs, or from a mean over the batches of all replicas."
            )
        return (
            f"a {self.step} leaves another value in {name!r}, which belongs to no layer and no metric of the model. "
            f"Make it an attribute of the model: a keras.metrics.Metric, or a variable (self.add_weight) that keeps a "
            f"mean over the samples."
        )

    def _apart(self) -> str:
        """A weight that is not the same on the replicas."""
        first, second = (rank.weights for rank in self.ranks)
        for name, value in first.items():
            size = np.abs(value - self.before.weights[name]).max(initial=0) + ROUNDING * np.abs(value).max(initial=0)
            # Merged gradients give both the same update, to rounding. Those of two parts of a batch differ by much more
            # than 5 % of it.
            if np.abs(value - second[name]).max(initial=0) > 0.05 * size:
                return repr(name)
        return ""

    def tells(self) -> bool:
        """Whether replicas have found numbers where one process has, and gradients that are numbers other than 0."""
        has_numbers = all(
            np.isfinite(value).all() or not np.isfinite(getattr(self.whole, kind).get(name, np.nan)).all()
            for rank in self.ranks
            for kind in _Results._fields
            for name, value in getattr(rank, kind).items()
        )
        gradients = self.whole.gradients.values()
        return has_numbers and (not gradients or any(np.any(each) and np.isfinite(each).all() for each in gradients))

    @cached_property
    def moves_by_rounding(self) -> bool:
        """Whether all gradients are nothing but rounding. Steps of the trial are as large as those of any others."""
        return 0 < max(self._largest_gradients.values(), default=0.0) <= ROUNDING * self._loss

    @cached_property
    def _largest_gradients(self) -> dict[str, float]:
        """Of each update."""
        found: dict[str, float] = {}
        for name, value in self.whole.gradients.items():
            update = _update_of(name)
            found[update] = max(found.get(update, 0.0), float(np.abs(value).max(initial=0)))
        return found

    def _different(self, kind: str, allowed: Callable[[str, str], float]) -> str:
        whole, other = getattr(self.whole, kind), getattr(self.other, kind)
        for name, value in whole.items():
            if not np.isfinite(value).all() or name not in other:
                continue
            limit = allowed(kind, name)
            if np.abs(other[name] - value).max(initial=0) > limit:
                continue  # it is random
            for rank in self.ranks:
                own = getattr(rank, kind).get(name)
                if own is None or own.shape != value.shape or not np.isfinite(own).all():
                    continue
                if np.abs(own - value).max(initial=0) > limit:
                    return str(name)
        return ""

    def _allowed(self, kind: str, name: str) -> float:
        known = [getattr(each, kind).get(name, np.zeros(())) for each in (self.whole, self.before)]
        tolerance = COARSE_TOLERANCE if rounds_coarsely(self.model) else TOLERANCE
        return tolerance * float(max(np.abs(each).max(initial=0) for each in known)) + ROUNDING

    def _allowed_gradient(self, kind: str, name: str) -> float:
        own = np.abs(self.whole.gradients[name]).max(initial=0)
        largest = self._largest_gradients[_update_of(name)]
        tolerance, rounding = self._tolerances()
        allowed = tolerance * own
        if self.rounded is not None and name in self.rounded.gradients:
            noise = np.abs(self.rounded.gradients[name] - self.whole.gradients[name]).max(initial=0)
            allowed = min(allowed, TOLERANCE * own + NOISE * noise)
        return float(allowed + rounding * largest + ROUNDING * self._loss)

    @cached_property
    def _loss(self) -> float:
        """The size of the loss: where all gradients are much smaller, they are nothing but rounding of it."""
        total, count = (self.whole.metrics.get(f"loss/{name}", np.zeros(1)) for name in ("total", "count"))
        return float(np.abs(total).max(initial=0) / max(1.0, count.max(initial=0)))

    def _tolerances(self) -> tuple[float, float]:
        """Relative to a gradient or a change, and to the largest of all."""
        return (
            (COARSE_TOLERANCE, COARSE_TOLERANCE)
            if rounds_coarsely(self.model)
            else (TOLERANCE_OF_WEIGHTS, 10 * ROUNDING)
        )

    def _allowed_change(self, kind: str, name: str) -> float:
        whole = getattr(self.whole, kind)[name]
        if kind == "others" and whole.size == 1:  # not made of weights, whose gradients may differ
            return self._allowed(kind, name)
        if self.moves_by_rounding:
            return np.inf
        before = getattr(self.before, kind).get(name, whole)
        tolerance, rounding = self._tolerances()
        own = tolerance * np.abs(whole - before).max(initial=0)
        return float(own + rounding * LARGEST_CHANGE + ROUNDING * np.abs(before).max(initial=0))

    def _advice(self) -> str:
        if not model_state.overrides(self.model, "train_step"):
            return advice_on_layers(self.model)
        return (
            "Either its loss is no mean over the samples: compute one that relates samples, or is a ratio of two sums, "
            "with phalanx.losses.OverGlobalBatch(loss), and divide a sum by the number of samples. Or it is what its "
            "train_step does with them before it applies them (clipping, a first step of SAM), which each replica "
            "would do with those of its part: let the optimizer clip (global_clipnorm=, ...), or train in a custom "
            "loop with strategy.reduce('MEAN', gradients). A batch is divided by its first axis, which must be that of "
            "the samples."
        )


def advice_on_layers(model: Any) -> str:
    """What to write instead where the model, and no step of the program's own, relates samples."""
    own = model_state.own_layers(model)
    names = ", ".join(dict.fromkeys(repr(layer.name) for layer in own))
    what = f"a layer of the program ({names})" if names else "an operation between the layers"
    advice = (
        f"So {what} computes something of all samples of a batch, such as their mean, and uses it. Compute it of each "
        f"sample; of sums over all replicas (phalanx.get_replica_context().all_reduce); with "
        f"keras.layers.BatchNormalization(synchronized=True); or in a loss in phalanx.losses.OverGlobalBatch(loss)."
    )
    if any(map(model_state.regularizes_activity, own)):
        advice += (
            " Keras divides what an activity regularizer returns by the number of samples: return a sum over the "
            "samples, of what follows from each of them alone."
        )
    return advice


def rounds_coarsely(model: Any) -> bool:
    """Whether any layer computes in half precision, or is quantized.

    A last bit more or less may be a whole step of a quantized input; and with float8, Keras rounds biases to bfloat16.
    """
    return any(
        str(getattr(layer, "compute_dtype", "")) in ("float16", "bfloat16")
        or getattr(layer, "quantization_mode", None) is not None
        for layer in model._flatten_layers()
    )


def can_be_tried(model: Any, data: Any) -> bool:
    """Whether a step leaves nothing behind that cannot be undone, nothing in it is local on purpose, and all arrays of
    the batch have a row for each sample."""
    if reads_iterators(model):
        return False
    wrapped = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.TorchModuleWrapper)]
    if any("BatchNorm" in type(part).__name__ for layer in wrapped for part in layer.module.modules()):
        return False
    sizes = {len(leaf) if np.ndim(leaf) else 0 for leaf in leaves(data) if leaf is not None}
    return len(sizes) == 1 and 0 not in sizes


def sizes_of_parts(data: Any) -> tuple[int, ...]:
    """Numbers of samples to try with in each part: few; and where something cannot be computed of those, as it takes
    pairs or the ten largest, as many as this replica has."""
    rows = model_state.samples(data)
    return (PART,) if rows == PART else (PART, rows)


def few_samples(data: Any, attempt: int, part: int) -> Any:
    """The samples of all parts; the same again, with inputs that are changed a little, where there are too few."""
    size, number = model_state.samples(data), RANKS * part
    order = np.random.default_rng(attempt).permutation(size) if attempt else np.arange(size)
    # The same sample comes again at once, so that parts have others, and a ratio of sums differs from one to the next.
    places = np.sort(np.resize(np.arange(size), number))
    chosen, copy = order[places], np.arange(number) - np.searchsorted(places, places)

    def changed(array: Array) -> Array:  # the same again says nothing of what relates samples
        return scaled(array, 0.9**copy) if is_float(array.dtype) else array

    x, *others = map_leaves(lambda array: np.asarray(array)[chosen], data)
    # Targets stay as they are: Keras's hinge losses ask whether all of a batch are 0 or 1.
    return (map_leaves(changed, x) if size < number else x, *others)


def _with_unlike_parts(data: Any, part: int) -> Any:
    """A batch, with the largest inputs for the smallest, and so on, in half of the first replica's samples."""

    def changed(array: Array) -> Array:
        found = np.array(array)
        if is_float(found.dtype) or found.dtype.kind in "iu":
            rows = slice(0, part // 2 + 1)
            found[rows] = found.max() + found.min() - found[rows]
        return found

    return (map_leaves(changed, data[0]), *data[1:])


def part_of(data: Any, rank: int, part: int) -> Any:
    """The samples that a replica has."""
    return map_leaves(lambda array: array[rank * part : (rank + 1) * part], data)


def _update_of(name: str) -> str:
    """Of a gradient's name, that of the update."""
    return name.partition(".")[0]


def _add(found: dict[str, Array], name: str, value: Any) -> None:
    found[name if name not in found else f"{name} ({len(found)})"] = _array(value)


def _array(value: Any) -> Array:
    flat = np.asarray(keras.ops.convert_to_numpy(value)).reshape(-1)
    # Strided, not the first ones: these may be a padding row or a bias of zeros.
    return flat[:: max(1, flat.size // SAMPLED)].astype(np.float64)
