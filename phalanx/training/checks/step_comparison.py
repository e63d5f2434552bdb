"""Comparison of a step that one process takes on a batch with the same step of replicas on the batch's parts.

Gradients, weights, layer state, metrics and logs must agree up to rounding. For each kind of difference, the message
explains what it means and what to write instead. Values that change with the random seed are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np

from phalanx.keras_compat import model_state
from phalanx.keras_compat.observation.deterministic_steps import LARGEST_CHANGE

Array = np.ndarray[Any, Any]

TOLERANCE, WEIGHT_TOLERANCE = 2e-5, 5e-3
"""Relative to the largest value, and to a weight's largest change: gradients are sums, tensor cores keep ten bits."""
COARSE_TOLERANCE = 5e-2
"""Replaces both if the model computes in half precision or with quantized values."""
ROUNDING = 1e-6
"""Relative to a weight, and to the largest change of all, for gradients that are only rounding error."""
NOISE = 10
"""Multiple of the effect on a result of changing all weights by `ROUNDING`. If known, it limits the differences of
gradients; for everything else, it is added to the limit."""


class StepResults(NamedTuple):
    """Effects of a step, by name: gradients as they were applied, and the state after it.

    Attributes:
        other_variables: Variables that the step assigns but that do not belong to the model; and learning rates.
    """

    gradients: dict[str, Array]
    weights: dict[str, Array]
    state: dict[str, Array]
    metrics: dict[str, Array]
    other_variables: dict[str, Array]
    logs: dict[str, Array]


@dataclass(frozen=True)
class StepComparison:
    """Results of a step: before it, on the batch, on the batch with other seeds, and on the replicas.

    Attributes:
        rounded: Results for the batch with weights perturbed by rounding; None if products are rounded more coarsely.
    """

    model: Any
    step: str
    before: StepResults
    whole: StepResults
    reseeded: StepResults
    rounded: StepResults | None
    ranks: list[StepResults]

    @property
    def _start(self) -> str:
        name = type(self.model).__name__
        return f"Replicas that each see a part of a batch would not compute what one process does with {name}: "

    def verdict(self) -> str:
        """Return the first difference, causes before effects; "" if there is none."""
        name = type(self.model).__name__
        if apart := self._find_diverging_weight():
            return (
                f"The train_step of {name} updates weights with gradients that are not merged: after one step the "
                f"replicas' weights differ ({apart}). Update them with a Keras optimizer (`apply`, "
                f"`apply_gradients`), whose gradients are merged; or train in a custom loop with "
                f"strategy.reduce('MEAN', gradients)."
            )
        start = self._start
        if self._first_difference("gradients", self._allowed_gradient):
            return f"{start}the gradients of a few samples are others. {self._advice()}"
        if weight := self._first_difference("weights", self._allowed_change):
            return f"{start}after one step of a few samples the weight {weight!r} differs. {self._advice()}"
        if variable := self._first_difference("state", self._allowed):
            return (
                f"{start}a step leaves another value in {variable!r}. Layer state is averaged over the replicas, so a "
                f"layer may keep means over the samples of a batch, and count calls. Keep a mean instead of a sum or "
                f"a maximum, clip it where it is used, or count in a metric of the layer."
            )
        if variable := self._first_difference("metrics", self._allowed):
            if variable.startswith("loss/") and not model_state.has_custom_steps(self.model, self.step):
                return f"{start}the loss of a few samples is another. {self._advice()}"
            return (
                f"{start}the metric's variable {variable!r} differs after a step. What a {self.step} updates metrics "
                f"with must be one value for each sample, or a mean over samples (a loss that is a sum over the batch "
                f"is neither); and what a metric keeps must be a sum. Compute a loss that relates samples, or is a "
                f"ratio of two sums, with phalanx.losses.OverGlobalBatch(loss), and everything else in the metric's "
                f"result(), or in a callback with model.predict()."
            )
        if variable := self._first_difference("other_variables", self._allowed_change):
            return f"{start}{self._message_for_other(variable)}"
        if log := self._first_difference("logs", self._allowed):
            return (
                f"{start}its {self.step} logs {log!r}, which for a batch does not follow from the values for the "
                f"batch's parts (a norm, a root, a ratio). Log means over the samples and results of metrics, and "
                f"compute everything else in the result() of a metric or, from results, in compute_metrics()."
            )
        return ""

    def verdict_of_next_step(self) -> str:
        """Return the difference in the second step due to state left by the first; "" if there is none."""
        limits = {
            "gradients": self._allowed_gradient,
            "weights": self._allowed_change,
            "other_variables": self._allowed_change,
        }
        for kind in StepResults._fields:
            if name := self._first_difference(kind, limits.get(kind, self._allowed)):
                if kind == "logs":  # everything else is equal
                    return (
                        f"{self._start}in the second {self.step}, it logs another {name!r}. So it computes that from "
                        f"what earlier steps have left, such as the results of two metrics, of which a replica has its "
                        f"own part until a step is merged. Log results themselves, and compute everything else from "
                        f"them in compute_metrics(), or in the result() of a metric."
                    )
                what = "the gradients are others" if kind == "gradients" else f"{name!r} differs"
                return (
                    f"{self._start}in the second {self.step}, {what}. So it uses what an earlier one "
                    f"has kept of its samples, of which each replica has seen its own part: a mean or a queue in an "
                    f"attribute or a list, a variable that is clipped. Keep a mean over the samples in a variable "
                    f"(self.add_weight), and clip it where it is used. If it keeps nothing, a condition of its loss (a "
                    f"mask) was first met in that step: compute a ratio of sums with phalanx.losses.OverGlobalBatch."
                )
        return ""

    def _message_for_other(self, name: str) -> str:
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

    def _find_diverging_weight(self) -> str:
        """Return a weight that differs between the replicas; "" if there is none."""
        first, second = (rank.weights for rank in self.ranks)
        for name, value in first.items():
            size = np.abs(value - self.before.weights[name]).max(initial=0) + ROUNDING * np.abs(value).max(initial=0)
            # Merged gradients give both the same update, up to rounding. Those of two parts differ by far more than 5%.
            if np.abs(value - second[name]).max(initial=0) > 0.05 * size:
                return repr(name)
        return ""

    def is_conclusive(self) -> bool:
        """Whether replicas computed numbers wherever one process did, and some gradient is finite and not all zero."""
        has_numbers = all(
            np.isfinite(value).all() or not np.isfinite(getattr(self.whole, kind).get(name, np.nan)).all()
            for rank in self.ranks
            for kind in StepResults._fields
            for name, value in getattr(rank, kind).items()
        )
        gradients = self.whole.gradients.values()
        return has_numbers and (not gradients or any(np.any(each) and np.isfinite(each).all() for each in gradients))

    @cached_property
    def gradients_are_rounding(self) -> bool:
        """Whether all gradients are only rounding error. Steps of the trial are as large for those as for any."""
        return 0 < max(self._largest_gradients.values(), default=0.0) <= ROUNDING * self._loss

    @cached_property
    def _largest_gradients(self) -> dict[str, float]:
        """Largest gradient of each update."""
        found: dict[str, float] = {}
        for name, value in self.whole.gradients.items():
            update = _update_of(name)
            found[update] = max(found.get(update, 0.0), float(np.abs(value).max(initial=0)))
        return found

    def _first_difference(self, kind: str, allowed: Callable[[str, str], float]) -> str:
        whole, reseeded = getattr(self.whole, kind), getattr(self.reseeded, kind)
        for name, value in whole.items():
            if not np.isfinite(value).all() or name not in reseeded:
                continue
            limit = allowed(kind, name)
            if np.abs(reseeded[name] - value).max(initial=0) > limit:
                continue  # random
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
        own = tolerance * float(max(np.abs(each).max(initial=0) for each in known))
        # A metric may divide by a value close to zero, such as a sum of logits that it takes for probabilities.
        return own + ROUNDING + NOISE * self._noise(kind, name)

    def _allowed_gradient(self, kind: str, name: str) -> float:
        own = np.abs(self.whole.gradients[name]).max(initial=0)
        largest = self._largest_gradients[_update_of(name)]
        tolerance, rounding = self._tolerances()
        allowed = tolerance * own
        if self.rounded is not None and name in self.rounded.gradients:
            allowed = min(allowed, TOLERANCE * own + NOISE * self._noise("gradients", name))
        return float(allowed + rounding * largest + ROUNDING * self._loss)

    def _noise(self, kind: str, name: str) -> float:
        """Effect on a result of changing all weights by `ROUNDING`; 0 if unknown."""
        whole = getattr(self.whole, kind)[name]
        rounded = getattr(self.rounded, kind, {}).get(name)
        if rounded is None or rounded.shape != whole.shape:
            return 0.0
        return float(np.nan_to_num(np.abs(rounded - whole)).max(initial=0))

    @cached_property
    def _loss(self) -> float:
        """Size of the loss: gradients that are all much smaller are only its rounding error."""
        total, count = (self.whole.metrics.get(f"loss/{name}", np.zeros(1)) for name in ("total", "count"))
        return float(np.abs(total).max(initial=0) / max(1.0, count.max(initial=0)))

    def _tolerances(self) -> tuple[float, float]:
        """Tolerances relative to a gradient or a change, and to the largest of all."""
        return (
            (COARSE_TOLERANCE, COARSE_TOLERANCE) if rounds_coarsely(self.model) else (WEIGHT_TOLERANCE, 10 * ROUNDING)
        )

    def _allowed_change(self, kind: str, name: str) -> float:
        whole = getattr(self.whole, kind)[name]
        if kind == "other_variables" and whole.size == 1:  # not derived from weights, whose gradients may differ
            return self._allowed(kind, name)
        if self.gradients_are_rounding:
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
    """Advice for a program in which the model, rather than a custom step, relates samples."""
    own = model_state.custom_layers(model)
    if own and all(map(model_state.pads_to_batch, own)):
        return (
            f"{own[0].name!r} pads texts to the longest one of a batch, and the model uses the padding. Create it with "
            f"output_sequence_length=N, or mask the padding: keras.layers.Embedding(mask_zero=True)."
        )
    if not own and model_state.has_gradient_hooks(model):
        return (
            "So a hook on the gradients of a weight does more than scale them, and gets those of a replica's part of "
            "the batch. Clip with the optimizer (clipnorm, clipvalue), which gets those of the global batch."
        )
    names = list(dict.fromkeys(repr(layer.name) for layer in own))
    listed = f"{'one of ' if len(names) > 1 else ''}{', '.join(names)}"
    what = f"a layer that is not Keras's own ({listed})" if names else "an operation between the layers"
    advice = (
        f"So {what} computes something of all samples of a batch, such as their mean, and uses it. Compute it of each "
        f"sample; of sums over all replicas (phalanx.get_replica_context().all_reduce); with "
        f"keras.layers.BatchNormalization(synchronized=True); or in a loss in phalanx.losses.OverGlobalBatch(loss)."
    )
    if any(map(model_state.has_custom_activity_regularizer, own)):
        advice += (
            " Keras divides what an activity regularizer returns by the number of samples: return a sum over the "
            "samples, of what follows from each of them alone."
        )
    return advice


def rounds_coarsely(model: Any) -> bool:
    """Whether any layer computes in half precision, or is quantized.

    One bit of rounding may be a whole step of a quantized input; and with float8, Keras rounds biases to bfloat16.
    """
    return any(
        str(getattr(layer, "compute_dtype", "")) in ("float16", "bfloat16")
        or getattr(layer, "quantization_mode", None) is not None
        for layer in model._flatten_layers()
    )


def _update_of(name: str) -> str:
    """Name of the update to which a gradient's name belongs."""
    return name.partition(".")[0]
