"""What the chief's program has created in the scope, in the form that is sent to workers without a program.

Layers (models too), optimizers and metrics are sent as recipes to build them (`keras_compat/copies/model_copies`). A
*root* is an object that is in no other; its parts are sent with it, and keep their identity: workers find the parts of
their copy in the order of `parts_of`, under the names of the chief's parts.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np

from phalanx.coordinator.coordinator_messages import Define
from phalanx.coordinator.dispatcher import Dispatcher
from phalanx.engines.tensors import Tensors
from phalanx.errors import PhalanxError, UnsupportedError
from phalanx.keras_compat.copies.model_copies import LayerDescription, describe_layer
from phalanx.keras_compat.model_state import optimizers
from phalanx.keras_compat.variables.host_values import to_host
from phalanx.runtime.pickling import dumps_with_references, explain_pickling_errors
from phalanx.training.call_pickling import call_reducer
from phalanx.training.scope_registry import KINDS, ScopedName, ScopeRegistry

Array = np.ndarray[Any, Any]

DEFINITIONS = "definitions"
NAMELESS = ScopedName("", 0)


class Definition(NamedTuple):
    """One root.

    Attributes:
        recipe: Recipe to build a layer; or an optimizer or a metric itself.
        state: Values of `state_of`.
        paths: Paths of the variables in `trained_by_servers`, then in `state_of`, by which tasks compare their models.
    """

    recipe: Any
    state: list[Array]
    paths: list[str]


def parts_of(root: Any) -> list[Any]:
    """An object and its parts: the layers in it and their metrics, and a model's optimizers."""
    found = {id(root): root}
    if isinstance(root, keras.layers.Layer):
        for layer in root._flatten_layers():
            found |= {id(part): part for part in (layer, *layer._metrics)}
    if isinstance(root, keras.Model):
        found |= {id(optimizer): optimizer for optimizer in optimizers(root)}
    return list(found.values())


def trained_by_servers(root: Any) -> list[Any]:
    """The variables of a layer that servers may train, if it is built."""
    return list(root.trainable_weights) if isinstance(root, keras.layers.Layer) and root.built else []


def state_of(root: Any) -> list[Any]:
    """The variables of a layer that servers do not train, if it is built; excludes those of metrics."""
    if not isinstance(root, keras.layers.Layer) or not root.built:
        return []
    generators = [generator for layer in root._flatten_layers() for generator in layer._seed_generators]
    return [*root.non_trainable_weights, *(generator.state for generator in generators)]


class OutgoingDefinitions:
    """Definitions that workers without a program must have. Safe to use from any thread.

    Args:
        scope_registry: Objects that the program has created in the scope.
        tensors: Tensors of this task's backend.
    """

    def __init__(self, scope_registry: ScopeRegistry, tensors: Tensors) -> None:
        self._scope_registry = scope_registry
        self._tensors = tensors
        self._lock = threading.RLock()  # protects the following attributes
        self._required: dict[ScopedName, None] = {}  # roots that workers must have, in the order of their first use
        self._roots: dict[ScopedName, ScopedName] = {}  # the root that contains each surveyed object
        self._shared: dict[ScopedName, UnsupportedError] = {}  # roots that cannot be sent, as another has their part
        self._announced: tuple[Define, list[bool]] | None = None  # and what was built then

    def require(self, names: Iterable[ScopedName]) -> bool:
        """Require these on workers. Returns: whether any of them is new."""
        names = list(names)
        with self._lock:
            present = self._scope_registry.present()
            # The parts of what the program has dropped may live on: they are surveyed again.
            self._roots = {name: root for name, root in self._roots.items() if root in present}
            if not self._roots.keys() >= set(names):
                self._survey(present)
            roots = {root for name in names if (root := self._root_of(name)) is not None} - self._required.keys()
            self._required |= dict.fromkeys(roots)
            for name in list(self._required):
                root = self._roots.get(name, name)
                if root != name and root in self._required:
                    del self._required[name]  # it is now sent as part of that one
            return bool(roots)

    def includes(self, names: Collection[ScopedName]) -> bool:
        """Whether all of these are required already."""
        with self._lock:
            present = self._scope_registry.present()
            roots = [self._root_of(name) for name in names]
            return all(root in self._required and root in present for root in roots)

    def _root_of(self, name: ScopedName) -> ScopedName | None:
        """The object that another one is sent with; the object itself, if it was required before its owner was."""
        return name if name in self._required else self._roots.get(name)

    def announce(self, dispatcher: Dispatcher) -> None:
        """Send definitions that workers must have and do not have yet, in their present form: a worker that connects
        while the program builds a model gets its earlier form.

        Raises: the errors of `pack`, if a worker is connected; otherwise workers that connect later raise them.
        """
        try:
            packed = self.pack()
        except PhalanxError as error:
            dispatcher.workers.send_to_worker_servers(DEFINITIONS, partial(_fail, error))
            return
        present = self._scope_registry.present()
        now = packed[0], [bool(getattr(present[root], "built", True)) for root in self._required if root in present]
        if now != self._announced:
            self._announced = now
            dispatcher.workers.send_to_worker_servers(DEFINITIONS, lambda: packed)

    def pack(self) -> tuple[Define, list[bytes]]:
        """The message that defines everything workers must have.

        Raises: UnsupportedError naming what cannot be sent.
        """
        with self._lock:
            packed: dict[ScopedName, tuple[bytes, bytes]] = {}
            present = self._scope_registry.present()
            for root in self._required:
                if root in present:
                    self._pack(root, packed, set())
            names = tuple(
                tuple(self._scope_registry.name_of(part) or NAMELESS for part in parts_of(present[root]))
                for root in packed
            )
            digests = tuple(digest for digest, _ in packed.values())
            policy = keras.config.dtype_policy().name
            return Define(names, digests, policy), [content for _, content in packed.values()]

    def _survey(self, present: Mapping[ScopedName, Any]) -> None:
        """Find out which objects contain which."""
        self._shared = {}
        parts = {name: parts_of(scoped) for name, scoped in present.items() if isinstance(scoped, keras.layers.Layer)}
        inner = {id(part) for own in parts.values() for part in own[1:] if not _is_optimizer(part)}
        for name, scoped in present.items():
            if id(scoped) in inner:
                continue
            in_it = parts.get(name, [scoped])
            for part in in_it:
                own = self._scope_registry.name_of(part)
                if own is None:
                    continue
                root = self._roots.get(own, name)
                # Or of something that has become part of this one.
                if root in (name, own) or any(each is present.get(root) for each in in_it):
                    self._roots[own] = name
                elif _has_state(part) and name not in self._shared:
                    self._shared[name] = _sharing(scoped, present.get(root), part)
        for name in present:
            self._roots.setdefault(name, name)

    def _pack(self, root: ScopedName, packed: dict[ScopedName, tuple[bytes, bytes]], begun: set[ScopedName]) -> None:
        """Pack a root, after the roots that it refers to."""
        if root in packed:
            return
        if root in self._shared:
            raise self._shared[root]
        scoped = self._scope_registry.present()[root]
        begun.add(root)

        def refer(thing: Any) -> Any:
            # A root that is being packed is sent by value inside itself; else two that refer to each other never end.
            name = self._scope_registry.name_of(thing) if isinstance(thing, KINDS) else None
            other = None if name is None else self._root_of(name)
            is_open = other in begun and other not in packed
            if name is None or other is None or is_open or other not in self._scope_registry.present():
                return None
            self._pack(other, packed, begun)
            return "scoped", *name

        what = f"The {type(scoped).__name__} {getattr(scoped, 'name', '')!r}"
        with explain_pickling_errors(
            f"{what} cannot travel to workers that run no program of their own",
            "Give its class a get_config() (see keras.saving), or run the same program on all tasks.",
        ):
            recipe = describe_layer(scoped) if isinstance(scoped, keras.layers.Layer) else scoped
            unbuilt = recipe.unbuilt() if isinstance(recipe, LayerDescription) else recipe
            # Digest of the recipe, without weights and building: a worker keeps its copy, and only builds it, if the
            # chief's was built or trained since.
            digest = hashlib.blake2b(self._pickled(unbuilt, refer), digest_size=16).digest()
            state = state_of(scoped)
            paths = [variable.path for variable in (*trained_by_servers(scoped), *state)]
            content = self._pickled(Definition(recipe, [to_host(v) for v in state], paths), refer)
        packed[root] = digest, content

    def _pickled(self, thing: Any, refer: Any) -> bytes:
        return dumps_with_references(thing, refer, call_reducer(self._tensors, with_weights=False))


def _fail(error: PhalanxError) -> NoReturn:
    raise error


def _is_optimizer(part: Any) -> bool:
    return isinstance(part, keras.optimizers.Optimizer)


def _has_state(part: Any) -> bool:
    """Whether two copies of a layer could come to differ."""
    return isinstance(part, keras.layers.Layer) and (not part.built or bool(part.variables))


def _sharing(scoped: Any, other: Any, part: Any) -> UnsupportedError:
    return UnsupportedError(
        f"The layer {part.name!r} is a part of {getattr(other, 'name', '')!r} and of {scoped.name!r}: workers "
        f"without a program of their own would have it twice. Put one of the two into the other, or run the same "
        f"program on all tasks."
    )
