"""What the chief's program has made, as it travels to workers without a program."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest

from phalanx.coordinator.function_pickling import unpack
from phalanx.coordinator.scope_definitions import OutgoingDefinitions, parts_of
from phalanx.engines import make_tensors
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.copies.model_copies import record_construction
from phalanx.training.scope_registry import ScopedName, ScopeRegistry


class Scope:
    """The objects of a program, and what arrives of them."""

    def __init__(self, *made: Any) -> None:
        self.scope_registry = ScopeRegistry()
        for thing in made:
            for part in parts_of(thing):
                self.scope_registry.register(part)
        self.outgoing = OutgoingDefinitions(self.scope_registry, make_tensors())

    def arrived(self, *required: Any) -> dict[ScopedName, Any]:
        self.outgoing.require([name for thing in required if (name := self.scope_registry.name_of(thing)) is not None])
        order, contents = self.outgoing.pack()
        found: dict[ScopedName, Any] = {}

        def load(reference: tuple[Any, ...]) -> Any:
            return found[ScopedName(*reference[1:])]

        for names, content in zip(order.names, contents, strict=True):
            definition = unpack(content, load)
            layer = definition.recipe
            root = layer.rebuild() if hasattr(layer, "rebuild") else layer
            found |= dict(zip(names, parts_of(root), strict=True))
        return found

    def of(self, thing: Any, found: dict[ScopedName, Any]) -> Any:
        name = self.scope_registry.name_of(thing)
        assert name is not None
        return found[name]


def test_what_is_in_an_object_or_shared_by_two_keeps_its_identity() -> None:
    encoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    accuracy = keras.metrics.MeanSquaredError()
    model = keras.Sequential([encoder, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[accuracy])
    scope = Scope(encoder, accuracy, model)
    found = scope.arrived(model)
    copy = scope.of(model, found)
    assert copy.layers[0] is scope.of(encoder, found)
    assert copy.optimizer is scope.of(model.optimizer, found)
    copy.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    assert scope.of(accuracy, found) in copy._compile_metrics.metrics
    assert float(scope.of(accuracy, found).count) == 2
    assert float(accuracy.count) == 0


class Binned(keras.Model):
    """A model that Keras cannot describe."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = keras.layers.Discretization(num_bins=3)
        self.scale = keras.layers.Normalization()

    def call(self, x: Any) -> Any:
        return keras.ops.cast(self.bins(x), "float32") + self.scale(x)


def test_what_layers_have_learned_by_adapt_travels_with_them() -> None:
    record_construction()
    words, numbers = np.array([["red"], ["blue"], ["red"]]), np.float32([[1.0], [5.0], [9.0]])
    lookup, text = keras.layers.StringLookup(), keras.layers.TextVectorization(output_mode="tf_idf")
    whole, binned = keras.layers.IntegerLookup(), Binned()
    plain = keras.layers.StringLookup(vocabulary=["green"])
    for layer, values in ((lookup, words), (text, words), (whole, np.array([[7], [7], [8]]))):
        layer.adapt(values)
    binned.bins.adapt(numbers)
    binned.scale.adapt(numbers)
    scope = Scope(lookup, text, whole, plain, binned)
    found = scope.arrived(lookup, text, whole, plain, binned)
    for layer, values in ((lookup, words), (text, words), (whole, np.array([[8], [3]])), (binned, numbers)):
        expected = keras.ops.convert_to_numpy(layer(values))
        np.testing.assert_allclose(keras.ops.convert_to_numpy(scope.of(layer, found)(values)), expected)
    assert scope.of(plain, found).get_vocabulary() == ["[UNK]", "green"]
    before, _ = scope.outgoing.pack()
    lookup.adapt(np.array([["green"]]))
    after, _ = scope.outgoing.pack()
    roots = zip(after.names, before.digests, after.digests, strict=True)
    changed = {names[0] for names, one, other in roots if one != other}
    assert changed == {scope.scope_registry.name_of(lookup)}, "workers make it again"


def test_what_is_required_is_sent_and_nothing_else() -> None:
    one, other = keras.layers.Dense(1), keras.layers.Dense(2)
    scope = Scope(one, other)
    assert set(scope.arrived(one)) == {scope.scope_registry.name_of(one)}
    assert scope.outgoing.includes([scope.scope_registry.name_of(one)])
    assert not scope.outgoing.includes([scope.scope_registry.name_of(other)])
    assert set(scope.arrived(other)) == {scope.scope_registry.name_of(one), scope.scope_registry.name_of(other)}


def noted(scope: Scope, thing: Any) -> Any:
    """The program makes it later."""
    for part in parts_of(thing):
        scope.scope_registry.register(part)
    return thing


def test_a_model_that_is_put_into_another_one_later_travels_in_that() -> None:
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    scope = Scope(inner)
    scope.arrived(inner)
    outer = noted(scope, keras.Sequential([inner, keras.layers.Dense(1)]))
    found = scope.arrived(outer)
    assert scope.of(outer, found).layers[0] is scope.of(inner, found)
    assert len({id(scope.of(layer, found)) for layer in (outer, inner, inner.layers[0])}) == 3


@pytest.mark.parametrize("kind", ["layer", "optimizer"])
def test_what_is_required_stays_so_when_it_becomes_a_part_of_something_else(kind: str) -> None:
    """A worker that comes later runs functions that were scheduled before."""
    part = keras.layers.Dense(3) if kind == "layer" else keras.optimizers.SGD()
    scope, other = Scope(part), keras.layers.Dense(2)
    scope.arrived(part)
    model = keras.Sequential([keras.Input((2,)), part if kind == "layer" else keras.layers.Dense(1)])
    model.compile(part if kind == "optimizer" else "sgd", "mse")
    noted(scope, model)
    noted(scope, other)
    assert set(scope.arrived(other)) == {scope.scope_registry.name_of(part), scope.scope_registry.name_of(other)}
    assert scope.outgoing.includes([scope.scope_registry.name_of(part)])
    found = scope.arrived(model)
    copy = scope.of(model, found)
    assert scope.of(part, found) is (copy.layers[0] if kind == "layer" else copy.optimizer)


def test_a_part_of_a_model_that_the_program_has_dropped_is_sent() -> None:
    part = keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((2,)), part])
    scope = Scope(model)
    assert set(scope.arrived(model)) >= {scope.scope_registry.name_of(part)}
    name = scope.scope_registry.name_of(part)
    assert name is not None
    del model
    gc.collect()
    assert not scope.outgoing.includes([name])
    assert set(scope.arrived(part)) == {name}


def test_two_models_with_a_common_layer_are_refused_by_name() -> None:
    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(3, name="common")(inputs)
    first = keras.Model(inputs, keras.layers.Dense(1)(hidden), name="first")
    second = keras.Model(inputs, hidden, name="second")
    scope = Scope(first, second)
    assert scope.of(first, scope.arrived(first)).name == "first"
    with pytest.raises(UnsupportedError, match="'common' is a part of 'first' and of 'second'"):
        scope.arrived(second)


def test_what_cannot_travel_is_named() -> None:
    class Metric(keras.metrics.Mean):
        def __init__(self, generator: Any) -> None:
            super().__init__()
            self.generator = generator

        def get_config(self) -> dict[str, Any]:
            return {"generator": self.generator}

    plain = keras.layers.Layer(name="plain")
    plain.add_weight(shape=())
    with pytest.raises(UnsupportedError, match="'plain' is a plain Layer"):
        Scope(plain).arrived(plain)
    metric = Metric(number for number in range(3))
    with pytest.raises(UnsupportedError, match=r"The Metric .* cannot travel .*generator"):
        Scope(metric).arrived(metric)
