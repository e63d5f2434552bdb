"""Probe that determines before the first step, from one batch and parts of it, how to merge a metric's state.

The effect of two parts on a variable is compared with the effect of the whole batch, from two different starts:

    counter     whole - start = (first - start) + (second - start)
    mean        whole = share of first * first + share of second * second
    extreme     whole = max(first, second), or min

The first rule that holds is the variable's. If none holds, the metric is refused: no merge of the replicas' states
gives what one process would compute. Keras's own metrics are known to be counters and need no probe.

A batch may leave a variable unchanged (a maximum that starts at zero, and predictions below), change it so little that
every rule holds up to rounding, or have identical samples, so that a mean equals an extreme. Then the probe tries other
targets, predictions or weights until the rules can be distinguished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from phalanx.arrays.tree import map_leaves
from phalanx.collectives.reduction import is_float
from phalanx.engines.engine import Engine
from phalanx.engines.metric_rules import MetricRule, MetricRules
from phalanx.engines.step_layout import EXTREMES, MergeWeight
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans
from phalanx.keras_compat.layer_building import graph_output_shapes, output_shapes
from phalanx.keras_compat.observation.metric_kinds import compiled_metrics, counts_samples, needs_class_axis
from phalanx.training.checks.trial_samples import part_size, scaled, values_per_sample
from phalanx.training.program_effects.program_state import ProgramState, PythonState

Array = np.ndarray[Any, Any]
States = list[Array]
Values = tuple[Any, Any, Any]
"""Targets, predictions and weights of a batch."""
Change = Callable[[Values], Values]
Update = Callable[[Values, float], None]
"""Adds samples to the metrics, with the given share of a global batch."""

ROWS = 8
"""Number of samples that are probed; at least two are needed."""
PARTS = 4
"""Number of parts in the second probe, each with as many samples as a replica has."""
TOLERANCE = {"float16": 5e-3, "bfloat16": 3e-2, "float64": 1e-6}
FLOAT32_TOLERANCE = 1e-5
CLEAR_CHANGE_FACTOR = 100
"""Multiple of the tolerance. A smaller change, relative to the variable, fits a sum, a mean and an extreme equally."""

logger = logging.getLogger(__name__)


class TrialStates(NamedTuple):
    """States of a variable: before any samples, after the first part, after the second part instead, after all."""

    share: float  # share of the first part
    start: Array
    first: Array
    second: Array
    whole: Array


def find_rules(model: Any, engine: Engine, data: Any, *, replicas: int) -> tuple[MetricRule, ...] | str:
    """Return the merge rules of the metrics' variables, or the reason why one of the metrics cannot be merged.

    Args:
        engine: Engine of the model, built but not begun.
        data: Local batch, `(x, y, sample_weight)`.
        replicas: Number of replicas that share the global batch.
    """
    rules = engine.metric_rules
    compiled = compiled_metrics(model)
    of_classes = [metric for metric in compiled if needs_class_axis(metric)]
    flat = _flat_outputs(model, data) if of_classes else []
    if flat and all(flat):
        return _refusal_of_flat_outputs(of_classes[0])
    # With several outputs, only Keras knows to which one a metric applies.
    unknown = of_classes if any(flat) else []
    probed = [metric for metric in compiled if not counts_samples(metric) or metric in unknown]
    if not probed:
        return rules.rules
    own = {id(variable): metric for metric in probed for variable in metric.variables}
    numbers = [number for number, variable in enumerate(rules.variables) if id(variable) in own]
    # The probe runs on the model and its metrics and must leave no trace in them.
    state = ProgramState(model, trains=False)
    try:
        batch = _make_batch(engine, data)
        samples = model_state.samples(batch)
        size = part_size(samples, PARTS, replicas, values_per_sample(batch))
        few, many = (_take_rows(batch, rows) for rows in (min(samples, ROWS), PARTS * size))
        update = partial(_update, model)
        series = []
        try:
            series.append(_find_conclusive_trials(rules, few, update, numbers))
        except Exception as error:
            logger.info("Metrics of %r cannot be computed of few samples: %r", model.name, error)
            few = many
        state.restore()
        series.append(_find_trials_with_empty_target(rules, few, update, numbers))
        state.restore()
        # A metric may use pairs of samples, or the ten largest values. Large samples get no more rows than before.
        if few is many or PARTS * size > ROWS or samples < ROWS:
            series.append(_find_conclusive_trials(rules, many, update, numbers, size))
        state.restore()
        if engine.runs_python and (metric := _find_metric_with_python_state(model, probed, few)) is not None:
            return _refusal_of_python(metric)
    finally:
        state.restore()
    decided = list(rules.rules)
    for number in numbers:
        rule = _find_rule(decided[number], *[trials[number] for trials in series if number in trials])
        if rule is None:
            return _refusal(own[id(rules.variables[number])], rules.variables[number])
        decided[number] = rule
    return tuple(decided)


def _flat_outputs(model: Any, data: Any) -> list[bool]:
    """Whether each output has only the sample axis; empty if unknown."""
    shapes = graph_output_shapes(model)
    if shapes is None:
        shapes = output_shapes(model, keras.utils.unpack_x_y_sample_weight(data)[0])
    return [len(shape) == 1 for shape in shapes or ()]


def _find_metric_with_python_state(model: Any, metrics: Sequence[Any], batch: Values) -> Any:
    """Return the first metric whose result depends on state outside its variables; None if there is none."""
    half = model_state.samples(batch) // 2
    _update(model, map_leaves(lambda array: array[:half], batch), 0.5)
    kept = [PythonState([metric]) for metric in metrics]
    _update(model, map_leaves(lambda array: array[half:], batch), 0.5)
    for metric, state in zip(metrics, kept, strict=True):
        result = _result(metric)
        state.restore()
        if not np.array_equal(result, _result(metric), equal_nan=True):
            return metric
    return None


def _result(metric: Any) -> Array:
    try:
        values = tree.flatten(metric.result())
        return np.concatenate([np.ravel(keras.ops.convert_to_numpy(value)).astype("float64") for value in values])
    except Exception as error:  # a metric may have no result for so few samples
        logger.debug("The metric %r has no result: %r", metric.name, error)
        return np.zeros(0)


def rules_from_message(values: Sequence[tuple[str, bool]]) -> tuple[MetricRule, ...]:
    """Decode rules from a message."""
    return tuple(MetricRule(MergeWeight(weight), is_additive) for weight, is_additive in values)


def rules_or_raise(found: tuple[MetricRule, ...] | str) -> tuple[MetricRule, ...]:
    """Return the rules, or raise UnsupportedError with the reason why there are none."""
    if isinstance(found, str):
        raise UnsupportedError(found)
    return found


def _find_conclusive_trials(
    rules: MetricRules, batch: Values, update: Update, numbers: Sequence[int], part: int = 1
) -> dict[int, list[TrialStates]]:
    """Return trials that change these variables, clearly if possible; a variable that nothing changes has none.

    Args:
        part: Number of samples in the smallest part of a batch.
    """
    trials = _observe(rules, batch, update, part)
    known = {number: trials[number] for number in numbers if not _leaves_unchanged(trials[number])}
    clear = {number for number in known if _is_clear(known[number]) and not _parts_agree(known[number])}
    start = rules.values()
    for change, all_differ in _value_changes():
        if len(clear) == len(numbers):
            break
        rules.set_values(start)
        try:
            trials = _observe(rules, change(batch), update, part)
        except Exception as error:  # a metric may not accept values that no model of its kind produces
            logger.debug("Metrics refuse other values: %r", error)
            continue
        for number in numbers:
            found = trials[number]
            if number in clear or _leaves_unchanged(found) or not _are_finite(found):
                continue
            # If parts of differing samples have the same effect, the metric counts steps.
            if _is_clear(found) and (all_differ or not _parts_agree(found)):
                clear.add(number)
                known[number] = found
            known.setdefault(number, found)
    return known


def _find_trials_with_empty_target(
    rules: MetricRules, batch: Values, update: Update, numbers: Sequence[int]
) -> dict[int, list[TrialStates]]:
    """Return trials in which the targets of one sample are zero and weights differ, of the variables that allow it.

    A metric may treat such a sample in a way that depends on the rest of the batch, such as a ranking metric a list
    without relevant items, and the first batch need not contain one.
    """

    def emptied(array: Array) -> Array:
        changed = array.copy()
        changed[1:2] = 0
        return changed

    y, outputs, weight = batch
    try:
        trials = _observe(rules, (map_leaves(emptied, y), outputs, map_leaves(_decreasing, weight)), update, 1)
    except Exception as error:  # a metric may not accept such targets
        logger.debug("Metrics refuse targets of zero: %r", error)
        return {}
    return {number: trials[number] for number in numbers if _are_finite(trials[number])}


def _observe(rules: MetricRules, batch: Values, update: Update, smallest: int) -> list[list[TrialStates]]:
    """Return the effect of a batch's samples on each variable."""
    rows = model_state.samples(batch)

    turned = map_leaves(lambda array: array[::-1], batch)

    def after(start: States, first: int, stop: int, samples: Values = batch) -> States:
        rules.set_values(start)
        part = map_leaves(lambda array: array[first:stop], samples)
        # With the part's share, as in a replica's step: means of one number per step are weighted by it.
        update(part, (stop - first) / rows)
        return rules.values()

    start = rules.values()
    # Each start reveals what another hides: a start far away rounds off all differences, a sample may leave a start
    # unchanged, and after all samples a maximum no longer changes.
    later, last = after(start, 0, smallest), after(start, 0, rows)

    # One sample differs from all others more than two halves differ from each other. A state that keeps the last
    # sample's value may look like an extreme in one order, but not in both.
    half = rows // 2
    cuts = (
        (start, smallest, batch),
        (start, smallest, turned),
        (start, half, batch),
        (later, half, batch),
        (last, half, batch),
    )
    trials = [
        (cut / rows, (begun, after(begun, 0, cut, each), after(begun, cut, rows, each), after(begun, 0, rows, each)))
        for begun, cut, each in cuts
    ]
    rules.set_values(start)
    return [
        [TrialStates(share, *(each[number] for each in states)) for share, states in trials]
        for number in range(len(start))
    ]


def _leaves_unchanged(trials: Sequence[TrialStates]) -> bool:
    """Return whether the samples leave a variable unchanged."""
    return all(np.array_equal(one.start, state) for one in trials for state in (one.first, one.second, one.whole))


def _is_clear(trials: Sequence[TrialStates]) -> bool:
    """Return whether the samples change a variable by much more than its rounding, from the first start."""
    start, whole = trials[0].start, trials[0].whole
    if start.dtype.kind in "biu":
        return True
    clear_change = min(CLEAR_CHANGE_FACTOR * _tolerance(start), 0.1)
    size = max(np.abs(_widen(each)).max(initial=0) for each in (start, whole))
    return not np.isfinite(size) or bool(np.abs(_widen(whole) - _widen(start)).max(initial=0) > clear_change * size)


def _parts_agree(trials: Sequence[TrialStates]) -> bool:
    """Return whether all parts affect a variable equally, so that a mean and an extreme look the same."""
    return all(_close(_widen(one.first), one.second, one.start) for one in trials)


def _value_changes() -> Iterator[tuple[Change, bool]]:
    """Yield changes to the values of a batch, most useful first, and whether the changed samples all differ."""
    for values in (_decreasing, _reflected, lambda array: -_decreasing(array), lambda array: 10 * _decreasing(array)):
        for chosen in ((1,), (0,), (2,), (0, 1, 2)):

            def change(batch: Values, values: Any = values, chosen: Any = chosen) -> Values:
                def changed(array: Array) -> Array:
                    is_number = is_float(array.dtype) or (values is _reflected and array.dtype.kind in "iu")
                    return np.asarray(values(array), array.dtype) if is_number else array

                y, outputs, weight = (map_leaves(changed, e) if i in chosen else e for i, e in enumerate(batch))
                return y, outputs, weight

            yield change, values is not _reflected and len(chosen) == 3


def _decreasing(array: Array) -> Array:
    """Make each sample smaller than the one before: probabilities stay probabilities."""
    return scaled(array, np.linspace(1.0, 0.5, len(array)))


def _reflected(array: Array) -> Array:
    """Reflect the values, so that the largest become the smallest: labels and probabilities stay valid."""
    return np.asarray(array.max() + array.min() - array)


def _find_rule(declared: MetricRule, *series: Sequence[TrialStates]) -> MetricRule | None:
    """Return the rule that holds in all trials."""
    trials = [one for each in series for one in each]
    if not trials or (
        declared.weight is MergeWeight.FIRST and all(_same(one.first, one.second, one.whole) for one in trials)
    ):
        return declared
    weights = [
        weight
        for weight in (MergeWeight.ONE, MergeWeight.SHARE, *EXTREMES)
        if all(_fits(weight, each) for each in series)
    ]
    if not weights:
        return None
    # Several rules may hold for these samples. The variable's declared rule is then more likely than the first of a
    # list.
    weight = declared.weight if declared.weight in weights else weights[0]
    return MetricRule(weight, weight is MergeWeight.ONE or all(map(_is_additive, series)))


def _fits(weight: MergeWeight, trials: Sequence[TrialStates]) -> bool:
    kind = trials[0].start.dtype.kind
    if weight in EXTREMES:
        return all(_close(EXTREMES[weight](one.first, one.second), one.whole, one.start) for one in trials)
    if kind == "b" or not _are_finite(trials):
        return False
    if weight is MergeWeight.SHARE:  # only floats are weighted
        return kind not in "iu" and all(
            _close(one.share * _widen(one.first) + (1 - one.share) * _widen(one.second), one.whole, one.start)
            for one in trials
        )
    return _is_additive(trials) and all(
        _close(_widen(one.first) + _widen(one.second) - _widen(one.start), one.whole, one.start) for one in trials
    )


def _is_additive(trials: Sequence[TrialStates]) -> bool:
    """Return whether what the whole batch adds is independent of the state before it."""
    if trials[0].start.dtype.kind == "b" or not _are_finite(trials):
        return False
    one, later = trials[0], trials[-1]
    return _close(_widen(one.whole) - _widen(one.start) + _widen(later.start), later.whole, later.start)


def _are_finite(trials: Sequence[TrialStates]) -> bool:
    return all(np.isfinite(_widen(state)).all() for one in trials for state in one[1:])


def _same(*states: Array) -> bool:
    return all(np.array_equal(states[0], state) for state in states[1:])


def _widen(state: Array) -> Array:
    return state.astype(np.int64 if state.dtype.kind in "iu" else np.float64)


def _close(computed: Array, state: Array, begun: Array) -> bool:
    """Return whether a state equals the computed value, up to the rounding of numbers of its size."""
    if state.dtype.kind in "biu":
        return bool(np.array_equal(computed, state))
    # Relative to the largest number in the sum: a difference of two large states has their rounding error.
    finite = [abs(_widen(each)[np.isfinite(_widen(each))]).max(initial=0) for each in (state, begun)]
    return bool(np.allclose(_widen(computed), _widen(state), rtol=0, atol=_tolerance(state) * max(*finite, 1e-30)))


def _tolerance(state: Array) -> float:
    return TOLERANCE.get(state.dtype.name, FLOAT32_TOLERANCE)


def _make_batch(engine: Engine, data: Any) -> Values:
    """Return a batch of at least two samples, with the model's predictions."""
    engine.begin()
    try:
        outputs = engine.predict(data)
    finally:
        engine.end()
    if model_state.samples(data) == 1:  # add a copy of the sample with other predictions
        data = map_leaves(lambda array: np.concatenate([array, array]), data)
        outputs = tree.map_structure(_append_changed_copy, outputs)
    _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return y, outputs, sample_weight


def _take_rows(batch: Values, rows: int) -> Values:
    """Return this many samples of a batch, repeating samples if there are too few; parts get different ones."""
    chosen = np.sort(np.resize(np.arange(model_state.samples(batch)), rows))
    found: Values = map_leaves(lambda array: array[chosen], batch)
    return found


def _update(model: Any, batch: Values, share: float) -> None:
    with WeightedStepMeans(lambda: share):
        model_state.update_metrics(model, None, *map_leaves(_tensor, batch))


def _append_changed_copy(array: Array) -> Array:
    other = array * array.dtype.type(0.5) if is_float(array.dtype) else array
    return np.concatenate([array, other])


def _tensor(array: Array) -> Any:
    return keras.ops.convert_to_tensor(array) if array.dtype.kind not in "OSU" else array


def _refusal_of_python(metric: Any) -> str:
    return (
        f"The metric {metric.name!r} ({type(metric).__name__}) cannot be merged over the replicas: its result depends "
        f"on what update_state() keeps in Python, in an attribute or a list, where no other replica sees it. Keep it "
        f"in variables: self.add_weight(...) in __init__() and assign_add() in update_state()."
    )


def _refusal_of_flat_outputs(metric: Any) -> str:
    return (
        f"The metric {metric.name!r} ({type(metric).__name__}) takes the last axis of the model's output for that of "
        f"the classes, but an output of the shape (samples,) has no other axis: it would compare the samples of a "
        f"batch with each other. Let the output keep the shape (samples, 1), or use a metric of single values, as "
        f"keras.metrics.BinaryAccuracy()."
    )


def _refusal(metric: Any, variable: Any) -> str:
    described = f"The metric {metric.name!r} ({type(metric).__name__})"
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        return (
            f"{described} cannot be merged over the replicas: for a batch its function returns a number that does not "
            f"follow from the numbers of the batch's parts (a ratio, a root, a correlation over the samples, a "
            f"weighted mean). Return one value for each sample, write a keras.metrics.Metric that adds up what the "
            f"number is computed from and computes it in result(), or compute it in a callback with model.predict()."
        )
    return (
        f"{described} cannot be merged over the replicas: what a batch does to its variable {variable.name!r} is no "
        f"sum, mean, maximum or minimum of what the parts of the batch do to it. Add up sums over samples in "
        f"update_state(), and compute everything else in result(); or compute the metric in a callback with "
        f"model.predict()."
    )
