"""Custom optimizers, and unusual uses of Keras optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops, optimizers

from tests.training.scenarios.common import BATCH, classifier, compiled, features, fitted, labels
from tests.training.scenarios.registry import EACH_KIND, ONE_BACKEND, Setting, add, scenario
from tests.training.scenarios.steps import STEPS


class Centralized(optimizers.SGD):
    """Overrides `apply`: sees all gradients at once, and changes them by more than a factor."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        norm = ops.sqrt(sum(ops.sum(ops.square(grad)) for grad in grads))
        return super().apply([grad / (0.1 + norm) for grad in grads], trainable_variables)


class Signed(optimizers.SGD):
    """Overrides `update_step`, and treats variables by their names."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        rate = ops.cast(learning_rate, variable.dtype) * (0.1 if "bias" in variable.name else 1.0)
        self.assign_sub(variable, rate * ops.sign(gradient) * ops.sqrt(ops.abs(gradient)))


class ClippingApplyGradients(optimizers.SGD):
    """Overrides `apply_gradients`, which Keras calls on TensorFlow."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        norm = ops.sqrt(sum(ops.sum(ops.square(grad)) for grad, _ in pairs))
        return super().apply_gradients([(grad / (0.1 + norm), variable) for grad, variable in pairs])


class FromScratch(optimizers.Optimizer):
    """Derives from the base class, with its own state."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.averages = self.add_optimizer_variables(variables, "average")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        average = self.averages[self._get_variable_index(variable)]
        self.assign(average, 0.5 * average + ops.square(gradient))
        self.assign_sub(variable, learning_rate * gradient / (ops.sqrt(average) + 0.01))


class Delegating(optimizers.SGD):
    """Delegates the update to another optimizer."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.inner = optimizers.Adam(0.1)

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.inner.build(variables)
        self._variables.extend(self.inner.variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables or self._trainable_variables
        if not self.built:
            self.build(variables)
        self.inner.apply([grad * 2 for grad in grads], variables)
        self._iterations.assign_add(1)


class Counting(optimizers.SGD):
    """Keeps a Python number, which counts each step if it runs eagerly."""

    calls = 0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.calls += 1
        self.assign_sub(variable, gradient * learning_rate / self.calls)


def _state(model: Any) -> dict[str, Any]:
    return {"optimizer": [keras.ops.convert_to_numpy(variable.value) for variable in model.optimizer.variables]}


CUSTOM: dict[str, Callable[[], Any]] = {
    "apply": lambda: Centralized(0.2, momentum=0.5),
    "update_step": lambda: Signed(0.1),
    "apply_gradients": lambda: ClippingApplyGradients(0.2),
    "from_scratch": lambda: FromScratch(0.1),
    "around_another": Delegating,
    "loss_scale_factor": lambda: optimizers.SGD(0.2, momentum=0.9, loss_scale_factor=8.0),
}
QUICK = {"apply": EACH_KIND, "apply_gradients": ("tensorflow", "torch"), "around_another": ONE_BACKEND}
"""Keras calls `apply_gradients` only on TensorFlow; the state of an inner optimizer is an argument only on JAX."""


def _fitted_with(make: Callable[[], Any], *, steps: bool) -> Callable[[Setting], dict[str, Any]]:
    def run(setting: Setting) -> dict[str, Any]:
        model = compiled(setting, _with_own_step if steps else classifier, optimizer=make())
        batch = model.train_on_batch(features(BATCH), labels(BATCH))
        return {"batch": batch} | fitted(model) | _state(model)

    return run


def _with_own_step() -> Any:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return STEPS[keras.backend.backend()](inputs, keras.layers.Dense(3, activation="softmax")(hidden))


for _name, _make in CUSTOM.items():
    add(f"custom_optimizer_{_name}", _fitted_with(_make, steps=False), quick=QUICK.get(_name, ()))
    add(f"custom_optimizer_{_name}_in_own_train_step", _fitted_with(_make, steps=True))


@scenario()
def custom_optimizer_with_a_python_number(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=Counting(0.2), run_eagerly=True)
    return fitted(model) | {"calls": model.optimizer.calls}


def _with_replaced_methods(*, steps: bool) -> Callable[[Setting], dict[str, Any]]:
    def run(setting: Setting) -> dict[str, Any]:
        optimizer = optimizers.Adam(0.1)
        update_step, apply = optimizer.update_step, optimizer.apply
        optimizer.update_step = lambda gradient, variable, rate: update_step(ops.sign(gradient), variable, rate)
        optimizer.apply = lambda grads, variables=None: apply([ops.tanh(10 * grad) for grad in grads], variables)
        model = compiled(setting, _with_own_step if steps else classifier, optimizer=optimizer)
        return fitted(model) | _state(model)

    return run


add("optimizer_methods_replaced_on_the_object", _with_replaced_methods(steps=False))
add("optimizer_methods_replaced_on_the_object_in_own_train_step", _with_replaced_methods(steps=True))


@scenario()
def optimizer_excludes_from_weight_decay(setting: Setting) -> dict[str, Any]:
    optimizer = optimizers.AdamW(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = compiled(setting, optimizer=optimizer)
    return fitted(model) | _state(model)


@scenario()
def optimizer_built_by_hand(setting: Setting) -> dict[str, Any]:
    optimizer = optimizers.Adam(0.05)

    def build() -> Any:
        model = classifier()
        optimizer.build(model.trainable_variables)
        return model

    model = compiled(setting, build, optimizer=optimizer)
    return fitted(model) | _state(model)


@scenario()
def optimizer_state_set_between_fits(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.Adam(0.05))
    first = fitted(model)
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    model.optimizer.load_own_variables({name: ops.convert_to_numpy(value) * 2 for name, value in store.items()})
    second = fitted(model)
    for variable in model.optimizer.variables[2:]:
        variable.assign(ops.zeros(variable.shape, variable.dtype))
    return {"first": first, "second": second, "third": fitted(model)} | _state(model)


@scenario(backends=("tensorflow", "torch"))
def optimizer_shared_by_two_models(setting: Setting) -> dict[str, Any]:
    """Keras on JAX refuses to update a part of the variables that an optimizer was built with."""
    optimizer = optimizers.Adam(0.05)
    with setting.scope():
        models = [classifier(), classifier()]
        optimizer.build([variable for model in models for variable in model.trainable_variables])
        for model in models:
            model.compile(optimizer, "sparse_categorical_crossentropy")
    found = [fitted(model) for model in (*models, models[0])]
    return {"found": found} | _state(models[0])


@scenario(backends=("tensorflow", "torch"))
def optimizer_kept_when_layers_are_frozen(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.AdamW(0.05, weight_decay=0.1))
    first = fitted(model)
    model.layers[0].trainable = False
    with setting.scope():
        model.compile(model.optimizer, "sparse_categorical_crossentropy")
    return {"first": first, "second": fitted(model)} | _state(model)


@scenario()
def optimizer_replaced_between_fits(setting: Setting) -> dict[str, Any]:
    """Without `compile`: functions that are already compiled keep the former optimizer, as in Keras."""
    model = compiled(setting, optimizer=optimizers.SGD(0.1, momentum=0.5))
    first = fitted(model)
    with setting.scope():
        model.optimizer = optimizers.SGD(0.1, momentum=0.9)
    return {"first": first, "second": fitted(model)}


@scenario()
def optimizer_compiled_again_with_other_settings(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.SGD(0.1, momentum=0.5))
    first = fitted(model)
    model.optimizer.momentum = 0.9
    with setting.scope():
        model.compile(model.optimizer, "sparse_categorical_crossentropy")
    return {"first": first, "second": fitted(model)} | _state(model)


@scenario(quick=("tensorflow",))
def int8_after_training(setting: Setting) -> dict[str, Any]:
    """Without `compile`: Keras itself discards the compiled functions of the model."""
    model = compiled(setting, optimizer=optimizers.SGD(0.1))
    found: dict[str, Any] = {"first": fitted(model)}
    before = model.predict(features(), verbose=0)
    model.quantize("int8")
    outputs = model.predict(features(), verbose=0)
    assert abs(outputs - before).max() > 1e-5, "the weights are others"
    found["tested"] = model.evaluate(features(), labels(), verbose=0, return_dict=True)
    return found | {"predictions": outputs}


@scenario(quick=ONE_BACKEND)
def lora_and_int8(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer=optimizers.Adam(0.05))
    found: dict[str, Any] = {"first": fitted(model)}
    for change in (lambda: model.layers[0].enable_lora(2), lambda: model.quantize("int8")):
        change()
        with setting.scope():
            model.compile(optimizers.Adam(0.05), "sparse_categorical_crossentropy")
        found[f"after {len(found)} changes"] = fitted(model)
    return found | _state(model)


@scenario(quick=ONE_BACKEND)
def custom_optimizers_that_accumulate(setting: Setting) -> dict[str, Any]:
    """Code that changes the gradients of a batch sees those of all replicas at every step."""
    made = {kind.__name__: kind(0.2, gradient_accumulation_steps=2) for kind in (Centralized, ClippingApplyGradients)}
    return {name: fitted(compiled(setting, optimizer=optimizer)) for name, optimizer in made.items()}
