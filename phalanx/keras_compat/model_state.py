"""The parts of a compiled Keras model: its optimizers, layer state and metrics, and the methods that it overrides.

Uses `_flatten_layers`, `_compile_loss`, `_flat_losses`, `_compile_metrics`, `_non_trainable_variables` and
`jax_state_sync`, `Sequential._functional` and `_nodes_by_depth`. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import keras

from phalanx.arrays.tree import leaves
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.keras_internals import Functional, keras_trainer, pythonify_logs

PLAIN = (bool, int, float, str, type(None))
"""Types of attributes and options that are plain Python values, such as hyperparameters and counters."""


def optimizers(model: Any) -> list[Any]:
    """Return all optimizers of a model: that of `compile`, and those it or inner models keep for a `train_step`."""
    found = {id(model.optimizer): model.optimizer} if getattr(model, "optimizer", None) is not None else {}
    for value in vars(model).values():
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        found |= {id(part): part for part in parts if isinstance(part, keras.optimizers.Optimizer)}
    # Inner models may have been compiled for their own training. Keras's step never applies their optimizers.
    if overrides(model, "train_step"):
        inside = [getattr(layer, "optimizer", None) for layer in model._flatten_layers(include_self=False)]
        found |= {id(part): part for part in inside if isinstance(part, keras.optimizers.Optimizer)}
    return list(found.values())


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that updates variables, inside optimizers that scale the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def layer_state(model: Any) -> list[Any]:
    """Return the floating variables that layers change while they compute (batch-norm statistics).

    They do not include frozen weights: a layer keeps weights apart from its state, regardless of `trainable`.
    """
    seen: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                seen.setdefault(id(variable), variable)
    return list(seen.values())


def frozen_weights(model: Any) -> list[Any]:
    """Return the floating variables of layers that are neither trained nor layer state."""
    state = {id(variable) for layer in model._flatten_layers() for variable in layer._non_trainable_variables}
    found = {id(v): v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)}
    return [variable for key, variable in found.items() if key not in state]


def state_of_custom_layers(model: Any) -> list[Any]:
    """Return the variables of `layer_state` that custom layers may change, in any call."""
    own = {id(variable) for layer in custom_layers(model) for variable in layer._non_trainable_variables}
    return [variable for variable in layer_state(model) if id(variable) in own]


def check_layers(model: Any) -> None:
    """Raise UnsupportedError for layer state that would have to be summed over the replicas."""
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            if variable.aggregation == "sum":
                raise UnsupportedError(
                    f"{variable.path!r} was created with aggregation='sum', but layer state is averaged over the "
                    f"replicas. Keep a mean (over the samples of a batch), or count in a metric of the layer, whose "
                    f"variables are summed."
                )


def check_losses(model: Any) -> None:
    """Raise UnsupportedError for a compiled loss that is not a single number, unless all steps are custom."""
    if overrides(model, "train_step") and overrides(model, "test_step"):
        return  # custom steps reduce the loss; `step_probe` finds out whether replicas may
    for loss in compiled_losses(model):
        if getattr(loss, "reduction", "mean") in (None, "none"):
            raise UnsupportedError(
                f"The loss {loss.name!r} has reduction={loss.reduction!r}: it is one number for each "
                f"sample, which cannot be merged over the replicas. Compile with reduction='sum_over_batch_size', "
                f"'sum' or 'mean_with_sample_weight', or reduce it in a `train_step` and a "
                f"`test_step` of the program's own."
            )


def is_unbuilt(model: Any) -> bool:
    """Whether the model, its loss or its metrics need a first batch to create their variables."""
    parts = [model._compile_metrics, model._compile_loss]
    layers = model._flatten_layers()
    return not all(layer.built for layer in layers) or any(part is not None and not part.built for part in parts)


def has_built_parts(model: Any, *, with_loss: bool = True) -> bool:
    """Whether all layers, metrics and losses of the model have their variables, even if the model itself is not built.

    Args:
        with_loss: Whether the loss of `compile` counts. Data without targets cannot build it.
    """
    layers = [layer for layer in model._flatten_layers() if layer is not model]
    has_built_loss = not with_loss or model._compile_loss is None or model._compile_loss.built
    return bool(layers) and all(layer.built for layer in layers) and has_built_loss and _has_built_metrics(model)


def _has_built_metrics(model: Any) -> bool:
    metrics = model._compile_metrics
    if metrics is None or metrics.built:
        return True
    return not leaves([metrics._user_metrics or (), metrics._user_weighted_metrics or ()])  # there is nothing to build


def builds_in_steps(model: Any, step: str) -> bool:
    """Whether there are layers or compiled metrics that only the model's own `train_step` or `test_step` may build. On
    JAX there are none."""
    if keras.backend.backend() == "jax" or not overrides(model, step):
        return False
    return not (all(layer.built for layer in model._flatten_layers(include_self=False)) and _has_built_metrics(model))


def overrides(model: Any, method: str) -> bool:
    """Whether the model's class overrides a method of Keras's trainer, or the program has set one on the model."""
    is_custom = getattr(type(model), method) is not getattr(keras_trainer(), method)
    return is_custom or instance_method(model, method) is not None


def set_mode(model: Any, *, training: bool) -> None:
    """Switch a model between training and evaluation, as Keras does on PyTorch, where code may read `self.training`."""
    if keras.backend.backend() == "torch":
        model.train(training)


def instance_method(thing: Any, method: str) -> Any:
    """Return the method that the program has set on this object, as in `model.train_step = step`; None if none."""
    found = vars(thing).get(method)
    # Keras and Phalanx set some, too.
    return None if (getattr(found, "__module__", None) or "").startswith(("keras.", "phalanx.")) else found


_KNOWN_PACKAGES = ("keras.", "phalanx.")
"""Not KerasHub: its CLIP heads multiply all texts of a batch by all images, its VQ-VAE keeps sums over a batch."""
_PROGRAMMABLE_LAYERS = {"Lambda", "TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer"}
"""Keras layers that compute what the program says."""


_KNOWN_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers that are sums over their argument. Keras's other one relates the samples of an activity."""
_KNOWN_FUNCTION_PACKAGES = ("keras.", "jax.", "tensorflow.", "torch.")


def custom_layers(model: Any) -> list[Any]:
    """Return the layers whose computation only the program knows, including the model if it is one."""
    return [layer for layer in model._flatten_layers() if _is_custom_layer(layer)]


def _is_custom_layer(layer: Any) -> bool:
    return (
        not type(layer).__module__.startswith(_KNOWN_PACKAGES)
        or type(layer).__name__ in _PROGRAMMABLE_LAYERS
        or instance_method(layer, "call") is not None
        or _uses_batch_axis(layer)
        or pads_to_batch(layer)
        or has_custom_activity_regularizer(layer)
        or _has_custom_activation(layer)
    )


def _uses_batch_axis(layer: Any) -> bool:
    """Whether a Keras layer, such as `Softmax(axis=0)`, works along the axis of the samples."""
    given = [getattr(layer, name, None) for name in ("axis", "axes")]
    axes = [axis for each in given for axis in (each if isinstance(each, list | tuple) else [each])]
    shapes = (getattr(layer, "_build_shapes_dict", None) or {}).values()
    first = {0, *(-len(shape) for shape in shapes if isinstance(shape, list | tuple))}
    return any(axis in first for axis in axes if isinstance(axis, int))


def pads_to_batch(layer: Any) -> bool:
    """Whether a layer pads texts to the longest one of its batch, of which each replica sees a part."""
    return (
        isinstance(layer, keras.layers.TextVectorization)
        and layer._output_mode == "int"
        and layer._output_sequence_length is None
        and not layer._ragged
    )


def has_gradient_hooks(model: Any) -> bool:
    """Whether PyTorch's weights have hooks on their gradients, which see those of this replica's samples."""
    values = [variable.value for variable in model.trainable_variables] if keras.backend.backend() == "torch" else []
    return any(value._backward_hooks or value._post_accumulate_grad_hooks for value in values)


def has_layer_metrics(model: Any) -> bool:
    """Whether any layer has metrics. They count whenever the layer is called, also while the model predicts."""
    return any(layer.metrics for layer in model._flatten_layers(include_self=False))


def has_custom_activity_regularizer(layer: Any) -> bool:
    """Whether a layer has an activity regularizer that may not be a sum over the samples."""
    regularizer = getattr(layer, "activity_regularizer", None)
    return regularizer is not None and type(regularizer) not in _KNOWN_REGULARIZERS


def _has_custom_activation(layer: Any) -> bool:
    functions = [getattr(layer, name, None) for name in ("activation", "recurrent_activation")]
    if any(_is_custom_layer(function) for function in functions if isinstance(function, keras.layers.Layer)):
        return True
    homes = (getattr(function, "__module__", None) for function in functions)
    return any(home is not None and not home.startswith(_KNOWN_FUNCTION_PACKAGES) for home in homes)


def has_custom_steps(model: Any, step: str) -> bool:
    """Whether the model has a custom `train_step` or `test_step`, or a custom method that these call."""
    return any(overrides(model, method) for method in (step, "compute_loss", "compute_metrics"))


def compiled_losses(model: Any) -> list[Any]:
    """Return the losses that a model was compiled with; empty until they are built."""
    return [entry.loss for entry in getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or ()]


def has_custom_code(model: Any) -> bool:
    """Whether a training step runs custom code other than losses and metrics."""
    return has_custom_steps(model, "train_step") or has_custom_forward(model) or has_gradient_hooks(model)


def has_custom_forward(model: Any) -> bool:
    """Whether custom code computes a part of the model's outputs."""
    if any(type(layer).call is not keras.Model.call for layer in custom_layers(model)):
        return True
    # In a functional model, `keras.ops` between layers are operations of the graph. They are custom code, too.
    graphs = [layer for layer in model._flatten_layers() if hasattr(layer, "operations")]
    return any(not isinstance(each, keras.layers.Layer) for graph in graphs for each in graph.operations)


def layers_used_once(model: Any) -> Iterator[Any]:
    """Yield the Keras layers without inner layers that a functional model, or a model in it, calls once."""
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(graph, Functional):
        return
    calls = Counter(id(node.operation) for nodes in graph._nodes_by_depth.values() for node in nodes)
    for layer in graph.layers:
        if calls[id(layer)] > 1:
            continue
        if isinstance(layer, keras.Model):
            yield from layers_used_once(layer)
        elif type(layer).__module__.startswith("keras.") and len(list(layer._flatten_layers())) == 1:
            yield layer


def names_in(function: Any) -> set[str]:
    """Return the names that a function and the functions inside it use."""
    return {name for code in _code_objects(function) for name in code.co_names}


def has_comparisons(function: Any) -> bool:
    """Whether a function, or one inside it, compares numbers. `is None` and `in` do not count."""
    return any(each.opname == "COMPARE_OP" for code in _code_objects(function) for each in dis.get_instructions(code))


def _code_objects(function: Any) -> Iterator[CodeType]:
    while (inner := _inner_function(function)) is not None:
        function = inner
    # Inner functions are constants of the code around them.
    codes: list[CodeType] = [function.__code__] if isinstance(function, FunctionType) else []
    while codes:
        code = codes.pop()
        yield code
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]


def _inner_function(function: Any) -> Any:
    """Return the function inside a decorated one, a method or a `functools.partial`; None for others."""
    found = (getattr(function, name, None) for name in ("__wrapped__", "__func__", "func"))
    return next((inner for inner in found if inner is not None), None)


def logs_differ_from_metrics(model: Any, step: str) -> bool:
    """Whether `train_step` or `test_step` may log more than the results of the metrics."""
    return overrides(model, step) or overrides(model, "compute_metrics")


def update_metrics(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
    """Add a batch to the metrics. Returns the logs of a custom `compute_metrics`.

    Keras's own `compute_metrics` also computes the results, which are not needed before the state is merged.
    """
    if overrides(model, "compute_metrics"):
        logs: dict[str, Any] = model.compute_metrics(x, y, y_pred, sample_weight)
        return logs
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y, y_pred, sample_weight)
    return {}


def plain_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the numbers in logs to Python numbers, keeping nesting: callbacks get logs sorted level by level."""
    return {
        name: plain_logs(value) if isinstance(value, Mapping) else pythonify_logs({name: value})[name]
        for name, value in logs.items()
    }


def logs_of_empty_epoch(model: Any, last: dict[str, Any]) -> dict[str, Any]:
    """Return what Keras logs for an epoch without data, after data of unknown length has ended with the last epoch,
    whose logs are `last`: on JAX the same, on TensorFlow the metrics of no batch, on PyTorch nothing."""
    match keras.backend.backend():
        case "jax":
            return dict(last)
        case "tensorflow" if last:
            return plain_logs(model.get_metrics_result())
    return {}


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten logs as Keras shows them: the entries of a nested dictionary join the others."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= flat_logs(value) if isinstance(value, Mapping) else {name: value}
    return flat


def samples(data: Any) -> int:
    """Return the number of samples in a batch."""
    return int(leaves(data)[0].shape[0])


def sync_jax_state(model: Any) -> None:
    """Put the state that a loop on JAX passes as arguments into the model's variables. No effect elsewhere."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
