"""What Phalanx relies on inside Keras: one check for each internal and each patch, run in a process for each backend.

A check fails when Keras renames the internal, changes its signature, or makes it do something else.
`python -m tests.keras_compat.contract` runs all checks on the backend that KERAS_BACKEND names, and prints the errors.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import tempfile
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from tests.support.seeds import set_random_seed

CHECKS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {}
ALL = ("jax", "tensorflow", "torch")


def check(*backends: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = function, backends or ALL
        return function

    return add


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def small_model(*, normalizes: bool = False) -> Any:
    layers = [keras.layers.BatchNormalization()] if normalizes else []
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2, name="dense")])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


X, Y = np.arange(12, dtype="float32").reshape(4, 3), np.ones((4, 2), "float32")


# internals


@check()
def trainer_defines_what_is_dispatched() -> None:
    from phalanx.keras_compat.keras_internals import keras_trainer
    from phalanx.keras_compat.trainer_hook import DISPATCHED

    trainer = keras_trainer()
    assert issubclass(keras.Model, trainer)
    assert trainer.__name__.lower().startswith(keras.backend.backend())
    for name in (*DISPATCHED, "train_step", "test_step", "predict_step", "make_train_function"):
        assert name in vars(trainer), name
    assert "force" in parameters(trainer.make_train_function)


@check()
def logs_become_python_numbers() -> None:
    from phalanx.keras_compat.keras_internals import pythonify_logs

    logs = pythonify_logs({"loss": keras.ops.convert_to_tensor(1.5), "text": "a", "inner": {"mae": np.float32(2.0)}})
    assert logs == {"loss": 1.5, "text": "a", "mae": 2.0}
    assert type(logs["loss"]) is float


@check()
def class_weights_are_looked_up() -> None:
    from phalanx.keras_compat.keras_internals import class_weight_to_sample_weights

    weights = class_weight_to_sample_weights(np.array([0, 1, 1]), {0: 2.0, 1: 0.5})
    assert np.array_equal(np.asarray(weights), [2.0, 0.5, 0.5])


@check()
def validation_split_takes_the_last_samples() -> None:
    from phalanx.keras_compat.keras_internals import train_validation_split

    (train,), (validation,) = train_validation_split((np.arange(8),), 0.25)
    assert train.tolist() == [0, 1, 2, 3, 4, 5]
    assert validation.tolist() == [6, 7]


@check()
def stateless_scopes_are_known() -> None:
    from phalanx.keras_compat.keras_internals import in_stateless_scope

    assert not in_stateless_scope()
    with keras.StatelessScope():
        assert in_stateless_scope()


@check()
def symbolic_scopes_are_known() -> None:
    from phalanx.keras_compat.keras_internals import in_symbolic_scope

    found = []

    class Looking(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            found.append(in_symbolic_scope())
            return inputs

    Looking()(keras.Input((2,)))
    Looking()(np.zeros((1, 2), "float32"))
    assert (found[0], found[-1]) == (True, False)


@check()
def monitors_know_whether_more_is_better() -> None:
    from phalanx.keras_compat.keras_internals import MonitorCallback

    model, rule = small_model(), MonitorCallback(monitor="mae", mode="auto")
    model.evaluate(X, Y, verbose=0)  # metrics are known by name once they are built
    rule.set_model(model)
    rule._set_monitor_op()
    assert rule._is_improvement(1.0, 2.0)
    assert not rule._is_improvement(2.0, 1.0)


@check()
def sequential_models_are_graphs() -> None:
    from phalanx.keras_compat.keras_internals import Functional

    assert isinstance(small_model()._functional, Functional)


@check()
def output_specs_are_computed_without_data() -> None:
    from phalanx.keras_compat.keras_internals import compute_output_spec

    assert compute_output_spec(small_model(), keras.KerasTensor((4, 3)), training=False).shape == (4, 2)


@check()
def weights_are_serialized_as_save_weights_does() -> None:
    from phalanx.keras_compat.keras_internals import serialize_weights

    model, other = small_model(), small_model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        path.write_bytes(serialize_weights(model))
        other.load_weights(path)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


@check()
def messages_are_printed() -> None:
    from phalanx.keras_compat.keras_internals import print_msg

    assert parameters(print_msg)[0] == "message"


@check("torch")
def torch_adam_updates_in_parallel() -> None:
    from phalanx.keras_compat import torch_internals

    assert issubclass(type(keras.optimizers.Adam()), torch_internals.Adam)
    assert issubclass(type(keras.optimizers.AdamW()), torch_internals.AdamW)
    update = torch_internals.Adam._parallel_update_step
    assert parameters(update) == ["self", "grads", "variables", "learning_rate"]
    assert torch_internals.AdamW._parallel_update_step is update
    optimizer, variable, calls = keras.optimizers.Adam(), keras.Variable([1.0]), []
    optimizer.build([variable])
    vars(optimizer)["_parallel_update_step"] = lambda *arguments: calls.append(arguments)
    optimizer.apply([keras.ops.convert_to_tensor([1.0])], [variable])
    ((gradients, variables, _),) = calls
    assert variables == [variable]
    assert len(gradients) == 1
    assert (optimizer._momentums[0].shape, optimizer._velocities[0].shape) == ((1,), (1,))


@check("torch")
def torch_optimizers_update_in_parallel() -> None:
    from phalanx.keras_compat import torch_internals

    for name in ("SGD", "RMSprop", "Nadam", "Adamax"):
        kind = getattr(torch_internals, name)
        assert type(getattr(keras.optimizers, name)()) is kind, name
        assert parameters(kind._parallel_update_step) == ["self", "grads", "variables", "learning_rate"], name


@check("torch")
def torch_products_go_through_matmul() -> None:
    from phalanx.keras_compat.patching import PatchedFunction
    from phalanx.keras_compat.torch_internals import KerasVariable, convert_to_tensor, get_device, keras_numpy

    calls = []
    patch = PatchedFunction(keras_numpy, "matmul", lambda *both: calls.append(both) or patch.original(*both))
    with patch:
        keras.layers.Dense(2)(X)
    assert parameters(patch.original) == ["x1", "x2"]
    assert isinstance(calls[0][1], KerasVariable)
    assert convert_to_tensor(X).shape == (4, 3)
    assert get_device() in ("cpu", "cuda")


# hook


class Recorder:
    """A dispatcher that notes what it is called with, and calls Keras's own."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def register_model(self, model: Any) -> None:
        self.seen.append("register_model")

    def forget_functions(self, model: Any) -> None:
        self.seen.append("forget_functions")

    def register_object(self, thing: Any) -> None:
        self.seen.append(f"register_object {type(thing).__name__}")

    def register_variable(self, variable: Any) -> None:
        self.seen.append(f"register_variable {variable.aggregation}")

    def run(self, model: Any, method: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append(f"run {method.name} {sorted(method.bind(model, args, kwargs))}")
        return method(model, *args, **kwargs)

    def save(self, model: Any, method: Any, filepath: Any, overwrite: bool, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(f"save {method.name}")
        return method(model, filepath, overwrite, *args, **kwargs)

    def merge_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        self.seen.append("merge_gradients")
        return gradients


def _methods() -> dict[tuple[type, str], Any]:
    from phalanx.keras_compat.keras_internals import keras_trainer

    kinds = (*keras_trainer().__mro__, *keras.Model.__mro__, *keras.optimizers.LossScaleOptimizer.__mro__)
    kinds += (*keras.metrics.Mean.__mro__, keras.layers.BatchNormalization, *keras.Variable.__mro__)
    return {(kind, name): value for kind in kinds for name, value in vars(kind).items() if callable(value)}


@check()
def hook_sees_every_call_and_leaves_no_trace() -> None:
    from phalanx.keras_compat import trainer_hook

    small_model().fit(X, Y, verbose=0)  # some classes set attributes when they are first used
    before, recorder = _methods(), Recorder()
    trainer_hook.install(recorder)
    try:
        model = small_model()
        model.fit(X, Y, verbose=0)
        model.train_on_batch(X, Y)
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
        small_model().quantize("int8")
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            model.save_weights(Path(folder) / "model.weights.h5")
            restored = keras.saving.load_model(Path(folder) / "model.keras")
        assert restored.compiled
        assert keras.layers.Dense.from_config(model.get_layer("dense").get_config()).units == 2
        if keras.backend.backend() != "jax":
            variable = keras.Variable([1.0])
            optimizer = keras.optimizers.SGD()
            optimizer.build([variable])
            optimizer.apply_gradients([(keras.ops.convert_to_tensor([1.0]), variable)])
            assert "merge_gradients" in recorder.seen
    finally:
        trainer_hook.uninstall()
    expected = ["register_model", "register_object Dense", "register_object SGD", "run fit ['verbose', 'x', 'y']"]
    expected += ["register_variable sum"]  # of the metrics
    expected += ["forget_functions"]
    expected += ["run train_on_batch ['x', 'y']", "run predict ['verbose', 'x']", "save save", "save save_weights"]
    assert not set(expected) - set(recorder.seen), recorder.seen
    assert before == _methods()


@check()
def train_function_is_chosen_where_fit_makes_it() -> None:
    from phalanx.keras_compat import trainer_hook

    models: list[Any] = []
    trainer_hook.choose_train_function(lambda model, make: models.append(model))
    try:
        model = small_model()
        model.fit(X, Y, verbose=0)
        assert models[0] is model
        assert model.train_function is not None
    finally:
        trainer_hook.uninstall()


# losses, means and normalization


@check()
def losses_are_reduced_in_one_function() -> None:
    from phalanx.keras_compat.global_batch.global_losses import GloballyScaledLosses, keras_loss
    from phalanx.keras_compat.global_batch.step_collectives import StepScope
    from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans

    assert parameters(keras_loss.reduce_weighted_values)[:4] == ["values", "sample_weight", "mask", "reduction"]
    asked: list[float] = []

    def all_reduce(tensors: list[Any]) -> list[Any]:
        asked.extend(map(float, tensors))
        return [4.0 * tensor for tensor in tensors]

    collectives = SimpleNamespace(all_reduce=all_reduce)
    with GloballyScaledLosses(4), WeightedStepMeans(lambda: 0.25), StepScope(collectives):
        summed = keras.losses.MeanSquaredError(reduction="sum")(Y, np.zeros((4, 2), "float32"))
        mean = keras.losses.MeanSquaredError()(Y, Y - 1)
        weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        negative = weighted(Y, Y - 1, sample_weight=np.array([1, -3, 0, 0], "float32"))
    assert float(summed) == 16.0
    assert float(mean) == float(negative) == 1.0
    assert asked == [-2.0]


@check()
def patches_of_a_step_leave_other_threads_alone() -> None:
    from phalanx.keras_compat.global_batch.global_losses import GloballyScaledLosses
    from phalanx.keras_compat.global_batch.step_collectives import StepScope
    from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans

    def compute() -> tuple[float, float, float]:
        mean = keras.metrics.Mean()
        mean.update_state(keras.ops.convert_to_tensor(8.0))
        losses = keras.losses.MeanSquaredError(reduction="sum")
        weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        zeros, weight = np.zeros((4, 2), "float32"), np.ones(4, "float32")
        found = mean.count, losses(Y, zeros), weighted(Y, zeros, sample_weight=weight)
        return tuple(float(keras.ops.convert_to_numpy(each)) for each in found)  # type: ignore[return-value]

    expected = compute()
    collectives = SimpleNamespace(all_reduce=lambda tensors: [4.0 * tensor for tensor in tensors])
    losses, means, in_step = GloballyScaledLosses(4), WeightedStepMeans(lambda: 0.25), StepScope(collectives)
    with ThreadPoolExecutor(1) as elsewhere, losses, means, in_step:
        assert elsewhere.submit(compute).result() == expected
        assert compute() != expected


@check()
def quantizing_drops_the_functions_of_steps() -> None:
    model = small_model()
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model.quantize("int8")
    assert model.train_function is model.predict_function is None


@check()
def copies_have_the_optimizer_that_the_model_has() -> None:
    from phalanx.keras_compat.copies.model_copies import describe_layer

    model = small_model()
    model.optimizer = keras.optimizers.Adam(0.5)
    assert isinstance(describe_layer(model).rebuild().optimizer, keras.optimizers.Adam)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = small_model()
        made = describe_layer(model).rebuild()
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert isinstance(made.optimizer.inner_optimizer, keras.optimizers.SGD)


@check()
def layers_and_variables_keep_whether_they_are_trainable() -> None:
    from phalanx.keras_compat.variables.trainable_flags import TrainableFlags

    model = small_model(normalizes=True)
    flags = TrainableFlags(model)
    model.layers[-1].trainable = False
    assert len(model.trainable_weights) == 2
    with flags.applied():
        assert len(model.trainable_weights) == 4
    assert len(model.trainable_weights) == 2


@check()
def layers_know_added_losses_by_id() -> None:
    layer = keras.layers.Dense(2, activity_regularizer="l2")
    model = keras.Sequential([keras.Input((3,)), layer])
    model.stateless_call([variable.value for variable in model.variables], [], X, return_losses=True)
    assert len(layer._loss_ids) == 1


@check()
def added_losses_are_summed_in_one_function() -> None:
    from phalanx.keras_compat.global_batch.global_losses import GloballyScaledLosses
    from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans

    class Adds(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(keras.ops.sum(inputs * 0, axis=1) + 1)
            return inputs

    model = keras.Sequential([keras.Input((3,)), Adds(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with GloballyScaledLosses(4), WeightedStepMeans(lambda: 0.5):
        outputs = model(X)
        loss = model._compute_loss(x=X, y=outputs, y_pred=outputs, sample_weight=None, training=True)
    assert float(keras.ops.convert_to_numpy(loss)) == 8.0


@check()
def means_weigh_single_numbers_in_one_function() -> None:
    from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans, share_of_step

    step, samples = keras.metrics.Mean(), keras.metrics.Mean()
    with WeightedStepMeans(lambda: 0.25):
        step.update_state(keras.ops.convert_to_tensor(8.0))
        samples.update_state(keras.ops.convert_to_tensor([8.0, 8.0]))
        assert share_of_step() == 0.25
    assert share_of_step() is None
    assert (float(step.total), float(step.count)) == (2.0, 0.25)
    assert (float(samples.total), float(samples.count)) == (16.0, 2.0)


@check("tensorflow", "torch")
def synchronized_normalization_takes_moments_from_one_function() -> None:
    from phalanx.keras_compat import trainer_hook
    from phalanx.keras_compat.global_batch.step_collectives import StepScope

    layer, inputs = keras.layers.BatchNormalization(), keras.ops.convert_to_tensor(X)
    assert parameters(keras.layers.BatchNormalization._moments) == ["self", "inputs", "mask"]
    layer.build((None, 3))
    layer.synchronized = True  # Keras accepts the argument on TensorFlow only
    trainer_hook.install(Recorder())
    try:
        calls: list[int] = []
        record = lambda tensors: calls.append(len(tensors)) or tensors  # noqa: E731
        collectives = SimpleNamespace(synchronizes_batch_norm=False, all_reduce=record)
        with StepScope(collectives):
            normalized = layer(inputs, training=True)
    finally:
        trainer_hook.uninstall()
    assert calls == [2, 2]
    assert abs(float(keras.ops.mean(normalized))) < 1e-5


@check()
def results_of_metrics_are_followed_into_the_logs() -> None:
    from phalanx.keras_compat.observation.log_origins import LogOrigins

    class Renames(keras.Sequential):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**logs, "renamed": logs["mae"]}

    model = Renames([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(), "mse", metrics=["mae"])
    origins = LogOrigins(model)
    doubled = lambda: 2 * type(model._loss_tracker).result(model._loss_tracker)  # noqa: E731
    model._loss_tracker.result = doubled  # the program's own
    with origins.watched() as find:
        logs = find(model.compute_metrics(X, Y, model(X)))
    assert model._loss_tracker.result is doubled
    assert "renamed" in origins.results(logs)
    assert "result" not in vars(model._compile_metrics)
    assert "compute_metrics" not in vars(model)


# models


@check()
def models_show_their_parts() -> None:
    from phalanx.keras_compat import model_state

    model = small_model(normalizes=True)
    assert [variable.name for variable in model_state.layer_state(model)] == ["moving_mean", "moving_variance"]
    assert {variable.aggregation for variable in model.trainable_variables} <= {"none", "mean"}
    assert model_state.optimizers(model) == [model.optimizer]
    assert model_state.is_unbuilt(model)
    model._symbolic_build(data_batch=(X, Y, None))
    assert not model_state.is_unbuilt(model)
    assert model_state.has_built_parts(model)
    assert {variable.aggregation for variable in model.metrics_variables} == {"sum"}
    assert [entry.loss.reduction for entry in model._compile_loss._flat_losses] == ["sum_over_batch_size"]
    model_state.check_losses(model)
    model_state.check_layers(model)
    assert not model_state.overrides(model, "train_step")
    assert model_state.update_metrics(model, X, Y, model(X), None) == {}


@check()
def trials_depend_on_samples_alone() -> None:
    from phalanx.keras_compat.observation.deterministic_steps import DeterministicSteps

    model = small_model(normalizes=True)
    model._symbolic_build(data_batch=(X, Y, None))
    moving = keras.ops.convert_to_numpy(model.layers[0].variables[-1])
    weight, *_ = model.trainable_variables
    before = keras.ops.convert_to_numpy(weight)
    with DeterministicSteps(model, lambda variables: None) as conditions:
        found = []
        for rows in (4, 2):
            conditions.begin()
            drawn = [keras.random.normal((rows, 3)), keras.random.uniform((rows, 3), 2.0, 3.0, seed=7)]
            drawn += [keras.layers.Dropout(0.5)(keras.ops.ones((rows, 9)), training=True)]
            found.append([keras.ops.convert_to_numpy(each) for each in drawn])
        model(X, training=True)
        model.optimizer.apply([keras.ops.full(v.shape, 2.0) for v in model.trainable_variables])
    for larger, smaller in zip(*found, strict=True):
        assert (larger == smaller[:1]).all()
    assert 2.0 <= found[0][1].min() <= found[0][1].max() < 3.0
    assert set(found[0][2].reshape(-1)) == {0.0, 2.0}
    assert (keras.ops.convert_to_numpy(model.layers[0].variables[-1]) == moving).all()
    np.testing.assert_allclose(keras.ops.convert_to_numpy(weight), before - 0.01, atol=1e-6)
    assert len(np.unique(keras.ops.convert_to_numpy(keras.random.normal((4, 1))))) == 4
    before = sys.stdout, keras.layers.BatchNormalization.call
    with contextlib.suppress(AttributeError):
        DeterministicSteps(SimpleNamespace(jit_compile=False, run_eagerly=False), lambda variables: None).__enter__()
    assert (sys.stdout, keras.layers.BatchNormalization.call) == before


@check()
def state_of_a_program_is_restored() -> None:
    import random

    from phalanx.training.program_effects.program_state import ProgramState

    model = small_model()
    model._symbolic_build(data_batch=(X, Y, None))
    layer, weight = model.layers[0], model.trainable_variables[0]
    layer.counted, layer.seen, layer.sums = 3, [1, 2], np.zeros(2)
    model.optimizer.order = OrderedDict(first=1)
    stray = keras.optimizers.Adam()
    elsewhere = keras.Variable(1.0)
    before = keras.ops.convert_to_numpy(weight)
    seen = layer.seen
    with ProgramState(model).restored_on_exit():
        weight.assign(before + 1)
        elsewhere.assign(2.0)
        stray.build(model.trainable_variables)
        stray.iterations.assign(5)
        layer.counted += 1
        layer.seen.append(3)
        model.optimizer.order["second"] = 2
        layer.sums += 1
        layer.later = 7
        drawn = random.random(), np.random.random()
    assert (keras.ops.convert_to_numpy(weight) == before).all()
    assert float(elsewhere) == 1.0
    assert int(stray.iterations) == 0
    assert layer.counted == 3
    assert layer.seen is seen
    assert list(seen) == [1, 2]
    assert model.optimizer.order == OrderedDict(first=1)
    assert layer.sums.tolist() == [0, 0]
    assert not hasattr(layer, "later")
    assert (random.random(), np.random.random()) == drawn


@check()
def assignments_are_noticed_before_they_happen() -> None:
    from phalanx.keras_compat.observation.variable_assignments import watched_assignments

    known, found, raws = keras.Variable(1.0), [], []

    def note(variable: Any) -> None:
        found.append((variable, float(keras.ops.convert_to_numpy(variable.value))))

    with watched_assignments(note, lambda raw: raws.append(float(raw.numpy()))):
        known.assign(3.0)
        made = keras.Variable(5.0)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            raws.clear()
            other = tf.Variable(7.0)
            other.assign_add(1.0)
            other.assign_sub(1.0)
            assert raws == [7.0, 8.0]
    known.assign(9.0)
    assert [value for variable, value in found if variable is known] == [1.0]
    assert 5.0 in [value for variable, value in found if variable is made]


@check("tensorflow", "torch")
def uses_of_metrics_are_noticed() -> None:
    from phalanx.keras_compat.observation.metric_uses import MetricUses

    class Model(keras.Sequential):
        misuses = ""

        def train_step(self, data: Any) -> Any:
            metric = self.metrics[-1]
            if self.misuses == "reset":
                metric.reset_state()
            early = metric.result() if self.misuses == "early" else None
            metric.update_state(1.0)
            return {"mean": metric.result() if early is None else early, "other": 1.0}

    model = Model([keras.layers.Dense(1)])
    model.compile("sgd")
    model.mean = keras.metrics.Mean(name="mean")
    for misuse, expected in (("", ("", "")), ("reset", ("mean", "")), ("early", ("", "mean"))):
        uses, model.misuses = MetricUses(), misuse
        with uses.watched(model, "train_step"):
            model.train_step((X, Y))
            model.reset_metrics()
        assert (uses.reset_metric, uses.early_read_metric) == expected, misuse
        assert uses.early_logged_metric == uses.early_read_metric


@check()
def models_have_what_a_step_is_made_of() -> None:
    model = small_model()
    assert model._call_has_training_arg is True
    assert {"x", "y", "y_pred", "sample_weight", "training"} <= set(parameters(model._compute_loss))
    model._symbolic_build(data_batch=(X, Y, None))
    assert model._loss_tracker.total.shape == ()
    assert model._loss_tracker.count.shape == ()


@check("jax")
def jax_state_travels_as_arguments() -> None:
    from phalanx.keras_compat.model_state import sync_jax_state
    from phalanx.keras_compat.patching import set_untracked

    model = small_model()
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=(X, Y, None))
    kinds = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    assert model._jax_state_synced is True
    values = model._get_jax_state(**dict.fromkeys(kinds, True), purge_model_variables=True)
    state = dict(zip(kinds, map(list, values), strict=True))
    state["trainable_variables"] = [value * 0 + 7 for value in state["trainable_variables"]]
    set_untracked(model, _jax_state=state, _jax_state_synced=False)
    sync_jax_state(model)
    assert model._jax_state_synced is True
    assert all((weight == 7).all() for weight in model.get_weights())


@check("jax")
def train_step_applies_its_gradients_once() -> None:
    from phalanx.keras_compat.observation.jax_gradient_probe import gradients_of_only_call, recorded_applies

    model = small_model()
    model._symbolic_build(data_batch=(X, Y, None))
    model.optimizer.build(model.trainable_variables)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in group] for group in groups)
    with recorded_applies(model.optimizer) as calls:
        _, after = model.train_step(state, (X, Y))
    gradients = gradients_of_only_call(calls, after, state[0], state[2])
    assert [gradient.shape for gradient in gradients] == [(3, 2), (2,)]


# optimizers


@check()
def optimizers_pass_through_apply() -> None:
    from phalanx.keras_compat.global_batch.optimizer_applies import redirect_apply

    optimizer, variable, calls = keras.optimizers.SGD(), keras.Variable([1.0]), []
    optimizer.build([variable])
    redirect_apply(optimizer, lambda gradients, variables: calls.append(variables))
    optimizer.apply_gradients([(keras.ops.convert_to_tensor([1.0]), variable)])
    assert calls == [[variable]]
    assert list(optimizer._trainable_variables) == [variable]


@check()
def optimizer_variables_name_what_they_belong_to() -> None:
    from phalanx.keras_compat.variables.optimizer_slots import OptimizerSlot, build_and_record_slots, slots_of_model

    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    optimizer = keras.optimizers.Adam()
    slots = build_and_record_slots(optimizer, variables)
    assert len(slots) == len(optimizer.variables)
    assert {OptimizerSlot(-1, "iteration"), OptimizerSlot(0, "momentum"), OptimizerSlot(1, "velocity")} <= set(slots)
    assert slots == slots_of_model(optimizer, variables)


@check()
def weight_decay_asks_which_variables_decay() -> None:
    from phalanx.keras_compat.variables.optimizer_slots import set_decaying

    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    set_decaying(optimizer, [True, False], variables)
    optimizer.build(variables)
    optimizer.apply([keras.ops.zeros((1,)), keras.ops.zeros((1,))], variables)
    assert [float(variable.value[0]) for variable in variables] == [np.float32(0.95), 1.0]


@check("tensorflow")
def tensorflow_adam_updates_each_variable_in_update_step() -> None:
    optimizer, variable, calls = keras.optimizers.Adam(), keras.Variable([1.0]), []
    assert optimizer.update_step.__func__ is keras.optimizers.Adam.update_step
    assert parameters(optimizer.update_step) == ["gradient", "variable", "learning_rate"]
    optimizer.build([variable])
    vars(optimizer)["update_step"] = lambda *arguments: calls.append(arguments)
    optimizer.apply([keras.ops.convert_to_tensor([1.0])], [variable])
    assert len(calls) == 1
    assert optimizer._get_variable_index(calls[0][1]) == 0
    assert hasattr(optimizer, "iterations")
    assert (optimizer.beta_1, optimizer.beta_2) == (0.9, 0.999)


@check()
def accumulated_gradients_are_clipped_when_they_are_applied() -> None:
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    assert len(optimizer._accumulated_gradients) == 1
    assert int(optimizer._iterations) == 0
    if keras.backend.backend() == "torch":
        calls: list[Any] = []
        vars(optimizer)["_clip_gradients"] = lambda gradients: calls.append(gradients) or gradients
        for _ in range(2):
            optimizer.apply([keras.ops.convert_to_tensor([1.0])], [variable])
        assert len(calls) == 1
    assert parameters(optimizer._backend_apply_gradients) == ["grads", "trainable_variables"]
    assert hasattr(keras.optimizers.LossScaleOptimizer(optimizer), "check_finite")


@check()
def configs_are_read_without_tensorflow() -> None:
    from phalanx.keras_compat.copies.object_config import clone_from_config, config_json_of, serialization_lib

    assert hasattr(serialization_lib.tf, "available")
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10))
    described = json.loads(config_json_of(optimizer))
    assert described["module"].startswith("keras.")
    assert described["class_name"] == "Adam"
    assert type(clone_from_config(optimizer)) is type(optimizer)


# TensorFlow


@check("tensorflow")
def tapes_sum_a_vector_of_losses() -> None:
    import tensorflow as tf

    from phalanx.keras_compat.global_batch.tensorflow_tape import SampleLossGradients

    assert parameters(tf.GradientTape.gradient)[:4] == ["self", "target", "sources", "output_gradients"]
    weight = keras.Variable([2.0])
    with SampleLossGradients(lambda: tf.constant(0.5), lambda: 3), tf.GradientTape() as tape:
        losses = weight.value * tf.ones([3])
        (gradient,) = tape.gradient(losses, [weight])
    assert float(gradient[0]) == 6.0


@check("tensorflow")
def functions_are_traced_for_each_key() -> None:
    import tensorflow as tf

    from phalanx.keras_compat.tensorflow_trace_keys import add_trace_key

    now = SimpleNamespace(key=None)
    add_trace_key(lambda: now.key)
    traced: list[Any] = []
    function = tf.function(lambda x: traced.append(now.key) or x)
    for now.key in (None, "a", "a", None):
        function(tf.constant(1.0))
    assert traced == [None, "a"]


# data


@check()
def arrays_are_standardized() -> None:
    from phalanx.keras_compat import data_adapters

    assert data_adapters.is_arrays(X, Y, None)
    assert not data_adapters.is_arrays(iter([X]), None, None)
    sliceables, samples, batch_size = data_adapters.standardize_arrays(
        X.astype("float64"), Y, None, batch_size=None, steps_per_epoch=None, class_weight=None
    )
    assert (samples, batch_size) == (4, 32)
    assert sliceables[0][0:2].dtype == "float32"


@check()
def shuffled_passes_visit_every_sample() -> None:
    from phalanx.keras_compat.data_adapters import shuffled_orders

    set_random_seed(1)
    orders = shuffled_orders(10, 4, True, reads_ahead=True)
    assert all(sorted(next(orders)) == list(range(10)) for _ in range(2))


@check()
def datasets_are_enqueued_in_order() -> None:
    from phalanx.keras_compat.data_adapters import ordered_enqueuer

    class Squares(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return np.full(2, index * index)

    enqueuer = ordered_enqueuer(Squares(), 1, False, 2)
    enqueuer.start()
    batches = enqueuer.get()
    assert [int(next(batches)[0]) for _ in range(3)] == [0, 1, 4]
    enqueuer.stop()


def main() -> None:
    """Run every check of the backend; prints the traceback of those that fail, by name, as JSON."""
    errors = {}
    for name, (function, backends) in CHECKS.items():
        if keras.backend.backend() in backends:
            try:
                function()
            except Exception:
                errors[name] = traceback.format_exc()
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
