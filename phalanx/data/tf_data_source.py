"""`tf.data.Dataset`, on every backend: divided by files or by rows, with TensorFlow's own rewrites.

Imported only when an input is a tf.data.Dataset, so TensorFlow is already loaded. Only this file uses private APIs of
TensorFlow (tested with 2.21): `_AutoShardDataset`, inference of the batch size, and serialized graphs of datasets.
"""

from __future__ import annotations

import itertools
import logging
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops.options import ExternalStatePolicy
from tensorflow.python.eager import context
from tensorflow.python.framework import config, op_def_registry

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.data.dataset_elements import to_numpy
from phalanx.data.input_request import TWO_WEIGHTS, InputRequest
from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.source import SourceTraits, StreamSource
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters

_log = logging.getLogger(__name__)

_KIND = "tf.data.Dataset"

RESEED_LIMIT_BYTES = 1 << 30
"""Largest in-memory data for which a dataset is serialized to seed its shuffles: protobuf is limited to 2 GiB, and
intermediate copies take about five times the size of the data."""

_RANDOM_OP_PREFIXES = (
    *("Random", "ParameterizedTruncatedNormal", "TruncatedNormal", "Multinomial"),
    *("Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulRandom"),
)
"""Prefixes of operations that draw from random generators of TensorFlow."""
_ASSIGN_OP_PREFIX = "Assign"
"""Prefix of operations that may write the seed of a Keras layer."""

_LARGE_CONSTANT_BYTES = 1 << 16
_READ_AHEAD = 2
_MAX_NAMES = 3  # file names shown for each rank in an explanation


def make_source(request: InputRequest) -> StreamSource:
    """Create the source of a batched tf.data.Dataset whose batch is the global batch.

    DATA: all ranks read the same elements in the same order. To this end, unseeded shuffles get a seed derived from the
        seed of the request, and parallel maps keep their order, unless the dataset itself says otherwise.
    FILE, HINT: as in `tf.distribute`, the dataset is rebatched to this rank's share of the global batch, and its files,
        or the dataset at the hint, are divided over the ranks.
    OFF: the dataset is only rebatched: each rank reads all elements.

    Raises: ConfigurationError if the elements are not batches, or for FILE without files or with fewer files
        than ranks.
    """
    dataset, world_size = request.x, request.world_size
    _check_batches(dataset.element_spec)
    policy = AutoShardPolicy(int(dataset.options().experimental_distribute.auto_shard_policy))
    files = _source_files(dataset) if policy is AutoShardPolicy.FILE else None
    if request.class_weight is not None:
        _check_class_weight(dataset.element_spec)
        dataset = dataset.map(data_adapters.tf_class_weights(request.class_weight))
    sharded, policy, reason = _divide(dataset, policy, files, request)
    read_ahead = sharded if policy is AutoShardPolicy.OFF else sharded.prefetch(_READ_AHEAD)
    cardinality = int(sharded.cardinality())
    # Sharding by files hides that a dataset repeats; a hint looks like endless data until it is replaced.
    counted = sharded if policy is AutoShardPolicy.HINT else dataset
    by_rows = policy is AutoShardPolicy.DATA
    length = cardinality if cardinality >= 0 and (by_rows or policy is AutoShardPolicy.OFF) else None
    names = zlib.crc32("\n".join(files).encode()) if files else 0
    traits = SourceTraits(
        _KIND,
        signature=f"{_KIND} of {length} batches of {dataset.element_spec}, files {names:08x}",
        reason=reason,
        policy=policy,
        is_uniform=by_rows and length is not None,
        is_endless=int(counted.cardinality()) == tf.data.INFINITE_CARDINALITY,
        is_compared=by_rows,
        is_read_by_all_ranks=by_rows,
        fixed_size=_fixed_size(dataset.element_spec),
        describe_share=None if by_rows else partial(_describe_share, policy, files, world_size),
    )
    counter = _iterator_counter(request, sharded, length)

    # `dataset` is kept alive, because the functions that a serialized graph calls live only as long.
    def open_pass(key: int, original: Any = dataset) -> Iterator[Any]:
        for number, element in enumerate(_elements(read_ahead, counter), 1):
            if number == length and counter.opened_per_pass > 1:
                counter.iterate(read_ahead)
            yield element

    source = StreamSource(
        open_pass,
        traits,
        request,
        open_first=lambda: _elements(_without_read_ahead(sharded), counter),
        num_batches=length,
        copies=False,
    )
    source.cursor.pass_counter = counter
    return source


def _describe_share(policy: AutoShardPolicy, files: list[str] | None, divided_by: int, rank: int, _: int) -> str:
    """Describe what a rank reads of files divided over `divided_by` ranks; see `SourceTraits`."""
    if policy is AutoShardPolicy.FILE and files is not None:
        return _name_files(files[rank::divided_by])
    if policy is AutoShardPolicy.OFF:
        return "reads every element of its dataset"
    return f"reads shard {rank} of what names SHARD_HINT, else every element"


def _check_batches(element_spec: Any) -> None:
    """Raise ConfigurationError if the elements are not batches."""
    ranks = [shape.rank for spec in leaves(element_spec) if (shape := getattr(spec, "shape", None)) is not None]
    if 0 in ranks:
        beside = any(ranks) and (
            " If they are batches, with a number beside them, give each sample that number: `tf.repeat(number, "
            "tf.shape(x)[0])`."
        )
        raise ConfigurationError(
            f"The elements of the tf.data.Dataset are no batches: they are {element_spec}. Call `.batch(batch_size)` "
            f"on it; batch_size is the global batch size, over all replicas.{beside or ''}"
        )


def _fixed_size(element_spec: Any) -> int | None:
    """The size of every batch, if the dataset declares it."""
    shapes = [shape for spec in leaves(element_spec) if (shape := getattr(spec, "shape", None)) is not None]
    return shapes[0][0] if shapes and shapes[0].rank else None


def _divide(
    dataset: Any,
    policy: AutoShardPolicy,
    files: list[str] | None,
    request: InputRequest,
) -> tuple[Any, AutoShardPolicy, str]:
    """Return the dataset as this rank reads it, the policy in effect and its reason."""
    rank, world_size = request.rank, request.world_size
    if policy is AutoShardPolicy.OFF:
        return _rebatched(dataset, rank, world_size), policy, "the dataset's options or the caller say OFF"
    if policy is AutoShardPolicy.HINT:
        sharded = _auto_sharded(dataset, policy, rank, world_size)
        return sharded, policy, "the dataset's options say HINT"
    if policy is AutoShardPolicy.FILE:
        return _by_files(dataset, files, rank, world_size), policy, f"it reads {len(files or ())} files"
    if policy is AutoShardPolicy.DATA:
        reason = "the dataset's options or the caller say DATA"
    else:
        reason = "so its batches are those of one process"
    return _with_equal_order(dataset, request.seed, _is_shared(request)), AutoShardPolicy.DATA, reason


def _is_shared(request: InputRequest) -> bool:
    """Whether other processes read the same data."""
    return request.world_size > 1 or request.is_read_by_all


def _by_files(dataset: Any, files: list[str] | None, rank: int, world_size: int) -> Any:
    """The dataset with only this rank's files. Raises: ConfigurationError if they cannot be divided."""
    if files is None:
        raise ConfigurationError(_FILE_ERROR.format("its source is not a list of files"))
    if len(files) < world_size:
        raise ConfigurationError(
            _FILE_ERROR.format(f"it reads {len(files)} files, fewer than the {world_size} replicas")
        )
    try:
        return _auto_sharded(dataset, AutoShardPolicy.FILE, rank, world_size)
    except tf.errors.NotFoundError as error:
        raise ConfigurationError(_FILE_ERROR.format("TensorFlow finds no file reader in it")) from error


_FILE_ERROR = (
    "AutoShardPolicy.FILE needs a dataset that reads at least one file for each replica (TFRecordDataset, "
    "TextLineDataset, list_files with interleave, ...), but {}. Use AutoShardPolicy.DATA, or write the data "
    "to more files."
)


def _rebatched(dataset: Any, rank: int, world_size: int) -> Any:
    """Rebatch the dataset to this rank's share of the global batch, as `tf.distribute` does.

    The batch sizes of a rank alternate, so that those of all ranks in one step add up to the global batch: batches of 7
    on 2 ranks are read as 4, 3, 4, 3, ... by rank 0 and as 3, 4, 3, 4, ... by rank 1. If TensorFlow cannot infer the
    global batch size, each batch is split into `world_size` parts in turn.
    """
    if world_size == 1:
        return dataset
    batch_size = distribute.compute_batch_size(dataset)
    if int(batch_size) == -1:
        return distribute._LegacyRebatchDataset(dataset, world_size)
    return dataset.rebatch(distribute.batch_sizes_for_worker(batch_size, world_size, 1, rank))


def _auto_sharded(dataset: Any, policy: AutoShardPolicy, rank: int, world_size: int) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy(int(policy))
    rebatched = _rebatched(dataset, rank, world_size).with_options(options)
    return distribute._AutoShardDataset(rebatched, world_size, rank, world_size)


def _with_equal_order(dataset: Any, seed: int, is_shared: bool) -> Any:
    """The dataset with its elements in the same order on every rank, where possible."""
    if is_shared:
        if _has_unseeded_shuffle(dataset) and _bytes_in_memory(dataset) <= RESEED_LIMIT_BYTES:
            dataset = _reseeded(dataset, seed)
        options = tf.data.Options()
        options.deterministic = True
        dataset = dataset.with_options(options)
    return dataset


def _without_read_ahead(dataset: Any) -> Any:
    """The dataset without threads that read ahead: in `shuffle(seed=1).repeat()`, they may start a second shuffle,
    which consumes random numbers, either before or after another iterator starts its first."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


class IteratorCounter:
    """Counts the iterators created over a dataset, including those of earlier calls: a shuffle chooses a different
    order for each, which follows from its seed and the number of iterators.

    Args:
        dataset: The dataset from which all iterated datasets are derived.
        opened_per_pass: Number of iterators that a whole pass opens: Keras may open another one at its end.
        in_order: Whether iterators draw random numbers in order; see `_drawing_in_order`.
    """

    _counts: ClassVar[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()

    def __init__(self, dataset: Any, opened_per_pass: int, *, in_order: bool) -> None:
        self.opened_per_pass = opened_per_pass
        self._dataset = dataset
        self._in_order = in_order

    @property
    def count(self) -> int:
        return self._counts.get(self._dataset, 0)

    def iterate(self, dataset: Any) -> Iterator[Any]:
        """Create an iterator over a dataset derived from this one."""
        self._counts[self._dataset] = self.count + 1
        with _drawing_in_order(on=self._in_order), tf.device("CPU:0"):  # host memory, even if there are GPUs
            iterator: Iterator[Any] = iter(dataset)
            return iterator

    def skip_to(self, count: int) -> None:
        """Open iterators, without reading them, until `count` have been opened."""
        while self.count < count:
            self.iterate(self._dataset)


def _iterator_counter(request: InputRequest, sharded: Any, length: int | None) -> IteratorCounter:
    """The iterators over what was derived from the request's dataset, of this length."""
    opens_another = length is not None and request.steps_per_epoch is None and request.opens_as_keras
    opened_per_pass = 2 if opens_another and data_adapters.opens_extra_iterator("tensorflow") else 1
    is_inside = any(part is request.x for part in _with_inputs(sharded))
    in_order = _is_shared(request) and _draws_in_threads(sharded)
    return IteratorCounter(request.x if is_inside else sharded, opened_per_pass, in_order=in_order)


@contextmanager
def _drawing_in_order(*, on: bool) -> Iterator[None]:
    """Make iterators that are created inside draw random numbers in the order of the elements.

    In `map(augment, num_parallel_calls=AUTOTUNE)`, threads race for random numbers, so each rank would read different
    data. With op determinism, TensorFlow splits such a map into drawing the random numbers, in one thread, and the
    rest. It does the same to maps that call Python, so this is not suitable for all datasets.
    """
    if not on or config.is_op_determinism_enabled():
        yield
        return
    config.enable_op_determinism()
    try:
        yield
    finally:
        config.disable_op_determinism()


def _draws_in_threads(dataset: Any) -> bool:
    """Whether threads race for seeded random numbers: without a seed, processes draw different numbers anyway, and
    TensorFlow refuses to draw in order."""
    operations = _operations_in_threads(dataset)
    if any(name.startswith(_RANDOM_OP_PREFIXES) for name in operations):
        return context.global_seed() is not None
    return any(name.startswith(_ASSIGN_OP_PREFIX) for name in operations)


def _operations_in_threads(dataset: Any) -> set[str]:
    """The stateful operations in the functions that a dataset calls in several threads."""
    found: set[str] = set()
    for part in _with_inputs(dataset):
        if "Parallel" in type(part).__name__ and hasattr(part, "_map_func"):
            graph = part._map_func.function.graph.as_graph_def()
            bodies = [graph.node, *(function.node_def for function in graph.library.function)]
            found |= {node.op for node in itertools.chain.from_iterable(bodies)}
    known = {name: op_def_registry.get(name) for name in found}
    return {name for name, definition in known.items() if definition is not None and definition.is_stateful}


def _elements(dataset: Any, counter: IteratorCounter) -> Iterator[Any]:
    already_exists = tf.errors.AlreadyExistsError  # the module may be gone when the interpreter closes the generator
    try:
        for element in counter.iterate(dataset):
            yield map_leaves(to_numpy, element)
    except already_exists as error:
        raise ConfigurationError(
            f"Two replicas on one host write the same file of Dataset.cache(filename): {error.message} Put the rank "
            f"into the name, cache(f'{{path}}-{{strategy.rank}}'), or cache in memory, cache(). Remove the lockfile."
        ) from error


def _with_inputs(dataset: Any) -> Iterator[Any]:
    """The dataset and all its input datasets."""
    yield dataset
    for part in dataset._inputs():
        yield from _with_inputs(part)


def _source_files(dataset: Any) -> list[str] | None:
    """The files that a dataset reads, in its order, if its source is a list of them; of several sources (`zip`), the
    shortest list. Only TensorFlow's rewrite knows whether they are read as files."""
    lists = []
    for part in _with_inputs(dataset):
        names = getattr(part, "_filenames", None)
        if isinstance(names, tf.data.Dataset):
            lists.append(names)
        elif not part._inputs() and not any(names is known for known in lists):
            spec = part.element_spec
            if not isinstance(spec, tf.TensorSpec) or spec.dtype != tf.string or spec.shape.rank != 0:
                return None
            if int(part.cardinality()) < 0:
                return None
            lists.append(part)
    names_of = [[name.decode(errors="replace") for name in part.as_numpy_iterator()] for part in lists]
    return min(names_of, key=len) if names_of else None


def _name_files(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    rest = f", ... ({len(names)} files)" if len(names) > _MAX_NAMES else ""
    return f"reads {shown}{rest}"


def _check_class_weight(element_spec: Any) -> None:
    if not isinstance(element_spec, tuple) or len(element_spec) < 2:
        raise ConfigurationError(f"`class_weight` needs elements (x, y); the dataset's are {element_spec}.")
    if len(element_spec) == 3:
        raise ConfigurationError(TWO_WEIGHTS)
    data_adapters.check_class_weight_targets(element_spec[1])


def _has_unseeded_shuffle(dataset: Any) -> bool:
    for part in _with_inputs(dataset):
        if hasattr(part, "_seed2") and not _seed_number(part._seed) and not _seed_number(part._seed2):
            return True
        for function in part._functions():
            operations = function.function.graph.get_operations()
            if any(operation.type.startswith("Shuffle") for operation in operations):
                return True
    return False


def _seed_number(seed: Any) -> int:
    return 0 if seed is None else int(seed)


def _bytes_in_memory(dataset: Any) -> int:
    tensors = (tensor for part in _with_inputs(dataset) for tensor in getattr(part, "_tensors", ()))
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors if tensor.dtype.size)


def _reseeded(dataset: Any, seed: int) -> Any:
    """The dataset with a seed, derived from `seed`, for each unseeded shuffle.

    An unseeded shuffle draws a different order on each rank, and cutting different global batches would use some
    samples twice and others never: a well-known trap of sharding by data. So the dataset is serialized as a graph, as
    `tf.distribute` does to copy a dataset to other devices, the seeds are set in the graph, and the dataset is rebuilt
    from it. Seeded shuffles keep their seeds.

    Returns: the dataset unchanged if TensorFlow cannot serialize it; the ranks' fingerprints then detect a difference.
    """
    try:
        serialized = dataset._as_serialized_graph(external_state_policy=ExternalStatePolicy.IGNORE)
        graph = graph_pb2.GraphDef.FromString(serialized.numpy())
        _seed_shuffles(graph, seed)
        variant = _dataset_of_graph(graph)
    except (tf.errors.OpError, ValueError) as error:
        _log.info("A shuffle without a seed is left as it is, for its dataset cannot be copied: %s", error)
        return dataset
    return dataset_ops._VariantDataset(variant, dataset.element_spec)


def _seed_shuffles(graph: Any, seed: int) -> None:
    """Set the seeds of a dataset's graph, in place."""
    seeds = iter(np.random.SeedSequence([seed, 0x5EED]).generate_state(256).tolist())

    def seed_shuffles(nodes: Any) -> None:
        constants = {node.name: node for node in nodes if node.op == "Const"}
        for node in [node for node in nodes if node.op.startswith("ShuffleDataset")]:
            # Inputs: dataset, buffer size, seed, seed2[, seed generator]. In a function "name:output:0".
            pair = [constants.get(name.split(":")[0]) for name in node.input[2:4]]
            if any(constant is None or _constant_value(constant) for constant in pair):
                continue
            for position in (2, 3):
                suffix = ":output:0" if ":" in node.input[position] else ""
                fresh = node_def_pb2.NodeDef(name=f"{node.name}/phalanx_seed{position}", op="Const")
                value = tf.make_tensor_proto(next(seeds, position) | 1, tf.int64)  # odd: two zeros mean no seed
                fresh.attr["value"].tensor.CopyFrom(value)
                fresh.attr["dtype"].type = tf.int64.as_datatype_enum
                nodes.append(fresh)
                node.input[position] = fresh.name + suffix
            if len(node.input) > 4 and node.op == "ShuffleDatasetV3" and ":" not in node.input[4]:
                # Remove the handle of the old seed generator; TensorFlow then creates one from the seeds.
                nodes.append(node_def_pb2.NodeDef(name=f"{node.name}/phalanx_generator", op="DummySeedGenerator"))
                node.input[4] = nodes[-1].name

    seed_shuffles(graph.node)
    for function in graph.library.function:
        seed_shuffles(function.node_def)
    _rename_functions(graph, f"_phalanx_{seed}")


def _rename_functions(graph: Any, suffix: str) -> None:
    """Append `suffix` to the names of a graph's functions, in place.

    TensorFlow holds functions without these seeds under the old names, and would use them.
    """
    names = {function.signature.name for function in graph.library.function}
    for function in graph.library.function:
        function.signature.name += suffix
    bodies = [function.node_def for function in graph.library.function]
    for node in itertools.chain(graph.node, *bodies):
        if node.op in names:
            node.op += suffix
        for value in node.attr.values():
            for called in (value.func, *value.list.func):
                if called.name in names:
                    called.name += suffix


def _dataset_of_graph(graph: Any) -> Any:
    """The dataset that a graph creates.

    Large constants, which are data in memory, are passed as tensors: compiling them into the graph takes seconds for a
    hundred megabytes.
    """
    rest = graph_pb2.GraphDef(library=graph.library, versions=graph.versions)
    large: dict[str, Any] = {}
    result = ""
    for node in graph.node:
        if node.op == "_Retval":  # its input is the dataset
            result = node.input[0]
        elif node.op == "Const" and node.ByteSize() > _LARGE_CONSTANT_BYTES:
            large[node.name] = _constant(node.attr["value"].tensor)
        else:
            rest.node.append(node)

    def make(*tensors: Any) -> Any:
        given = dict(zip(large, tensors, strict=True))
        return tf.graph_util.import_graph_def(rest, input_map=given, return_elements=[f"{result}:0"], name="")[0]

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in large.values()]
    with tf.device("CPU:0"):
        return tf.compat.v1.wrap_function(make, specs)(*large.values())


def _constant(proto: Any) -> Any:
    with tf.device("CPU:0"):
        return tf.io.parse_tensor(proto.SerializeToString(), tf.as_dtype(proto.dtype))


def _constant_value(node: Any) -> int:
    return int(tf.make_ndarray(node.attr["value"].tensor))
