"""Every public name of the installed TensorFlow's `tf.distribute` is here, or is an error that says what to do.

So are the methods of its strategies and resolvers, and the arguments with which programs construct them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import phalanx
import phalanx.cluster_resolver
import phalanx.coordinator
import phalanx.experimental

INTERNAL_ARGUMENTS = {
    "Strategy": {"extended"},
    "ReplicaContext": {"replica_id_in_sync_group"},
    "StrategyExtended": {"container_strategy"},
    "coordinator.PerWorkerValue": {"values"},
    "experimental.coordinator.PerWorkerValues": {"values"},
    "experimental.TPUStrategy": {"device_assignment"},
}
"""Of classes that strategies construct, and arguments that are errors anyway (`DeviceAssignment`)."""


def golden_names(module: ModuleType, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_"):
            continue
        yield f"{prefix}{name}", value
        if inspect.ismodule(value):
            yield from golden_names(value, f"{prefix}{name}.")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return dict(golden_names(pytest.importorskip("tensorflow").distribute))


def ours(path: str) -> Any:
    found: Any = phalanx
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_a_name_is_there_or_the_error_says_what_to_do(golden: dict[str, Any]) -> None:
    wrong = []
    for path in golden:
        try:
            ours(path)
        except AttributeError as error:
            if ": " not in str(error):
                wrong.append(str(error))
    assert not wrong, "build them, or say in compat/unsupported_names.py what to do without"


def present(golden: dict[str, Any], *kinds: type) -> list[str]:
    found = []
    for path, value in golden.items():
        try:
            if inspect.isclass(value) and issubclass(value, kinds) and inspect.isclass(ours(path)):
                found.append(path)
        except AttributeError:
            continue  # see above
    return found


def test_classes_take_the_arguments_of_the_originals_by_name(golden: dict[str, Any]) -> None:
    wrong = {}
    for path in present(golden, object):
        try:
            original = inspect.signature(golden[path].__init__).parameters.values()
        except ValueError:
            continue  # it takes none
        parameters = inspect.signature(ours(path).__init__).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        named = {each.name for each in original if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD} - {"self"}
        missing = named - INTERNAL_ARGUMENTS.get(path, set()) - parameters.keys()
        if missing and not takes_any:
            wrong[path] = missing
    assert not wrong


def test_objects_have_the_methods_of_the_originals_or_say_what_to_do(golden: dict[str, Any]) -> None:
    of_tensorflow = pytest.importorskip("tensorflow").distribute
    kinds = (of_tensorflow.Strategy, of_tensorflow.cluster_resolver.ClusterResolver, of_tensorflow.StrategyExtended)
    paths = present(golden, *kinds)
    assert paths
    for path in paths:
        kind = ours(path)
        for name in dir(golden[path]):
            if name.startswith("_") or hasattr(kind, name):
                continue
            with pytest.raises(AttributeError) as error:
                getattr(object.__new__(kind), name)
            assert ": " in str(error.value), f"{path}, {error.value}: see compat/unsupported_names.py"
