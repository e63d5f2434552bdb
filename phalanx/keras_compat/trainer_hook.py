"""The hook that redirects Keras's methods to the dispatcher that a strategy has registered.

`install(dispatcher)` wraps a few methods of Keras's classes, and `uninstall()` removes the wrappers. A wrapper decides
nothing: it passes the call, with Keras's own method, to the dispatcher.

    Model.__init__, Model.compile                   -> dispatcher.register_model
    Model.quantize                                  -> dispatcher.forget_functions
    Model.fit, evaluate, predict, train_on_batch... -> dispatcher.run
    Model.save, Model.save_weights                  -> dispatcher.save
    Layer, Optimizer, Metric .__init__              -> dispatcher.register_object
    Variable._initialize                            -> dispatcher.register_variable
    Optimizer.apply                                 -> dispatcher.merge_gradients, then Keras's own
    BatchNormalization._moments                     -> see `global_batch_norm`
    Layer.stateless_call                            -> see `loss_id_reset`
    paths that are URLs                             -> see `remote_files`, `mirrored_logs`

`choose_train_function` is independent of this: with it, Horovod's interface chooses the function with which Keras's own
`fit` takes its steps.

Tested with Keras 3.15. With 3.12 (JAX), the training scenarios of CI pass except for two results that Keras itself has
changed since: the metrics of `train_on_batch`, and the names of the logs of a custom `test_step`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from phalanx.keras_compat.global_batch.global_batch_norm import accepting_synchronized, synchronizing
from phalanx.keras_compat.global_batch.loss_id_reset import clearing_loss_ids
from phalanx.keras_compat.global_batch.optimizer_applies import external_optimizer_merge
from phalanx.keras_compat.keras_internals import keras_trainer
from phalanx.keras_compat.patching import Patches, defining_class
from phalanx.keras_compat.saving import mirrored_logs, remote_files
from phalanx.keras_compat.variables.merged_variables import registering

DISPATCHED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
SAVED_SUFFIXES = {"save": (".keras", ".h5", ".hdf5"), "save_weights": (".weights.h5",)}
"""The methods of a model that write a file, and the suffixes of names that mean a single file."""
OBJECT_KINDS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)


@dataclass(frozen=True)
class KerasMethod:
    """A method of Keras, as it was before it was wrapped."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature

    @classmethod
    def of(cls, function: Callable[..., Any]) -> KerasMethod:
        return cls(function.__name__, function, inspect.signature(function))

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function(model, *args, **kwargs)

    def bind(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without the model.

        Raises: TypeError if they do not fit the signature.
        """
        try:
            arguments = self.signature.bind(model, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(model).__name__}.{self.name}(): {error}") from None
        del arguments[next(iter(self.signature.parameters))]
        # `signature.bind` keeps arguments that only `**kwargs` accepts under that name.
        arguments.update(arguments.pop("kwargs", {}))
        return arguments


class KerasDispatcher(Protocol):
    """The object that decides who trains the models of the program. A strategy registers it."""

    def register_model(self, model: Any) -> None:
        """Called after a model was constructed or compiled."""
        ...

    def forget_functions(self, model: Any) -> None:
        """Called after Keras has dropped the functions that it had compiled for a model's steps."""
        ...

    def register_object(self, obj: Any) -> None:
        """Called after a layer, an optimizer or a metric was constructed."""
        ...

    def register_variable(self, variable: Any) -> None:
        """Called after a variable was created."""
        ...

    def run(self, model: Any, method: KerasMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of `fit` and the other `DISPATCHED` methods; may call Keras's own `method`."""
        ...

    def save(self, model: Any, method: KerasMethod, filepath: Any, overwrite: bool, *args: Any, **kwargs: Any) -> Any:
        """Called instead of `save` and `save_weights`; may call Keras's own `method`."""
        ...

    def merge_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients that an optimizer is about to apply, merged if there is anything to merge."""
        ...


_patches = Patches()
_keras_methods: dict[str, KerasMethod] = {}
_dispatcher: KerasDispatcher
_choose_train_function: Callable[[Any, Callable[[], None]], Callable[..., Any] | None]
_applying = threading.local()


def install(dispatcher: KerasDispatcher) -> None:
    """Wrap the methods. A later call only replaces the dispatcher."""
    global _dispatcher
    _dispatcher = dispatcher
    if _keras_methods:
        return
    trainer = keras_trainer()
    registering_model = functools.partial(_followed_by, lambda model: _dispatcher.register_model(model))
    forgetting_functions = functools.partial(_followed_by, lambda model: _dispatcher.forget_functions(model))
    # Runs after the trainer's part of the constructor, before the program's class has created its layers.
    _patches.replace(trainer, "__init__", registering_model)
    # Patched where it is defined: Keras treats a `compile` that differs from the base trainer's as custom, and
    # `load_model` then does not compile the model.
    _patches.replace(defining_class(trainer, "compile"), "compile", registering_model)
    _patches.replace(keras.Model, "quantize", forgetting_functions)
    for name in DISPATCHED:
        _keras_methods[name] = KerasMethod.of(getattr(trainer, name))
        _patches.replace(trainer, name, _dispatching)
    for name in SAVED_SUFFIXES:
        _patches.replace(keras.Model, name, _saving)
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _patches.replace(defining_class(optimizer, "apply"), "apply", _merging)
    _patches.replace(keras.layers.BatchNormalization, "__init__", accepting_synchronized)
    _patches.replace(keras.layers.BatchNormalization, "_moments", synchronizing)
    for kind in OBJECT_KINDS:
        # The base classes: constructors of subclasses call these, perhaps several times (`ScopeRegistry.register`).
        _patches.replace(defining_class(kind, "__init__"), "__init__", _registering_object)
    _patches.replace(defining_class(keras.Variable, "_initialize"), "_initialize", _registering_variable)
    _patch_stateless_call()
    remote_files.install(_patches)
    mirrored_logs.install(_patches)


def uninstall() -> None:
    """Restore Keras's own methods. Safe to call twice."""
    _patches.restore()
    _keras_methods.clear()


def keras_method(name: str) -> KerasMethod:
    """Return Keras's own `fit`, `evaluate`, ... while the hook is installed."""
    return _keras_methods[name]


def choose_train_function(choose: Callable[[Any, Callable[[], None]], Callable[..., Any] | None]) -> None:
    """Choose the functions with which Keras's own `fit` takes its steps. A later call replaces `choose`.

    Args:
        choose: Called with the model and a function that makes Keras build its own train function. Returns the train
            function to use, or None for Keras's.
    """
    global _choose_train_function
    _choose_train_function = choose
    _patch_stateless_call()
    trainer = keras_trainer()
    if (trainer, "make_train_function") not in _patches:
        _patches.replace(trainer, "make_train_function", _choosing)


def _patch_stateless_call() -> None:
    if (keras.layers.Layer, "stateless_call") not in _patches:
        _patches.replace(keras.layers.Layer, "stateless_call", clearing_loss_ids)


def _followed_by(act: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method to call `act` with the object afterwards. `act` must look the dispatcher up, as it may change."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        act(self)
        return result

    return method


def _registering_object(original: Callable[..., Any]) -> Callable[..., Any]:
    method = _followed_by(lambda obj: _dispatcher.register_object(obj), original)
    # Keras reads the signature to write an object's configuration, and does not follow `__wrapped__`.
    vars(method)["__signature__"] = inspect.signature(original)
    return method


def _registering_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    return registering(original, lambda variable: _dispatcher.register_variable(variable))


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    keras_own = KerasMethod.of(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _dispatcher.run(self, keras_own, args, kwargs)

    return method


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    keras_own = KerasMethod.of(original)

    @functools.wraps(original)
    def method(self: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        return _dispatcher.save(self, keras_own, filepath, overwrite, *args, **kwargs)

    return method


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, force: bool = False) -> Any:
        # As in Keras: the function is kept until the model is compiled again, and every `fit` may request it.
        if self.train_function is not None and not force:
            return self.train_function
        chosen = _choose_train_function(self, lambda: original(self, True))
        if chosen is None:
            return original(self, force)
        self.train_function = chosen
        return chosen

    return method


def is_applying() -> bool:
    """Whether an optimizer is being applied. What it assigns is the same on all replicas."""
    return applied_optimizer() is not None


def applied_optimizer() -> Any:
    """The outermost optimizer that is being applied; None outside of `apply`."""
    return getattr(_applying, "optimizer", None)


def _merging(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `optimizer.apply` to merge first. An optimizer around another one (loss scaling) merges for both."""

    @functools.wraps(original)
    def method(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        # Inside another `apply`, of an optimizer that wraps this one to scale the loss.
        if is_applying():
            return original(self, grads, trainable_variables)
        _applying.optimizer = self
        try:
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            known = self._trainable_variables if trainable_variables is None else trainable_variables
            merge = external_optimizer_merge() or _dispatcher.merge_gradients
            return original(self, merge(list(grads), known), trainable_variables)
        finally:
            _applying.optimizer = None

    return method
