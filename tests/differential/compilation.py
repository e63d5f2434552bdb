"""Draws optimizers, losses and metrics: the arguments of `compile`."""

from __future__ import annotations

from tests.differential.architectures import Architecture, Output
from tests.differential.writer import Writer

OPTIMIZERS = (
    "SGD(0.1)",
    "SGD(0.05, momentum=0.9)",
    "SGD(0.05, momentum=0.9, nesterov=True)",
    "Adam(0.01)",
    "AdamW(0.01, weight_decay=0.1)",
    "RMSprop(0.01)",
    "RMSprop(0.01, momentum=0.5, centered=True)",
    "Adagrad(0.1)",
    "Adadelta(1.0)",
    "Adamax(0.01)",
    "Nadam(0.01)",
    "Adafactor(0.01)",
    "Adam(0.01, amsgrad=True)",
    "Lamb(0.01)",
    "Ftrl(0.1, l1_regularization_strength=0.01)",
    "Muon(0.01)",
)
NOT_ON_TENSORFLOW = ("ScheduleFreeAdamW(0.01)",)
"""What `fit` builds without its first values there, in plain Keras."""
OPTIONS = (
    "",
    "clipnorm=0.5",
    "global_clipnorm=0.5",
    "clipvalue=0.1",
    "use_ema=True, ema_momentum=0.9",
    "use_ema=True, ema_overwrite_frequency=2",
    "gradient_accumulation_steps=2",
    "loss_scale_factor=8.0",
    "weight_decay=0.01",
)
SCHEDULES = (
    "optimizers.schedules.ExponentialDecay(0.1, 3, 0.7)",
    "optimizers.schedules.CosineDecay(0.1, 8)",
    "optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01])",
    "optimizers.schedules.PolynomialDecay(0.1, 7)",
)
OTHER_SCHEDULES = ("Warmup()",)
"""A class without `get_config`."""
LOSSES = {
    "regression": ("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "CosineSimilarity", "Tversky"),
    "binary": ("BinaryCrossentropy", "BinaryFocalCrossentropy", "Poisson", "SquaredHinge", "Dice"),
    "classes": ("SparseCategoricalCrossentropy",),
    "one_hot": ("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "KLDivergence", "Dice"),
}
METRICS = {
    "regression": (
        "'mae'",
        "'mse'",
        "metrics.RootMeanSquaredError()",
        "metrics.CosineSimilarity()",
        "metrics.R2Score()",
        "metrics.MeanAbsolutePercentageError()",
        "metrics.LogCoshError()",
        "metrics.PearsonCorrelation()",
        "scaled_error",
        "Total()",
        "Largest()",
        "Errors()",
    ),
    "binary": (
        "'accuracy'",
        "metrics.BinaryAccuracy()",
        "metrics.BinaryCrossentropy()",
        "metrics.MeanSquaredError()",
        "metrics.Poisson()",
        "metrics.Hinge()",
        "Total()",
        "Largest()",
    ),
    "classes": (
        "'accuracy'",
        "metrics.SparseCategoricalAccuracy(name='other')",
        "metrics.SparseTopKCategoricalAccuracy(k=2)",
        "metrics.SparseCategoricalCrossentropy()",
        "metrics.MeanIoU({units}, sparse_y_pred=False)",
    ),
    "one_hot": (
        "'accuracy'",
        "metrics.TopKCategoricalAccuracy(k=2)",
        "metrics.CategoricalCrossentropy()",
        "metrics.CategoricalHinge()",
        "metrics.OneHotMeanIoU({units})",
        "metrics.F1Score()",
        "metrics.F1Score(average='weighted')",
        "scaled_error",
        "Total()",
        "Errors()",
    ),
}
METRICS_OF_STEPS = {
    "regression": ("'mae'", "'mse'", "metrics.RootMeanSquaredError()", "metrics.LogCoshError()"),
    "binary": ("'accuracy'", "metrics.BinaryAccuracy()", "metrics.MeanSquaredError()"),
    "classes": (
        "'accuracy'",
        "metrics.SparseCategoricalAccuracy(name='other')",
        "metrics.SparseCategoricalCrossentropy()",
    ),
}
"""Of sequences with targets for each step."""
PROBABILITIES = (
    "metrics.AUC(num_thresholds=11)",
    "metrics.AUC(num_thresholds=11, multi_label=True)",
    "metrics.Precision()",
    "metrics.Recall()",
    "metrics.BinaryIoU(threshold=0.5)",
    "metrics.FBetaScore(average='micro', threshold=0.5)",
    "metrics.PrecisionAtRecall(0.5, num_thresholds=11)",
    "metrics.SensitivityAtSpecificity(0.5, num_thresholds=11)",
)
COUNTS = ("metrics.FalsePositives()",)
"""Not on PyTorch, where their results are views of their variables: after a validation, plain Keras reports what that
has counted as the training's."""

OF_DECISIONS = ("ccuracy", "IoU", "F1", "FBeta", "Precision", "Recall", "Sensitivity", "AUC", "FalsePositives")
"""Of metrics that count decisions: parts of their names."""


def draw_compile(w: Writer, architecture: Architecture) -> str:
    """The call `model.compile(...)`, in one line."""
    losses = [_loss(w, output) for output in architecture.outputs]
    if len(losses) > 1 and w.chance(5):
        losses[w.number(0, 1)] = "None"
    arguments = [f"optimizer={draw_optimizer(w)}", f"loss={_collect(architecture, losses)}"]
    if len(architecture.outputs) > 1 and "None" not in arguments[1] and w.chance():
        arguments.append(f"loss_weights={_collect(architecture, ['0.3', '1.7'])}")
    for name in ("metrics", "weighted_metrics"):
        if w.chance(2 if name == "metrics" else 4):
            metrics = [_metrics(w, output) for output in architecture.outputs]
            arguments.append(f"{name}={_collect(architecture, metrics)}")
    if w.chance(6) and w.backend != "torch":
        arguments.append("steps_per_execution=2")
    if w.chance(8):
        arguments.append("run_eagerly=True")
    elif w.chance(6) and w.backend != "torch":
        arguments.append(f"jit_compile={w.one_of([False, True])}")
    return f"model.compile({', '.join(arguments)})"


def draw_optimizer(w: Writer) -> str:
    """A call that makes an optimizer."""
    made = _inner_optimizer(w)
    if w.chance(12):
        made = f"optimizers.MultiOptimizer(optimizers.OptimizerMap({made}, {{'.*bias': {_inner_optimizer(w)}}}))"
        w.has_several_rates = True
    if w.chance(10):
        return f"optimizers.LossScaleOptimizer({made}, initial_scale=16.0, dynamic_growth_steps=3)"
    return made


def _inner_optimizer(w: Writer) -> str:
    made = w.one_of([*OPTIMIZERS, *(NOT_ON_TENSORFLOW if w.backend != "tensorflow" else ())])
    option = w.one_of(OPTIONS) if w.chance(3) else ""
    if "weight_decay" in made and "weight_decay" in option:
        option = ""
    if w.chance(5):
        schedule = w.one_of([*SCHEDULES, *OTHER_SCHEDULES])
        if schedule == "Warmup()":
            w.define(
                "Warmup",
                """
                class Warmup(optimizers.schedules.LearningRateSchedule):  # as tutorials write it, without get_config
                    def __call__(self, step):
                        return 0.01 * ops.minimum(ops.cast(step, "float32") + 1.0, 5.0)
                """,
            )
        name, _, rest = made.partition("(")
        others = rest.rstrip(")").split(", ")[1:]
        made = f"{name}({', '.join([schedule, *others])})"
    return f"optimizers.{made[:-1]}{', ' + option if option else ''})"


def _collect(architecture: Architecture, items: list[str]) -> str:
    if len(items) == 1 and "dicts" not in architecture.form:
        return items[0]
    names = [output.name for output in architecture.outputs]
    if "dicts" in architecture.form:
        return "{" + ", ".join(f"{name!r}: {item}" for name, item in zip(names, items, strict=False)) + "}"
    return f"[{', '.join(items)}]"


def _loss(w: Writer, output: Output) -> str:
    if output.task in ("regression", "one_hot") and w.chance(5):
        return w.define(
            "weighted_square",
            """
            @keras.saving.register_keras_serializable("program")
            def weighted_square(y, prediction):
                return ops.mean((1.0 + ops.abs(y)) * ops.square(y - prediction), axis=-1)
            """,
        )
    if output.task == "regression" and w.chance(5):
        return w.define("Capped", _CAPPED) + w.one_of(["()", "(reduction='sum')"])
    if output.task == "regression" and w.chance(5):
        return str(w.one_of(["'mse'", "'mae'"]))
    if output.task == "regression" and w.chance(10):
        if not w.anneals:
            w.anneals = True
            w.write('weight = keras.Variable(0.0, trainable=False, name="weight")')
        axis = w.one_of(["axis=-1", "axis=None"])
        w.write(f"""
            def annealed(y, prediction):
                terms = ops.square(y - prediction) + weight * ops.abs(prediction)
                return ops.mean(terms, {axis})
            """)
        return "annealed"
    choices = [name for name in LOSSES[output.task] if not output.steps or name not in ("Tversky", "Dice")]
    name = w.one_of(choices)
    arguments = []
    if output.logits and "entropy" in name:
        arguments.append("from_logits=True")
    reduction = w.one_of(["sum_over_batch_size", "sum_over_batch_size", "sum", "mean_with_sample_weight"])
    if reduction != "sum_over_batch_size":
        arguments.append(f"reduction={reduction!r}")
    if name in ("BinaryCrossentropy", "CategoricalCrossentropy") and w.chance(4):
        arguments.append("label_smoothing=0.1")
    # On PyTorch, plain Keras's loss masks the weights of the metrics as well (`docs/concepts/numbers.md`).
    if name == "SparseCategoricalCrossentropy" and w.backend != "torch" and w.chance(4):
        arguments.append("ignore_class=0")
    return f"losses.{name}({', '.join(arguments)})"


_CAPPED = """
    @keras.saving.register_keras_serializable("program")
    class Capped(losses.Loss):
        def call(self, y, prediction):
            return ops.mean(ops.minimum(ops.square(y - prediction), 4.0), axis=-1)
    """


def _metrics(w: Writer, output: Output) -> str:
    choices = METRICS[output.task]
    if output.steps:
        choices = METRICS_OF_STEPS[output.task]
    elif output.task == "binary" and not output.logits:
        choices = (*choices, *PROBABILITIES, *(COUNTS if w.backend != "torch" else ()))
    if w.rounds_coarsely:  # a sample near a tie may fall to either side
        choices = tuple(name for name in choices if not any(part in name for part in OF_DECISIONS))
    found = dict.fromkeys(w.one_of(choices) for _ in range(w.number(1, 2)))
    if "scaled_error" in found:
        w.define(
            "scaled_error",
            """
            @keras.saving.register_keras_serializable("program")
            def scaled_error(y, prediction):
                return 3.0 * ops.mean(ops.abs(ops.subtract(y, prediction)), axis=-1)
            """,
        )
    if "Errors()" in found:
        w.define(
            "Errors",
            """
            @keras.saving.register_keras_serializable("program")
            class Errors(metrics.Metric):
                def __init__(self, name="errors", **kwargs):
                    super().__init__(name=name, **kwargs)
                    self.total = self.add_weight(name="total", initializer="zeros")
                    self.count = self.add_weight(name="count", initializer="zeros")

                def update_state(self, y, prediction, sample_weight=None):
                    errors = ops.abs(ops.cast(y, self.dtype) - ops.cast(prediction, self.dtype))
                    self.total.assign_add(ops.sum(errors))
                    self.count.assign_add(ops.cast(ops.size(errors), self.dtype))

                def result(self):  # several numbers
                    return {"error": ops.divide_no_nan(self.total, self.count), "size": 1.0 * self.count}
            """,
        )
    if "Largest()" in found:
        w.define(
            "Largest",
            """
            @keras.saving.register_keras_serializable("program")
            class Largest(metrics.Metric):
                def __init__(self, name="largest", **kwargs):
                    super().__init__(name=name, **kwargs)
                    self.value = self.add_weight(name="value", initializer="zeros")
                    self.calls = self.add_weight(name="calls", initializer="ones")

                def update_state(self, y, prediction, sample_weight=None):
                    self.value.assign(ops.maximum(self.value, ops.max(ops.cast(prediction, self.dtype))))
                    self.calls.assign_add(1.0)

                def reset_state(self):
                    self.value.assign(0.0)
                    self.calls.assign(1.0)

                def result(self):
                    return self.value * self.calls
            """,
        )
    if "Total()" in found:
        w.define(
            "Total",
            """
            @keras.saving.register_keras_serializable("program")
            class Total(metrics.Metric):
                def __init__(self, name="total", **kwargs):
                    super().__init__(name=name, **kwargs)
                    self.total = self.add_weight(name="total", initializer="zeros")

                def update_state(self, y, prediction, sample_weight=None):
                    values = ops.sum(ops.cast(prediction, self.dtype), axis=-1)
                    if sample_weight is not None:
                        values = values * ops.reshape(ops.cast(sample_weight, self.dtype), (-1,))
                    self.total.assign_add(ops.sum(values))

                def result(self):
                    return 1.0 * self.total
            """,
        )
    return f"[{', '.join(name.replace('{units}', str(output.units)) for name in found)}]"
