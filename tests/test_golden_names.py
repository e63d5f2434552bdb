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

tensorflow = pytest.importorskip("tensorflow")

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


GOLDEN = dict(golden_names(tensorflow.distribute))


def ours(path: str) -> Any:
    found: Any = phalanx
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", GOLDEN)
def test_a_name_is_there_or_the_error_says_what_to_do(path: str) -> None:
    error = None
    try:
        ours(path)
    except AttributeError as raised:
        error = str(raised)
    assert error is None or ": " in error, (
        f"{error}: build it, or say in compat/unsupported_names.py what to do without"
    )


def present(kind: type) -> list[str]:
    found = []
    for path, value in GOLDEN.items():
        try:
            if inspect.isclass(value) and issubclass(value, kind) and inspect.isclass(ours(path)):
                found.append(path)
        except AttributeError:
            continue  # see above
    return found


@pytest.mark.parametrize("path", present(object))
def test_a_class_takes_the_arguments_of_the_original_by_name(path: str) -> None:
    try:
        original = inspect.signature(GOLDEN[path].__init__).parameters.values()
    except ValueError:
        return  # it takes none
    parameters = inspect.signature(ours(path).__init__).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {each.name for each in original if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD} - {"self"}
    missing = named - INTERNAL_ARGUMENTS.get(path, set()) - parameters.keys()
    assert takes_any or not missing, missing


@pytest.mark.parametrize(
    "path",
    [
        *present(tensorflow.distribute.Strategy),
        *present(tensorflow.distribute.cluster_resolver.ClusterResolver),
        *present(tensorflow.distribute.StrategyExtended),
    ],
)
def test_an_object_has_the_methods_of_the_original_or_says_what_to_do(path: str) -> None:
    kind = ours(path)
    for name in dir(GOLDEN[path]):
        if name.startswith("_") or hasattr(kind, name):
            continue
        with pytest.raises(AttributeError) as error:
            getattr(object.__new__(kind), name)
        assert ": " in str(error.value), f"{error.value}: see compat/unsupported_names.py"
