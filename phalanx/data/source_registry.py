"""The kinds of input that a model takes, and the modules that read them.

To add a kind of dataset, write a module with `make_source(request)` and add a line to `SOURCE_KINDS`. In-memory data
indexed by rows (arrays, tensors, data frames) is not one of these: see `array_source` and
`keras_compat/data_adapters`.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.data.input_request import InputRequest
from phalanx.data.source import Source
from phalanx.errors import ConfigurationError


def _has_class(module: str, *names: str) -> Callable[[Any], bool]:
    """Return a function that checks whether an object has a class with one of these names from a package. It compares
    names, as Keras does, so that no framework is imported."""
    return lambda x: any(cls.__name__ in names and cls.__module__.startswith(module) for cls in type(x).__mro__)


class SourceKind(NamedTuple):
    """A kind of dataset.

    Attributes:
        name: Name for messages.
        matches: Function that returns whether an object is of this kind.
        module: Module imported when a program first passes this kind. Its `make_source(request)` returns a `Source`.
        takes_class_weight: Whether `class_weight` applies to it.
    """

    name: str
    matches: Callable[[Any], bool]
    module: str
    takes_class_weight: bool = False


TF_DATASET = "tf.data.Dataset"

SOURCE_KINDS = (
    SourceKind("generator", lambda x: isinstance(x, types.GeneratorType), "phalanx.data.generator_source"),
    SourceKind("PyDataset", _has_class("keras.", "PyDataset"), "phalanx.data.pydataset_source", True),
    SourceKind(TF_DATASET, _has_class("tensorflow.", "DatasetV2"), "phalanx.data.tf_data_source", True),
    SourceKind("torch DataLoader", _has_class("torch.utils.data", "DataLoader"), "phalanx.data.dataloader_source"),
    SourceKind(
        "grain.Dataset and grain.DataLoader",
        _has_class("grain", "MapDataset", "IterDataset", "DataLoader"),
        "phalanx.data.grain_source",
    ),
    SourceKind("DatasetCreator", _has_class("phalanx.", "DatasetCreator"), "phalanx.data.dataset_creator"),
    SourceKind("DistributedDataset", _has_class("phalanx.", "DistributedDataset"), "phalanx.data.distributed_dataset"),
)

ACCEPTED = (
    "NumPy arrays, tensors of JAX, TensorFlow or PyTorch, pandas objects (alone or in lists, tuples and "
    "dicts), keras.utils.PyDataset, tf.data.Dataset, torch.utils.data.DataLoader, grain datasets, Python "
    "generators, phalanx.DatasetCreator, and the datasets of strategy.experimental_distribute_dataset and "
    "distribute_datasets_from_function"
)


def find_kind(x: Any) -> SourceKind | None:
    """The kind of a dataset; None for arrays and anything else that is not a dataset."""
    return next((kind for kind in SOURCE_KINDS if kind.matches(x)), None)


def accepts_batch_size(x: Any) -> bool:
    """Whether `batch_size` applies to this input: it does to arrays, but a dataset has its own batches."""
    return find_kind(x) is None


def make_source(request: InputRequest) -> Source:
    """Create the source of an input. Raises the same errors as `shard_input`."""
    kind = find_kind(request.x)
    if kind is not None:
        _check_dataset_arguments(kind, request)
    module = "phalanx.data.array_source" if kind is None else kind.module
    source: Source = importlib.import_module(module).make_source(request)
    return source


def unsupported_input_error(request: InputRequest) -> TypeError:
    """The error for an input of no known kind."""
    x = request.x
    advice = ""
    if hasattr(x, "__next__"):
        advice = " An iterator that is no generator can be wrapped in one: `(batch for batch in iterator)`."
    elif isinstance(x, (list, tuple)) and x and isinstance(x[0], (int, float, list)):
        advice = " Convert lists of numbers with `numpy.array(x)`: a list means several inputs."
    else:
        for name, value in (("y", request.y), ("sample_weight", request.sample_weight)):
            if value is not None and not hasattr(value, "__array__"):
                advice = f" Or `{name}` is not an array: it is {_type_name(value)}."
                break
    return TypeError(f"The input x is {_type_name(x)}. Accepted are {ACCEPTED}.{advice}")


def _check_dataset_arguments(kind: SourceKind, request: InputRequest) -> None:
    for name, meaning, value in (
        ("y", "the targets", request.y),
        ("sample_weight", "the sample weights", request.sample_weight),
        ("batch_size", "the batches", request.batch_size),
    ):
        if value is not None:
            raise ConfigurationError(
                f"When providing `x` as a {kind.name}, `{name}` should not be passed. Instead, {meaning} should "
                f"be included as part of the {kind.name}."
                + (" Its batch is the global batch, over all replicas." if name == "batch_size" else "")
            )
    if request.class_weight is not None and not kind.takes_class_weight:
        raise ConfigurationError(
            f"Argument `class_weight` is not supported for {kind.name} inputs. Let the batches be "
            f"(x, y, sample_weight) instead. Received: class_weight={request.class_weight}"
        )


def _type_name(x: Any) -> str:
    cls = type(x)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
