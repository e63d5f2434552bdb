"""Copies of a model in other processes, which do not run the program that builds it.

A Keras layer is sent as its configuration. A layer of a custom class is sent as the arguments with which it was
constructed. `record_construction` patches `Operation.__new__` to record them, and a custom `compile` to record what it
was called with. Weights are sent only on request: each method of a model on several replicas starts from the chief's.

Uses `Model._compile_config`, where Keras keeps the arguments of `compile`. Tested with Keras 3.15.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.copies.adapted_layers import AdaptedState, adapted_states, restore_adapted
from phalanx.keras_compat.copies.keras_settings import KerasSettings, keras_settings, with_keras_settings
from phalanx.keras_compat.copies.object_attributes import (
    LayerAttributes,
    cache_keras_attribute_names,
    describe_attributes,
    layer_attributes,
    restore_attributes,
    restore_layer_attributes,
)
from phalanx.keras_compat.copies.object_config import config_of, serialize_object, without_tensorflow
from phalanx.keras_compat.copies.object_names import name_counters, naming_from
from phalanx.keras_compat.copies.optimizer_copies import OptimizerDescription, describe_optimizers
from phalanx.keras_compat.keras_internals import keras_trainer
from phalanx.keras_compat.model_state import instance_method, optimizers
from phalanx.keras_compat.patching import set_untracked

MAIN = "__main__"
_CONSTRUCTION, _COMPILATION = "_phalanx_construction", "_phalanx_compilation"
_RECORDED = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
_METHODS = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


class CallArguments(NamedTuple):
    """The arguments of a call of a class or method.

    Attributes:
        names: Number of objects of each kind that Keras had named at that time, so that copies get the same names.
        settings: Keras's settings, if the call created layers with them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Mapping[str, int]
    settings: KerasSettings | None = None

    def construct(self, kind: type) -> Any:
        """Call a class with them. Counters name the layers inside, so variables get the original's paths."""
        assert self.settings is not None, "they are of a construction"
        with naming_from(self.names), with_keras_settings(self.settings):
            return kind(*self.args, **self.kwargs)


class LayerDescription(NamedTuple):
    """The recipe for rebuilding a layer, which may be a model.

    Attributes:
        kind: Custom class that is constructed from `construction`; None if the layer is created from `config`.
        config: Configuration of the layer, as `keras.saving.serialize_keras_object` returns it.
        definitions: Classes and functions of the main program that the configuration names.
        shapes: Shapes with which it was built; None if it was not.
        compilation: Arguments of `compile`; None if it was not compiled.
        optimizers: Variables for which a model's optimizers were built, and those that they do not decay.
        frozen: Indices of the layers in it that are not trainable; 0 is the layer itself.
        adapted: State that layers in it have learned by `adapt`.
        attributes: Attributes of the layer and the layers in it that the program may have set.
    """

    kind: type | None
    construction: CallArguments
    config: dict[str, Any]
    definitions: dict[str, Any]
    shapes: dict[str, Any] | None
    compilation: CallArguments | None
    optimizers: tuple[OptimizerDescription, ...]
    frozen: tuple[int, ...]
    adapted: tuple[AdaptedState, ...]
    attributes: tuple[LayerAttributes, ...]

    def unbuilt(self) -> LayerDescription:
        """Return a copy without what building adds or changes."""
        return self._replace(
            shapes=None,
            optimizers=tuple(optimizer.unbuilt() for optimizer in self.optimizers),
            attributes=(),
            config={name: value for name, value in self.config.items() if name != "build_config"},
        )

    def rebuild(self) -> Any:
        """Rebuild the layer, with its own weights."""
        with without_tensorflow():
            return self._rebuild()

    def _rebuild(self) -> Any:
        # The configuration refers to the program's classes and functions in `__main__`, which is another module in this
        # process.
        vars(sys.modules[MAIN]).update(self.definitions)
        if self.kind is not None:
            made = self.construction.construct(self.kind)
        else:
            made = keras.saving.deserialize_keras_object(self.config, custom_objects=self.definitions, safe_mode=False)
        self.build(made)
        # After building, which creates empty tables, and before weights.
        restore_adapted(made, self.adapted)
        for number, layer in enumerate(made._flatten_layers()):
            if layer.trainable != (number not in self.frozen):
                layer.trainable = number not in self.frozen
        if self.compilation is not None:
            made.compile(*self.compilation.args, **self.compilation.kwargs)
            for copy, optimizer in zip(self.optimizers, optimizers(made), strict=False):
                copy.exclude(optimizer, made.variables)
            self._build_optimizers(made)
        restore_layer_attributes(made, self.attributes)
        return made

    def build(self, made: Any) -> None:
        """Build an existing copy, perhaps created before the layer was built, as the layer is built now."""
        if self.shapes and not made.built:
            made.build_from_config(self.shapes)
            # For a model without a custom build(), Keras builds the inner layers and leaves `built` unset.
            made.built = made.built or all(layer.built for layer in made._flatten_layers(include_self=False))
        if self.compilation is not None and made.compiled:
            self._build_optimizers(made)

    def _build_optimizers(self, model: Any) -> None:
        """Build the optimizers for the variables that were trainable then: a layer may have been frozen since."""
        for copy, optimizer in zip(self.optimizers, optimizers(model), strict=False):
            copy.build(optimizer, model.variables)


def record_construction() -> None:
    """Record the arguments with which objects of custom classes are constructed from now on. Safe to call again."""
    cache_keras_attribute_names()
    # `keras.Model.__new__` does not pass them on.
    for base in (keras.Operation, keras.Model, keras.optimizers.Optimizer, keras.metrics.Metric):
        if not getattr(base.__new__, "records", False):
            base.__new__ = _recording_new(base.__new__)


def _recording_new(original: Callable[..., Any]) -> Callable[..., Any]:
    def recording(kind: Any, *args: Any, **kwargs: Any) -> Any:
        thing = original(kind) if original is object.__new__ else original(kind, *args, **kwargs)
        if isinstance(thing, _RECORDED) and _is_custom_class(kind):
            set_untracked(thing, **{_CONSTRUCTION: CallArguments(args, kwargs, name_counters(), keras_settings())})
            if isinstance(thing, keras.Model) and kind.compile is not keras_trainer().compile:
                set_untracked(thing, compile=_recording_compile(thing, kind.compile))
        return thing

    vars(recording)["records"] = True
    return recording


def describe_layer(layer: Any) -> LayerDescription:
    """Return what is sent of a layer, which may be a model.

    Raises: UnsupportedError if Keras cannot describe it.
    """
    for part in layer._flatten_layers():
        if type(part) is keras.layers.Layer and part.variables:
            raise UnsupportedError(
                f"{part.name!r} is a plain Layer that has been given weights from outside, so it cannot be made again "
                f"in other processes. Write a class that adds them in its __init__ or build."
            )
        # Custom classes may set these in `__init__`, which runs again.
        own = [name for name in _METHODS if instance_method(part, name) and _CONSTRUCTION not in vars(part)]
        if own:
            raise UnsupportedError(
                f"{part.name!r} has a {own[0]}() that was set on the object, and copies in other processes would not "
                f"have it. Define it in a class."
            )
    construction = vars(layer).get(_CONSTRUCTION)
    is_recorded = construction is not None and "get_config" not in _custom_methods(layer)
    config = {} if is_recorded else _config(layer)
    shapes = layer.get_build_config() if layer.built else None
    return LayerDescription(
        type(layer) if is_recorded else None,
        construction if is_recorded else CallArguments((), {}, {}),
        config,
        _definitions(config),
        shapes,
        _compilation(layer) if isinstance(layer, keras.Model) else None,
        describe_optimizers(layer) if isinstance(layer, keras.Model) else (),
        tuple(number for number, part in enumerate(layer._flatten_layers()) if not part.trainable),
        adapted_states(layer),
        layer_attributes(layer),
    )


def reduce_keras_object(thing: Any, *, with_weights: bool) -> Any:
    """Return how a Keras object is pickled, in the form of `__reduce_ex__`; NotImplemented for all others.

    Keras's own pickling writes a file, and requires custom classes to be registered.
    """
    if isinstance(thing, keras.layers.Layer):
        weights = thing.get_weights() if with_weights else None
        return _rebuild_layer, (describe_layer(thing), weights)
    if isinstance(thing, keras.optimizers.Optimizer | keras.metrics.Metric):
        if not _is_custom_class(type(thing)):
            return _from_config, (type(thing), config_of(thing))
        made_from = vars(thing).get(_CONSTRUCTION) or config_of(thing)
        return _rebuild_object, (type(thing), made_from, describe_attributes(thing, {}))
    if isinstance(thing, keras.losses.Loss | keras.optimizers.schedules.LearningRateSchedule):
        return copyreg.__newobj__, (type(thing),), vars(thing)  # type: ignore[attr-defined]
    return NotImplemented


def _rebuild_layer(copy: LayerDescription, weights: list[Any] | None) -> Any:
    made = copy.rebuild()
    if weights:
        made.set_weights(weights)
    return made


def _rebuild_object(kind: Any, made_from: CallArguments | dict[str, Any], attributes: Mapping[str, Any]) -> Any:
    if isinstance(made_from, CallArguments):
        made = made_from.construct(kind)
    else:
        try:
            made = _from_config(kind, made_from)
        except TypeError as error:
            raise UnsupportedError(
                f"{kind.__qualname__} was created before the strategy, and Keras cannot create another from its "
                f"get_config(): {error}. Create it in strategy.scope()."
            ) from error
    restore_attributes(made, attributes, {}, kind.__qualname__)
    return made


def _from_config(kind: Any, config: dict[str, Any]) -> Any:
    with without_tensorflow():
        return kind.from_config(config)


def _is_custom_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] != "keras"


def _custom_methods(layer: Any) -> set[str]:
    """Return the methods that a layer's custom classes define."""
    return {name for kind in type(layer).__mro__ if _is_custom_class(kind) for name in vars(kind)} - set(vars(object))


def _recording_compile(model: Any, compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a custom `compile` for one model, which records its arguments."""
    # The model holds this function, so a strong reference would be a cycle that keeps its weights alive until garbage
    # collection.
    reference = weakref.ref(model)

    @functools.wraps(compile_)
    def method(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        result = compile_(target, *args, **kwargs)
        set_untracked(target, **{_COMPILATION: CallArguments(args, kwargs, {})})
        return result

    return method


def _compilation(model: Any) -> CallArguments | None:
    if (recorded := vars(model).get(_COMPILATION)) is not None:
        return recorded  # type: ignore[no-any-return]
    if not model.compiled:
        return None
    if type(model).compile is not keras_trainer().compile:
        raise UnsupportedError(
            f"The model {model.name!r} has its own compile(), and was made before the strategy, so what compile() was "
            f"given is not known. Make and compile the model in strategy.scope()."
        )
    config = dict(model._compile_config.config)
    # If `compile` is called again without loss or metrics, Keras keeps the previous ones.
    loss, metrics = model._compile_loss, model._compile_metrics
    if config.get("loss") is None and loss is not None:
        config |= {"loss": loss._user_loss, "loss_weights": loss._user_loss_weights}
    if config.get("metrics") is None and config.get("weighted_metrics") is None and metrics is not None:
        config |= {"metrics": metrics._user_metrics, "weighted_metrics": metrics._user_weighted_metrics}
    return CallArguments((), config | {"optimizer": _current_optimizer(model, config.get("optimizer"))}, {})


def _current_optimizer(model: Any, compiled: Any) -> Any:
    """Return the model's current optimizer, which may not be the one that it was compiled with."""
    present = model.optimizer
    kind = keras.optimizers.LossScaleOptimizer
    # `compile` wraps the program's optimizer to scale the loss, and will do so again.
    return present.inner_optimizer if isinstance(present, kind) and not isinstance(compiled, kind) else present


def _config(layer: Any) -> dict[str, Any]:
    try:
        config = serialize_object(layer)
    except Exception as error:  # whatever the `get_config` of some class raises
        raise UnsupportedError(
            f"{layer.name!r} cannot be made again in other processes, because Keras cannot describe it: "
            f"{str(error).rstrip('.')}. Make the model in strategy.scope(), give its classes a get_config() (see "
            f"keras.saving), or put the training into a function and call phalanx.launch(function, workers=N)."
        ) from error
    # `compilation` has it, with objects, which a configuration can only name.
    config.pop("compile_config", None)
    return config


def _definitions(config: Mapping[str, Any]) -> dict[str, Any]:
    main = vars(sys.modules[MAIN])
    named = sorted({name for name in _strings_in(config) if name in main})
    return {name: main[name] for name in named if getattr(main[name], "__module__", None) == MAIN}


def _strings_in(config: Any) -> Iterator[str]:
    """Yield all strings in a configuration; for `package>Name`, the name."""
    if isinstance(config, str):
        yield config.rpartition(">")[2]
    elif isinstance(config, Mapping):
        yield from _strings_in_all(config.values())
    elif isinstance(config, list | tuple):
        yield from _strings_in_all(config)


def _strings_in_all(configs: Iterable[Any]) -> Iterator[str]:
    for config in configs:
        yield from _strings_in(config)
