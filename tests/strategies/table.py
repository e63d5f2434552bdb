"""What a rank checks of the strategy interface; run by `tests.training.worker`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import phalanx
from phalanx import ReduceOp
from phalanx.keras_compat import trainer_hook
from phalanx.strategies.strategy import Strategy
from phalanx.training import model_dispatch
from tests.support.seeds import set_random_seed
from tests.training.scenarios.common import FEATURES, classifier, features, labels, numbers, regressor
from tests.training.scenarios.registry import BACKENDS, ONE_BACKEND, Setting, Table

SCENARIOS = Table(quick=BACKENDS)
scenario = SCENARIOS.scenario


def host(value: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: np.asarray(keras.ops.convert_to_numpy(leaf)), value)


def tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(np.asarray(value))


@scenario(plain=False, quick=ONE_BACKEND)
def contexts(setting: Setting) -> dict[str, Any]:
    """What `get_strategy`, `has_strategy` and `get_replica_context` say at each place, as in `tf.distribute`."""
    strategy = setting.strategy
    assert not phalanx.has_strategy()
    assert not phalanx.in_cross_replica_context()
    default = phalanx.get_strategy()
    assert type(default).__name__ == "DefaultStrategy"
    assert default.num_replicas_in_sync == 1
    assert phalanx.get_replica_context().num_replicas_in_sync == 1
    with strategy.scope() as entered:
        assert entered is strategy
        assert phalanx.get_strategy() is strategy
        assert phalanx.has_strategy()
        assert phalanx.in_cross_replica_context()
        assert phalanx.get_replica_context() is None
        with strategy.scope():
            assert phalanx.get_strategy() is strategy
        assert phalanx.get_strategy() is strategy
        with phalanx.OneDeviceStrategy().scope() as inner:
            assert phalanx.get_strategy() is inner
            assert phalanx.get_strategy().num_replicas_in_sync == 1

    def replica(number: int, *, word: str) -> str:
        context = phalanx.get_replica_context()
        assert context.replica_id_in_sync_group == setting.rank
        assert context.num_replicas_in_sync == setting.world_size
        assert context.strategy is strategy is phalanx.get_strategy()
        assert len(context.devices) == 1
        assert phalanx.has_strategy()
        assert not phalanx.in_cross_replica_context()

        def across(given: Strategy, value: int, plus: int = 0) -> int:
            assert given is strategy
            assert phalanx.get_replica_context() is None
            assert phalanx.in_cross_replica_context()
            return value + plus

        assert context.merge_call(across, args=(1,), kwargs={"plus": 2}) == 3
        assert phalanx.get_replica_context() is not None
        return f"{word} {number}"

    assert strategy.run(replica, args=(7,), kwargs={"word": "seven"}) == "seven 7"
    with strategy.scope():
        assert strategy.run(replica, (8,), {"word": "eight"}) == "eight 8"
        assert phalanx.get_replica_context() is None
    assert not phalanx.has_strategy()
    return {}


@scenario(plain=False, quick=ONE_BACKEND)
def contexts_are_left_when_something_raises(setting: Setting) -> dict[str, Any]:
    def fail() -> None:
        raise KeyError("on purpose")

    for enter in (lambda: setting.strategy.run(fail), lambda: _raise_in_scope(setting.strategy)):
        with contextlib.suppress(KeyError):
            enter()
        assert not phalanx.has_strategy()
        assert phalanx.get_replica_context().num_replicas_in_sync == 1
    return {}


def _raise_in_scope(strategy: Any) -> None:
    with strategy.scope():
        raise KeyError("on purpose")


@scenario(plain=False, quick=ONE_BACKEND)
def properties(setting: Setting) -> dict[str, Any]:
    strategy = setting.strategy
    assert strategy.num_replicas_in_sync == setting.world_size
    assert strategy.is_chief == (strategy.rank == 0)
    assert strategy.cluster_resolver.task_type == "worker"
    assert strategy.cluster_resolver.task_id == strategy.rank
    assert f"replica {strategy.rank} of {setting.world_size}" in repr(strategy)
    assert phalanx.MultiWorkerMirroredStrategy().rank == strategy.rank, "a second strategy shares the job"
    assert phalanx.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync == setting.world_size
    return {}


@scenario(plain=False)
def reduce_elementwise(setting: Setting) -> dict[str, Any]:
    reduce, rank, world = setting.strategy.reduce, setting.rank, setting.world_size
    ranks = np.arange(world)
    value = tensor(np.array([1.0, 2.0], "float32") * (rank + 1))
    total = float((ranks + 1).sum())
    merged = reduce(ReduceOp.SUM, value)
    assert keras.ops.is_tensor(merged)
    np.testing.assert_allclose(host(merged), [total, 2 * total])
    np.testing.assert_allclose(host(reduce("MEAN", value)), [total / world, 2 * total / world], rtol=1e-6)
    np.testing.assert_allclose(host(reduce("sum", value, axis=None)), [total, 2 * total])
    np.testing.assert_array_equal(host(reduce("MAX", value)), [world, 2 * world])
    np.testing.assert_array_equal(host(reduce("MIN", value)), [1, 2])
    nested = {"a": value, "b": (tensor(np.int32(rank)), np.float32(rank), rank)}
    merged = host(reduce("SUM", nested))
    assert merged["b"][0] == merged["b"][1] == merged["b"][2] == ranks.sum()
    assert merged["b"][0].dtype == np.int32
    assert merged["b"][1].shape == ()
    np.testing.assert_allclose(merged["a"], [total, 2 * total])
    return {"merged": merged}


@scenario(plain=False, needs=("tensorflow",), quick=("tensorflow",))
def reduce_op_of_tensorflow(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    merged = setting.strategy.reduce(tf.distribute.ReduceOp.SUM, tensor(np.float32(1)), axis=None)
    assert float(host(merged)) == setting.world_size
    return {}


@scenario(plain=False)
def reduce_along_an_axis_of_uneven_lengths(setting: Setting) -> dict[str, Any]:
    """A mean counts every element once, however many each replica holds; one holds none."""
    parts = [np.arange(6, dtype="float32").reshape(3, 2), np.zeros((0, 2), "float32"), np.full((2, 2), 9, "float32")]
    everything = np.concatenate(parts[: setting.world_size])
    own = tensor(parts[setting.rank])
    for op, expected in (("MEAN", everything.mean(axis=0)), ("SUM", everything.sum(axis=0))):
        np.testing.assert_allclose(host(setting.strategy.reduce(op, own, axis=0)), expected, rtol=1e-6)
    square = tensor(np.ones((2, setting.rank + 1), "float32") * setting.rank)
    lengths = np.arange(1, setting.world_size + 1)
    mean = (lengths * np.arange(setting.world_size)).sum() / lengths.sum()
    np.testing.assert_allclose(host(setting.strategy.reduce("MEAN", square, axis=1)), [mean, mean], rtol=1e-6)
    np.testing.assert_allclose(host(setting.strategy.reduce("MEAN", square, axis=(0, -1))), mean, rtol=1e-6)
    return {}


@scenario(plain=False, quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("ConfigurationError", "SUM, MEAN")))
def reduce_by_an_unknown_operation(setting: Setting) -> dict[str, Any]:
    setting.strategy.reduce("MEDIAN", tensor(1.0))
    return {}


@scenario(plain=False)
def gather_uneven_parts(setting: Setting) -> dict[str, Any]:
    strategy, rank, world = setting.strategy, setting.rank, setting.world_size
    own = np.full((rank + 1, 2), rank, "int32")
    expected = np.concatenate([np.full((r + 1, 2), r) for r in range(world)])
    np.testing.assert_array_equal(host(strategy.gather(tensor(own), axis=0)), expected)
    np.testing.assert_array_equal(host(strategy.gather(tensor(own.T.copy()), axis=1)), expected.T)
    context_value = strategy.run(lambda: phalanx.get_replica_context().all_gather(tensor(own), axis=0))
    np.testing.assert_array_equal(host(context_value), expected)
    both = host(strategy.gather({"a": tensor(own), "b": tensor(own[:1])}, axis=0))
    np.testing.assert_array_equal(both["b"][:, 0], np.arange(world))
    return {}


@scenario(plain=False, backends=("tensorflow",), quick=("tensorflow",))
def gather_strings(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    gathered = setting.strategy.gather(tf.constant([["name", "ü" * (setting.rank + 1)]]), axis=0)
    assert gathered.numpy().tolist() == [[b"name", ("ü" * (rank + 1)).encode()] for rank in range(setting.world_size)]
    return {}


@scenario(plain=False, quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("ConfigurationError", "no axis")))
def gather_of_a_scalar(setting: Setting) -> dict[str, Any]:
    setting.strategy.gather(tensor(1.0), axis=0)
    return {}


@scenario(plain=False, quick=ONE_BACKEND)
def values_of_replicas(setting: Setting) -> dict[str, Any]:
    strategy = setting.strategy

    def value(context: Any) -> Any:
        assert context.num_replicas_in_sync == setting.world_size
        return tensor(np.float32(context.replica_id_in_sync_group))

    own = strategy.experimental_distribute_values_from_function(value)
    results = strategy.experimental_local_results(own)
    assert len(results) == 1
    assert float(host(results[0])) == setting.rank
    doubled = strategy.run(lambda v: 2 * v, args=(own,))
    assert float(host(strategy.reduce("SUM", doubled, axis=None))) == setting.world_size * (setting.world_size - 1)
    return {}


class Pages(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = slice(5 * index, 5 * index + (5 if index < 2 else 1))
        return features(11)[rows], labels(11)[rows]


@scenario(plain=False, quick=ONE_BACKEND)
def dataset_cut_among_replicas(setting: Setting) -> dict[str, Any]:
    """The parts of all ranks, put together in rank order, are the global batches, also the one that is too small."""
    data = setting.strategy.experimental_distribute_dataset(Pages())
    for _ in range(2):
        seen = []
        for x, y in data:
            assert keras.ops.is_tensor(x)
            seen.append(host((x, y)))
        assert len(seen) == 3, "also where a part is empty, or the replicas would lose step"
        for index, own in enumerate(seen):
            x, y = host(setting.strategy.gather((tensor(own[0]), tensor(own[1])), axis=0))
            np.testing.assert_array_equal(x, Pages()[index][0])
            np.testing.assert_array_equal(y, Pages()[index][1])
    return {}


@scenario(plain=False, quick=ONE_BACKEND)
def datasets_of_each_replica(setting: Setting) -> dict[str, Any]:
    def make(context: phalanx.InputContext) -> Any:
        assert context.num_input_pipelines == setting.world_size
        assert context.input_pipeline_id == setting.rank
        assert context.get_per_replica_batch_size(6 * setting.world_size) == 6

        class Own(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> Any:
                return np.full((2, 1), 10 * setting.rank + index, "float32"), np.zeros((2,), "float32")

        return Own()

    seen = [host(x)[:, 0].tolist() for x, _ in setting.strategy.distribute_datasets_from_function(make)]
    assert seen == [[10.0 * setting.rank] * 2, [10.0 * setting.rank + 1] * 2]
    return {}


@scenario(plain=False, quick=ONE_BACKEND)
def sharding_is_explained(setting: Setting) -> dict[str, Any]:
    text = setting.strategy.explain_sharding(features(), batch_size=16)
    for rank in range(setting.world_size):
        assert f"rank {rank}" in text, text
    return {"text": text}


def _train_own_data(rank: int) -> Any:
    """On data of this rank's own, without a scope."""
    set_random_seed(5)
    model = classifier()
    model.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        features(10 + rank, seed=rank), labels(10 + rank, seed=rank), epochs=2, batch_size=4, verbose=0
    ).history
    return history, model.get_weights()


@scenario(plain=False, quick=ONE_BACKEND)
def models_outside_scopes_are_kerass_own(setting: Setting) -> dict[str, Any]:
    """Each rank trains a model of its own on data of its own length: exactly the same with Phalanx's hook in place,
    after a scope was used, and with the hook taken out."""
    with setting.strategy.scope():
        inside = classifier()
    assert model_dispatch.member_of(inside) is not None
    history, weights = _train_own_data(setting.rank)
    model = classifier()
    assert model_dispatch.member_of(model) is None
    trainer_hook.uninstall()
    other_history, other_weights = _train_own_data(setting.rank)
    assert history == other_history
    for left, right in zip(weights, other_weights, strict=True):
        np.testing.assert_array_equal(left, right)
    return {}


def _methods() -> dict[str, Any]:
    names = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "compile")
    optimizers = {f"{o.__name__}.apply": o.apply for o in (keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer)}
    return {name: getattr(keras.Model, name) for name in names} | optimizers


@scenario(plain=False)
def the_hook_comes_out(setting: Setting) -> dict[str, Any]:
    trainer_hook.uninstall()
    before = _methods()
    with setting.strategy.scope():
        inside = _methods()
    assert all(inside[name] is not before[name] for name in before)
    trainer_hook.uninstall()
    assert _methods() == before
    trainer_hook.uninstall()
    assert _methods() == before
    return {}


@scenario(plain=False, quick=ONE_BACKEND)
def a_single_replica_is_plain_keras(setting: Setting) -> dict[str, Any]:
    """To the last bit, in the default strategy and in `OneDeviceStrategy`, whatever the job around."""
    trainer_hook.uninstall()
    expected = _train_own_data(0)
    one = phalanx.OneDeviceStrategy("/cpu:0")
    assert one.num_replicas_in_sync == 1
    assert one.local_devices == ("/cpu:0",)
    for strategy in (one, phalanx.get_strategy()):
        with strategy.scope():
            found = _train_own_data(0)
        assert found[0] == expected[0]
        for left, right in zip(found[1], expected[1], strict=True):
            np.testing.assert_array_equal(left, right)
        assert float(host(strategy.reduce("SUM", tensor(3.0), axis=None))) == 3.0
        assert strategy.run(lambda: phalanx.get_replica_context().num_replicas_in_sync) == 1
    return {}


@scenario(plain=False)
def reduced_structures_may_have_nothing_and_parts_may_be_empty(setting: Setting) -> dict[str, Any]:
    rank, world, strategy = setting.rank, setting.world_size, setting.strategy
    found = strategy.reduce("SUM", {"used": tensor(np.ones(2, "float32")), "unused": None}, axis=None)
    assert found["unused"] is None
    np.testing.assert_array_equal(host(found["used"]), [world, world])
    assert strategy.gather([None], axis=0) == [None]
    nothing, mean = strategy.reduce("MEAN", (None, tensor(np.array(2, "int32"))), axis=None)
    assert nothing is None
    assert float(host(mean)) == 2.0
    for kind in ("float32", "int32"):
        own = tensor(np.full((rank, 3), -5 - rank, kind))
        np.testing.assert_array_equal(host(strategy.reduce("MAX", own, axis=0)), [-6] * 3)
        np.testing.assert_array_equal(host(strategy.reduce("MIN", own, axis=0)), [-4 - world] * 3)
    flags = strategy.reduce("MAX", tensor(np.zeros((rank, 3), "bool")), axis=0)
    assert not host(flags).any()
    with pytest.raises(phalanx.ConfigurationError, match="with the comma"):
        strategy.run(lambda a, b: a, args=({"a": 1, "b": 2}))
    return {}


@scenario(plain=False, backends=("tensorflow",))
def a_merge_compiled_by_xla_is_refused(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    compiled = tf.function(lambda x: setting.strategy.reduce("SUM", x, axis=None), jit_compile=True)
    with pytest.raises(phalanx.UnsupportedError, match="cannot be compiled by XLA"):
        setting.strategy.run(compiled, args=(tf.ones(3),))
    return {}


@scenario(plain=False, backends=("tensorflow",))
def an_iterator_of_a_distributed_dataset(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    data = setting.strategy.experimental_distribute_dataset(tf.data.Dataset.range(12).batch(6))
    assert isinstance(data, tf.distribute.DistributedDataset)
    iterator = iter(data)
    assert isinstance(iterator, tf.distribute.DistributedIterator)
    assert iterator.element_spec == data.element_spec
    assert int(setting.strategy.reduce("SUM", tf.size(iterator.get_next()), axis=None)) == 6
    assert bool(iterator.get_next_as_optional().has_value())
    assert not bool(iterator.get_next_as_optional().has_value())
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    with pytest.raises(phalanx.UnsupportedError, match="was created inside"):
        tf.function(setting.strategy.distribute_datasets_from_function, autograph=False)(lambda _: data)
    return {}


@scenario(plain=False, backends=("tensorflow",))
def a_function_iterates_a_distributed_dataset(setting: Setting) -> dict[str, Any]:
    """Each call begins again with a dataset, and goes on with an iterator; one trace serves all iterators."""
    import tensorflow as tf

    strategy = setting.strategy
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(14).batch(6))
    everything = sum(range(14))

    @tf.function
    def total_of(dataset: Any) -> Any:
        total = tf.constant(0, tf.int64)
        for batch in dataset:
            total += strategy.reduce("SUM", tf.reduce_sum(batch), axis=None)
        return total

    assert [int(total_of(data)) for _ in range(2)] == [everything] * 2
    assert int(total_of(iter(data))) == everything

    @tf.function
    def following(iterator: Any) -> Any:
        return strategy.reduce("SUM", tf.reduce_sum(next(iterator)), axis=None)

    first, second = iter(data), iter(data)
    assert [int(following(each)) for each in (first, second, first, first)] == [15, 15, 51, 25]
    with pytest.raises(tf.errors.OutOfRangeError):
        following(first)
    assert following.experimental_get_tracing_count() == 1

    def own(context: phalanx.InputContext) -> Any:  # which end at different times
        return tf.data.Dataset.from_tensor_slices(tf.ones([3 + context.input_pipeline_id, 1])).batch(1)

    lengths = [3 + rank for rank in range(setting.world_size)]
    ones = strategy.distribute_datasets_from_function(own)

    @tf.function
    def count(dataset: Any) -> Any:
        found = tf.constant(0)
        for batch in dataset:
            found += strategy.reduce("SUM", tf.size(batch), axis=None)
        return found

    assert int(count(ones)) == sum(lengths)
    arrays = strategy.experimental_distribute_dataset((x,) for x in np.ones((2, 4), "float32"))
    with pytest.raises(phalanx.UnsupportedError, match="must know the dtypes"):
        tf.function(lambda: next(iter(arrays)), autograph=False)()  # which wraps errors
    return {}


@scenario(plain=False, backends=("tensorflow",))
def losses_of_tensorflow_count_replicas(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    def losses() -> tuple[Any, Any]:
        return tf.nn.compute_average_loss(tf.ones(4)), tf.nn.scale_regularization_loss(tf.constant([3.0]))

    expected = [1 / setting.world_size, 3 / setting.world_size]
    np.testing.assert_allclose(setting.strategy.run(losses), expected)
    np.testing.assert_allclose(setting.strategy.run(tf.function(losses)), expected)
    np.testing.assert_allclose(losses(), [1, 3])
    with setting.strategy.scope(), pytest.raises(RuntimeError, match="cross replica"):
        losses()
    return {}


@scenario(plain=False)
def metrics_of_a_custom_loop_are_the_jobs(setting: Setting) -> dict[str, Any]:
    """As in `tf.distribute`: each replica updates its own, and a result outside of `run` is of all."""
    strategy, rank, world = setting.strategy, setting.rank, setting.world_size
    with strategy.scope():
        mean, late = keras.metrics.Mean(), keras.metrics.F1Score(threshold=0.5)
        alone = keras.metrics.Mean()
    outside = keras.metrics.Mean()
    values = [np.full(1 + each, 1.0 + each, "float32") for each in range(world)]
    expected = float(np.mean(np.concatenate(values)))

    def update() -> Any:
        mean.update_state(tensor(values[rank]))
        outside.update_state(tensor(values[rank]))
        late.update_state(tensor(np.float32([[1], [0]])), tensor(np.float32([[1], [rank == 0]])))
        return mean.result()

    for _ in range(2):
        own = strategy.run(update)
        np.testing.assert_allclose(host(own), 1.0 + rank)
        np.testing.assert_allclose(host(mean.result()), expected, rtol=1e-6)
        np.testing.assert_allclose(host(late.result()), [2 * world / (2 * world + 1)], rtol=1e-6)
        np.testing.assert_allclose(host(outside.result()), 1.0 + rank)  # created outside of the scope
        mean.reset_state()
        late.reset_state()
        assert float(host(mean.result())) == 0
    strategy.run(update)
    for variable in mean.variables:  # as programs did it that were written when results were not merged
        variable.assign(strategy.reduce("SUM", variable))
    np.testing.assert_allclose(host(mean.result()), expected, rtol=1e-6)
    if rank == 0:  # what the chief alone counts, it reads alone
        alone.update_state(3.0)
        assert float(host(alone.result())) == 3
    assert "merged" in repr(mean.variables[0])
    return {"mean": host(mean.result())}


@scenario(plain=False, backends=("tensorflow",))
def metrics_in_functions_and_checkpoints(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    strategy, rank, world = setting.strategy, setting.rank, setting.world_size
    with strategy.scope():
        mean = keras.metrics.Mean()

    @tf.function
    def step(x: Any) -> Any:
        strategy.run(mean.update_state, args=(x,))
        return mean.result()

    everyones = np.mean(np.arange(world))
    np.testing.assert_allclose(step(tf.constant(float(rank))), everyones)
    np.testing.assert_allclose(step(tf.constant(float(rank))), everyones)
    np.testing.assert_allclose(mean.variables[1].numpy(), 2 * world)
    checkpoint = tf.train.Checkpoint(total=mean.variables[0], count=mean.variables[1])
    saved = checkpoint.write(f"{setting.folder}/mean.{rank}")
    np.testing.assert_allclose(_saved(saved, "count"), 2 * world)
    step(tf.constant(5.0))
    checkpoint.restore(saved)
    np.testing.assert_allclose(mean.variables[1].numpy(), 2 * world)
    np.testing.assert_allclose(step(tf.constant(float(rank))), everyones)
    np.testing.assert_allclose(mean.variables[1].numpy(), 3 * world)
    return {}


def _saved(path: str, name: str) -> Any:
    """A variable's value in a checkpoint of TensorFlow."""
    import tensorflow as tf

    return tf.train.load_checkpoint(path).get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")


def _merged(ranks: Any) -> dict[str, float]:
    """What the replicas' values come to by aggregation, if each has its rank + 1."""
    return {"sum": float((ranks + 1).sum()), "mean": float((ranks + 1).mean()), "only_first_replica": 1.0}


@scenario(plain=False)
def variables_of_a_custom_loop_are_the_jobs(setting: Setting) -> dict[str, Any]:
    """Written ones are merged as their aggregation says; those that are merged on read are each replica's in `run`."""
    strategy, rank = setting.strategy, setting.rank
    expected = _merged(np.arange(setting.world_size))
    make = lambda how, when: keras.Variable(0.0, trainable=False, aggregation=how, synchronization=when)  # noqa: E731
    with strategy.scope():
        written = {how: make(how, "auto") for how in expected}
        read = {how: make(how, "on_read") for how in expected}
        whole = keras.Variable(0, trainable=False, dtype="int32", aggregation="mean")
        optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([written["sum"]])

    def update() -> Any:
        for variable in (*written.values(), *read.values()):
            variable.assign_add(tensor(np.float32(rank + 1)))
        late = make("sum", "on_read") if not lates else lates[0]
        late.assign_add(tensor(np.float32(rank + 1)))
        lates.append(late)
        return read["sum"].value + 0

    lates: list[Any] = []
    for times in (1, 2):
        np.testing.assert_allclose(host(strategy.run(update)), times * (rank + 1))
        for how, value in expected.items():
            np.testing.assert_allclose(host(written[how]), times * value, err_msg=f"{how} written")
            np.testing.assert_allclose(host(read[how]), times * value, rtol=1e-6, err_msg=f"{how} read")
        np.testing.assert_allclose(host(lates[0]), times * expected["sum"])
    strategy.run(lambda: written["mean"].assign_sub(tensor(np.float32(rank + 1))))
    np.testing.assert_allclose(host(written["mean"]), expected["mean"])
    strategy.run(lambda: written["sum"].assign(tensor(np.float32(rank + 1))))
    np.testing.assert_allclose(host(written["sum"]), expected["sum"])
    if keras.backend.backend() != "jax":  # where `apply` in a function would merge nothing
        gradient = tensor(np.float32(rank + 1))
        strategy.run(lambda: optimizer.apply([gradient], [written["sum"]]))
        np.testing.assert_allclose(host(written["sum"]), expected["sum"] / 2)  # merged once, by the optimizer
        assert int(host(optimizer.iterations)) == 1
    for variable in (written["mean"], read["mean"], read["sum"]):
        variable.assign(7.0)
        assert float(host(variable)) == 7, "assigned outside, on all replicas"
    with pytest.raises(phalanx.errors.ConfigurationError, match="int32 with aggregation MEAN"):
        strategy.run(lambda: whole.assign(tensor(np.int32(rank))))
    return {"sum": host(written["sum"])}


@scenario(plain=False, quick=ONE_BACKEND)
def what_variables_have_before_run_uses_them_is_the_jobs(setting: Setting) -> dict[str, Any]:
    strategy, world = setting.strategy, setting.world_size
    with strategy.scope():
        early, late = (
            keras.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read") for _ in range(2)
        )
    for variable in (early, late):
        variable.assign(100.0)  # as a checkpoint is restored
        strategy.run(lambda counted: counted.assign_add(tensor(np.float32(1))), args=(variable,))
        assert float(host(variable)) == 100 + world
        variable.assign(variable)
        assert float(host(variable)) == 100 + world
    with strategy.scope():
        keras.Variable(0.0, aggregation="sum")
    assert not strategy._variables._pending, "a search of many models would fill the memory"
    return {"early": host(early)}


@scenario(plain=False, backends=("tensorflow",))
def variables_of_tensorflow_are_the_jobs(setting: Setting) -> dict[str, Any]:
    """As in `tf.distribute`, in eager code and in functions; without an aggregation all replicas must agree."""
    import tensorflow as tf

    strategy, rank = setting.strategy, setting.rank
    expected = _merged(np.arange(setting.world_size))
    on_read = tf.VariableSynchronization.ON_READ

    def made(how: str, **options: Any) -> Any:
        return tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation[how.upper()], **options)

    def loop() -> tuple[Callable[[], Any], Any, Any, Any]:
        with strategy.scope():
            written = {how: made(how) for how in (*expected, "none")}
            read = {how: made(how, synchronization=on_read) for how in (*expected, "none")}

        def update() -> Any:
            for variable in (*(written[how] for how in expected), *read.values()):
                variable.assign_add(rank + 1.0)
            written["none"].assign_add(1.0)  # the same on all
            return read["sum"] + 0.0

        def step() -> Any:
            own = strategy.run(update)
            return own, {how: read[how] + 0.0 for how in expected}

        return step, written, read, lambda: strategy.run(lambda: written["none"].assign(float(rank)))

    for compiled in (False, True):
        step, written, read, differ = loop()
        step = tf.function(step) if compiled else step
        for times in (1, 2):
            own, inside = step()
            np.testing.assert_allclose(own, times * (rank + 1))
            for how, value in expected.items():
                np.testing.assert_allclose(inside[how], times * value, rtol=1e-6)
                np.testing.assert_allclose(read[how].numpy(), times * value, rtol=1e-6)
                np.testing.assert_allclose(written[how].numpy(), times * value, rtol=1e-6)
        assert float(written["none"]) == 2
        checkpoint = tf.train.Checkpoint(written=written["sum"], **{how: read[how] for how in expected})
        saved = checkpoint.write(f"{setting.folder}/variables.{compiled}.{rank}")
        step()
        checkpoint.restore(saved)
        _, inside = step()
        for how, value in expected.items():
            np.testing.assert_allclose(_saved(saved, how), 2 * value, rtol=1e-6)
            np.testing.assert_allclose(inside[how], 3 * value, rtol=1e-6)
        assert _saved(saved, "written") == 2 * expected["sum"]

        def across(within: Any, variable: Any) -> Any:
            return within.extended.update(variable, lambda each, new: each.assign(new), args=(8.0,))

        merge_call = lambda variable: phalanx.get_replica_context().merge_call(across, args=(variable,))  # noqa: E731
        strategy.run(merge_call, args=(written["sum"],))
        assert float(written["sum"]) == 8, "what update assigns is merged already"
        for wrong in (differ, read["none"].numpy):
            if setting.world_size > 1:
                with pytest.raises(phalanx.errors.ConfigurationError, match="without an aggregation"):
                    wrong()
        for variable in (read["sum"], read["mean"], written["sum"]):
            variable.assign(7.0)
            variable.assign_sub(1.0)
            assert float(variable) == 6, "assigned outside, on all replicas"
        assert "merged" in repr(read["sum"])
        with pytest.raises(phalanx.UnsupportedError, match="scatter_add"):
            read["sum"].scatter_add(tf.IndexedSlices(1.0, 0))
    outside = tf.Variable(0.0)
    strategy.run(lambda: outside.assign(float(rank)))
    assert float(outside) == rank, "created outside of the scope, it is this process's"
    return {"sum": np.asarray(written["sum"])}


@scenario(plain=False, backends=("tensorflow",))
def variables_of_tensorflow_that_fit_would_not_merge_are_refused(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    class Counting(keras.Model):
        def __init__(self, seen: Any) -> None:
            super().__init__()
            self.dense, self.seen = keras.layers.Dense(1), seen

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            self.seen.assign_add(1.0)
            return super().train_step(data)

    with setting.strategy.scope():
        model = Counting(tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM, name="seen"))
        model.compile("sgd", "mse")
    with pytest.raises(phalanx.UnsupportedError, match=r"'seen:0' is to be merged .* step of fit"):
        model.fit(features(8), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    return {}


@scenario(plain=False)
def extended_serves_loops_of_a_programs_own(setting: Setting) -> dict[str, Any]:
    """`strategy.extended`, as an optimizer uses it that merges by itself."""
    strategy, rank, world = setting.strategy, setting.rank, setting.world_size
    extended = strategy.extended
    total = float((np.arange(world) + 1).sum())
    with strategy.scope():
        variable = keras.Variable(np.float32([1, 2]), trainable=False)
        summed = keras.Variable(0.0, trainable=False, aggregation="sum")
    outside = keras.Variable(0.0)
    assert extended.variable_created_in_scope(variable)
    assert not extended.variable_created_in_scope(outside)
    assert not phalanx.OneDeviceStrategy().extended.variable_created_in_scope(variable)

    def across(within: Any, value: Any) -> Any:
        own = within.extended
        one, other = own.batch_reduce_to("SUM", [(value, variable), (2 * value, variable)])
        own.update(summed, lambda each, added: each.assign_add(added), args=(one,))
        return own.reduce_to("MEAN", value, destinations=variable), other

    def replica(value: Any) -> Any:
        return phalanx.get_replica_context().merge_call(across, args=(value,))

    mean, doubled = extended.call_for_each_replica(replica, args=(tensor(np.float32(rank + 1)),))
    np.testing.assert_allclose(host(mean), total / world, rtol=1e-6)
    np.testing.assert_allclose(host(doubled), 2 * total)
    np.testing.assert_allclose(host(summed), total, err_msg="what update assigns is merged already")
    np.testing.assert_allclose(host(extended.broadcast_to(tensor(np.float32(rank)), variable)), 0)
    np.testing.assert_allclose(host(extended.read_var(variable)), [1, 2])
    assert extended.update_non_slot(variable, lambda x: x + 1, args=(1,)) == 2
    assert extended.worker_devices == extended.parameter_devices == extended.non_slot_devices([variable])
    assert extended.should_checkpoint == extended.should_save_summary == (rank == 0)
    assert extended.steps_per_run == 1
    with extended.colocate_vars_with(variable):
        pass
    with pytest.raises(phalanx.errors.ConfigurationError, match="scope"), extended.colocate_vars_with(outside):
        pass
    with pytest.raises(AttributeError, match=r"strategy\.run\(fn, args="):
        extended.experimental_run_steps_on_iterator  # noqa: B018
    return {"mean": host(mean)}


@scenario(plain=False)
def metrics_of_a_custom_loop_serve_fit_afterwards(setting: Setting) -> dict[str, Any]:
    strategy = setting.strategy
    set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        metric = keras.metrics.MeanAbsoluteError(name="error")
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[metric])
    x, y = features(12), np.arange(12, dtype="float32")
    strategy.run(lambda: metric.update_state(tensor(y[:4]), tensor(y[:4] + 1)))
    assert float(host(metric.result())) == 1
    metric.reset_state()
    history = model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0).history
    assert float(host(metric.count)) == len(x), "what fit leaves is no replica's part"
    predicted = model.predict(x, verbose=0)[:, 0]
    evaluated = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(evaluated[1], np.mean(np.abs(predicted - y)), rtol=1e-4)
    assert history["error"][0] > 0
    return {"history": history}


@scenario(plain=False, backends=("tensorflow",))
def tensors_decide_in_what_is_run(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    def step(x: Any) -> Any:  # AutoGraph must reach it through `run`
        if tf.reduce_sum(x) > 0:
            return 2 * x
        return x

    run = tf.function(lambda x: setting.strategy.run(step, args=(x,)))
    assert run(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]
    assert run(tf.constant([-1.0, -2.0])).numpy().tolist() == [-1.0, -2.0]
    return {}


@scenario(plain=False, backends=("tensorflow",))
def a_function_is_traced_apart_in_run_and_outside(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    strategy, rank = setting.strategy, setting.rank
    with strategy.scope():
        variable = keras.Variable(np.zeros(1, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def step(x: Any) -> Any:
        optimizer.apply_gradients([(tf.reshape(x, [1]), variable)])
        return phalanx.get_replica_context().all_reduce("SUM", x)

    def moved_by(call: Callable[[], Any]) -> list[float]:
        variable.assign([0.0])
        total = float(call())
        return [-float(variable.value[0]), total]

    x = tf.constant(float(rank + 1))
    everyones = [sum(range(1, setting.world_size + 1))] * 2
    inner, outer, late = tf.function(step), tf.function(lambda x: strategy.run(inner, args=(x,))), tf.function(step)
    assert moved_by(lambda: inner(x)) == [rank + 1] * 2
    assert moved_by(lambda: strategy.run(inner, args=(x,))) == everyones
    assert moved_by(lambda: outer(x)) == everyones
    assert moved_by(lambda: inner(x)) == [rank + 1] * 2
    assert moved_by(lambda: strategy.run(late, args=(x,))) == everyones
    assert moved_by(lambda: late(x)) == [rank + 1] * 2
    assert inner.experimental_get_tracing_count() == late.experimental_get_tracing_count() == 2
    return {}


@scenario(plain=False, quick=ONE_BACKEND)
def average_loss(setting: Setting) -> dict[str, Any]:
    losses, weights = tensor(np.array([1.0, 2.0, 3.0], "float32")), tensor(np.array([1.0, 0.5, 0.0], "float32"))
    assert float(host(phalanx.compute_average_loss(losses, global_batch_size=10))) == np.float32(0.6)
    assert float(host(phalanx.compute_average_loss(losses, weights, global_batch_size=4))) == 0.5
    with setting.strategy.scope():
        world = setting.world_size
        np.testing.assert_allclose(host(phalanx.compute_average_loss(losses)), 2.0 / world, rtol=1e-6)
        np.testing.assert_allclose(host(phalanx.scale_regularization_loss(tensor(6.0))), 6.0 / world, rtol=1e-6)
        words = tensor(np.array([[1.0, 2.0], [3.0, 4.0]], "float32"))
        two = tensor(np.array([1.0, 3.0], "float32"))
        for given, expected in (
            ((words,), 5.0),
            ((words, two), 12.0),
            ((words, keras.ops.expand_dims(two, 0)), 11.0),
            ((two, keras.ops.expand_dims(two, 1)), 5.0),
            ((words, 2.0), 10.0),
            ((words[:0],), 0.0),
        ):
            np.testing.assert_allclose(host(phalanx.compute_average_loss(*given)), expected / world, rtol=1e-6)
        with pytest.raises(phalanx.ConfigurationError, match="reduction=None"):
            phalanx.compute_average_loss(tensor(1.5))
    return {}


@scenario(plain=False, backends=("tensorflow",))
def all_reduce_is_differentiable_on_tensorflow(setting: Setting) -> dict[str, Any]:
    """y = sum over ranks of w_r * x_r; dy/dw_r of the sum of all ranks' losses is world_size * x_r."""
    import tensorflow as tf

    rank, world = setting.rank, setting.world_size
    weight = tf.Variable([1.0, 2.0])
    x = tf.constant([rank + 1.0, 1.0])

    def step() -> Any:
        context = phalanx.get_replica_context()
        with tf.GradientTape() as tape:
            total, count = context.all_reduce("SUM", [weight * x, tf.constant(1)])
            mean = context.all_reduce("MEAN", weight * x)
            loss = tf.reduce_sum(total) + tf.reduce_sum(mean) * tf.cast(count, tf.float32)
        return loss, tape.gradient(loss, weight)

    compiled = tf.function(lambda: setting.strategy.run(step))
    own = np.array([rank + 1.0, 1.0])
    totals = np.array([world * (world + 1) / 2, world])
    for run in (lambda: setting.strategy.run(step), compiled, compiled):
        loss, gradient = run()
        np.testing.assert_allclose(loss, 2 * (totals * [1.0, 2.0]).sum(), rtol=1e-6)
        np.testing.assert_allclose(gradient, 2 * world * own, rtol=1e-6)
    return {}


@scenario(plain=False, backends=("torch",))
def all_reduce_is_differentiable_on_torch(setting: Setting) -> dict[str, Any]:
    import torch

    rank, world = setting.rank, setting.world_size
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    x = torch.tensor([rank + 1.0, 1.0])

    def step() -> Any:
        context = phalanx.get_replica_context()
        total, count = context.all_reduce("SUM", [weight * x, torch.tensor(1)])
        mean = context.all_reduce("MEAN", weight * x)
        return total.sum() + mean.sum() * count

    loss = setting.strategy.run(step)
    loss.backward()
    totals = np.array([world * (world + 1) / 2, world])
    np.testing.assert_allclose(loss.item(), 2 * (totals * [1.0, 2.0]).sum(), rtol=1e-6)
    np.testing.assert_allclose(weight.grad.numpy(), 2 * world * x.numpy(), rtol=1e-6)
    return {}


@scenario(plain=False, backends=("tensorflow", "torch"))
def values_that_are_gathered_or_reduced_along_an_axis_are_differentiable(setting: Setting) -> dict[str, Any]:
    """Rank r has r + 1 columns, and its loss weighs the results r + 1 times."""
    rank, world = setting.rank, setting.world_size
    columns, factors = world * (world + 1) // 2, world * (world + 1) / 2
    weights = np.arange(2.0 * columns, dtype="float32").reshape(2, columns)
    rows = np.array([1.0, 2.0], "float32")
    first = rank * (rank + 1) // 2
    expected = factors * weights[:, first : first + rank + 1] + (factors / columns + world) * rows[:, None]

    def loss_of(value: Any) -> Any:
        context, strategy = phalanx.get_replica_context(), setting.strategy
        gathered, _ = context.all_gather([value, tensor(np.array([[rank], [rank]]))], axis=1)
        mean, total = strategy.reduce("MEAN", value, axis=1), strategy.reduce("SUM", value, axis=-1)
        assert len(gathered.shape) == 2
        assert tuple(mean.shape) == tuple(total.shape) == (2,)
        weighted = keras.ops.sum(gathered * tensor(weights)) + keras.ops.sum(mean * tensor(rows))
        return (rank + 1) * weighted + keras.ops.sum(total * tensor(rows))

    for gradient_of in _gradients(loss_of):
        found = setting.strategy.run(gradient_of, args=(np.ones((2, rank + 1), "float32"),))
        np.testing.assert_allclose(host(found), expected, rtol=1e-6)
    return {}


@scenario(plain=False, backends=("tensorflow", "torch"))
def what_flows_back_is_differentiable(setting: Setting) -> dict[str, Any]:
    """With s = sum over ranks of x^3 and the loss s^2 / 2 on each, the gradient of x is 3 x^2 size s; of the sum of
    these over the ranks, it is 6 x size s + 3 x^2 size (sum over ranks of 3 x^2)."""
    own, size = setting.rank + 1.0, setting.world_size
    every = np.arange(1.0, size + 1)
    total, slopes = (every**3).sum(), (3 * every**2).sum()

    def loss_of(value: Any) -> Any:
        cubes, _ = phalanx.get_replica_context().all_reduce("SUM", [value**3, tensor(np.array(1))])
        return keras.ops.sum(cubes**2) / 2

    for gradient_of in _gradients(loss_of, twice=True):
        found = setting.strategy.run(gradient_of, args=(np.full((2, 3), own, "float32"),))
        expected = np.full((2, 3), 6 * own * size * total + 3 * own**2 * size * slopes)
        np.testing.assert_allclose(host(found), expected, rtol=1e-5)
    return {}


def _gradients(loss_of: Any, *, twice: bool = False) -> Iterator[Any]:
    """Functions that give the gradient of a loss, or that of the gradient's sum: compiled as well, where a backend
    can."""
    if keras.backend.backend() == "torch":
        import torch

        def of_torch(value: Any) -> Any:
            leaf = tensor(value).requires_grad_()
            (gradient,) = torch.autograd.grad(loss_of(leaf), leaf, create_graph=twice)
            return torch.autograd.grad(gradient.sum(), leaf)[0] if twice else gradient

        yield of_torch
        return
    import tensorflow as tf

    def gradient_of(value: Any) -> Any:
        value = tf.convert_to_tensor(value)
        with tf.GradientTape() as outer:
            outer.watch(value)
            with tf.GradientTape() as tape:
                tape.watch(value)
                loss = loss_of(value)
            gradient = tape.gradient(loss, value)
        return outer.gradient(gradient, value) if twice else gradient

    yield gradient_of
    yield tf.function(gradient_of)
    yield tf.function(gradient_of, input_signature=[tf.TensorSpec([2, None])])


@scenario(plain=False, backends=("jax",), error={"jax": ("CompiledHostCallError", "compiled by JAX")})
def merging_inside_a_compiled_function_on_jax(setting: Setting) -> dict[str, Any]:
    import jax

    jax.jit(lambda value: setting.strategy.reduce("SUM", value, axis=None))(1.0)
    return {}


@scenario(plain=False)
def apply_gradients_sums_inside_run(setting: Setting) -> dict[str, Any]:
    """A learning rate of 1 and gradients of rank + 1: the variable goes down by the sum over the ranks; outside of
    `run` each rank is alone."""
    with setting.strategy.scope():
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def step() -> None:
        gradient = tensor(np.full(2, setting.rank + 1.0, "float32"))
        optimizer.apply_gradients([(gradient, variable)])

    total = setting.world_size * (setting.world_size + 1) / 2
    setting.strategy.run(step)
    np.testing.assert_allclose(host(variable.value), [-total] * 2)
    setting.strategy.run(step)
    np.testing.assert_allclose(host(variable.value), [-2 * total] * 2)
    variable.assign(np.zeros(2, "float32"))
    step()
    np.testing.assert_allclose(host(variable.value), [-(setting.rank + 1.0)] * 2)
    return {}


@scenario(plain=False, backends=("tensorflow", "torch"))  # Keras cannot apply it outside of compiled code on JAX
def apply_gradients_sums_once_through_a_loss_scale(setting: Setting) -> dict[str, Any]:
    with setting.strategy.scope():
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
        optimizer.build([variable])
    gradient = tensor(np.full(2, 4.0 * (setting.rank + 1), "float32"))
    setting.strategy.run(lambda: optimizer.apply([gradient], [variable]))
    total = setting.world_size * (setting.world_size + 1) / 2
    np.testing.assert_allclose(host(variable.value), [-total] * 2)
    return {}


@scenario(plain=False, backends=("tensorflow", "torch"))  # as above
def error_feedback_follows_the_loss_scale(setting: Setting) -> dict[str, Any]:
    strategy = phalanx.MultiWorkerMirroredStrategy(compression=phalanx.compression.TopK(0.05))
    with strategy.scope():
        variable = keras.Variable(np.zeros((64, 64), "float32"))
        inner = keras.optimizers.SGD(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=2)
        optimizer.build([variable])
    rng = np.random.default_rng(setting.rank)
    total = np.zeros((64, 64), "float32")
    for step in range(40):  # after 6 of them, the rest is what the compression has kept
        gradient = rng.normal(size=(64, 64)).astype("float32") * (step < 6)
        total += host(strategy.reduce("SUM", gradient, axis=None))
        scaled = tensor(gradient * float(host(optimizer.dynamic_scale.value)))
        strategy.run(lambda: optimizer.apply([scaled], [variable]))  # noqa: B023
    np.testing.assert_allclose(host(variable.value), -total, atol=1e-2)  # top-k sends float16
    return {}


BATCH = 12


def _batches() -> list[Any]:
    x, y = features(30), numbers(30)
    return [(x[start : start + BATCH], y[start : start + BATCH]) for start in range(0, 30, BATCH)]


class GlobalBatches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return len(_batches())

    def __getitem__(self, index: int) -> Any:
        return _batches()[index]


def _loop(setting: Setting, step: Any, model: Any) -> dict[str, Any]:
    """Two epochs of a custom loop, over the strategy's part of the data, or over all of it in plain Keras."""
    losses = []
    for _ in range(2):
        if setting.alone:
            for x, y in _batches():
                losses.append(float(host(step(tensor(x), tensor(y), len(x)))))
        else:
            data = setting.strategy.experimental_distribute_dataset(GlobalBatches())
            for (x, y), (whole, _) in zip(data, _batches(), strict=True):
                own = setting.strategy.run(step, args=(x, y, len(whole)))
                losses.append(float(host(setting.strategy.reduce("SUM", own, axis=None))))
    return {"losses": losses, "weights": model.get_weights()}


def _model(setting: Setting) -> tuple[Any, Any]:
    with setting.scope():
        model = regressor()
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
    return model, optimizer


@scenario(backends=("tensorflow",))
def custom_loop_on_tensorflow(setting: Setting) -> dict[str, Any]:
    model, optimizer = _model(setting)
    return _loop(setting, _step_on_tensorflow(model, optimizer), model)


@scenario(backends=("tensorflow",))
def embeddings_in_a_custom_loop(setting: Setting) -> dict[str, Any]:
    """Adam squares the gradient of each occurrence of a row by itself; what every batch looks up occurs once."""
    with setting.scope():
        inputs = keras.Input((FEATURES,))
        words = keras.ops.cast(keras.ops.mod(keras.ops.abs(inputs) * 4, 5), "int32")
        places = keras.layers.Embedding(FEATURES, 3)(keras.ops.arange(FEATURES))
        rows = keras.layers.Embedding(5, 3)(words) + places
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(rows)))
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
    return _loop(setting, _step_on_tensorflow(model, optimizer), model)


@scenario(backends=("tensorflow",))
def batch_normalization_over_all_replicas_in_a_custom_loop(setting: Setting) -> dict[str, Any]:
    with setting.scope():
        normalization = keras.layers.BatchNormalization(synchronized=True, momentum=0.6)
        model = keras.Sequential([keras.Input((FEATURES,)), normalization, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
    return _loop(setting, _step_on_tensorflow(model, optimizer), model)


@scenario(plain=False)
def batch_normalization_keeps_what_it_has_of_a_batch_without_samples(setting: Setting) -> dict[str, Any]:
    strategy, rank = setting.strategy, setting.rank
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 2))
    x = tensor(np.full((4 if rank == 0 else 0, 2), 3, "float32"))
    step = lambda x: layer(x, training=True)  # noqa: E731
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        step = tf.function(step, input_signature=[tf.TensorSpec([None, 2])])
    strategy.run(step, args=(x,))
    np.testing.assert_allclose(host(layer.moving_mean), [1.5, 1.5] if rank == 0 else [0, 0])
    np.testing.assert_allclose(host(layer.moving_variance), [0.5, 0.5] if rank == 0 else [1, 1])
    return {}


@scenario(backends=("tensorflow",))
def batch_normalization_of_a_lone_replica_is_compiled(setting: Setting) -> dict[str, Any]:
    """Of several it cannot be, as they meet in its middle."""
    import tensorflow as tf

    with setting.scope():
        normalization = keras.layers.BatchNormalization(synchronized=True)
        normalization.build((None, FEATURES))
    compiled = tf.function(lambda x: normalization(x, training=True), jit_compile=True)
    x = tf.reshape(tf.range(2.0 * FEATURES), [2, FEATURES])
    if setting.world_size > 1:
        with pytest.raises(phalanx.UnsupportedError, match="cannot be compiled by XLA"):
            setting.strategy.run(compiled, args=(x,))
    elif setting.strategy is not None:
        found = host(setting.strategy.run(compiled, args=(x,)))
        np.testing.assert_allclose(found, [[-1.0] * FEATURES, [1.0] * FEATURES], rtol=1e-3)
    return {}


def _step_on_tensorflow(model: Any, optimizer: Any) -> Any:
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def step(x: Any, y: Any, global_size: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.ops.mean(keras.ops.square(model(x, training=True) - y), axis=-1)
            loss = phalanx.compute_average_loss(losses, global_batch_size=global_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


@scenario(backends=("torch",))
def custom_loop_on_torch(setting: Setting) -> dict[str, Any]:
    import torch

    model, optimizer = _model(setting)

    def step(x: Any, y: Any, global_size: int) -> Any:
        model.zero_grad()
        losses = torch.mean(torch.square(model(x, training=True) - y), dim=-1)
        loss = phalanx.compute_average_loss(losses, global_batch_size=global_size)
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        return loss.detach()

    return _loop(setting, step, model)


@scenario(backends=("jax",))
def custom_loop_on_jax(setting: Setting) -> dict[str, Any]:
    import jax

    model, optimizer = _model(setting)

    def loss_of(trainable: Any, non_trainable: Any, x: Any, y: Any, global_size: Any) -> Any:
        outputs, _ = model.stateless_call(trainable, non_trainable, x, training=True)
        losses = keras.ops.mean(keras.ops.square(outputs - y), axis=-1)
        return phalanx.compute_average_loss(losses, global_batch_size=global_size)

    gradients_of = jax.jit(jax.value_and_grad(loss_of))
    apply = jax.jit(optimizer.stateless_apply)

    def step(x: Any, y: Any, global_size: int) -> Any:
        trainable = [v.value for v in model.trainable_variables]
        non_trainable = [v.value for v in model.non_trainable_variables]
        loss, gradients = gradients_of(trainable, non_trainable, x, y, global_size)
        context = phalanx.get_replica_context()
        gradients = context.all_reduce("SUM", gradients)
        trainable, optimizer_values = apply([v.value for v in optimizer.variables], gradients, trainable)
        for variable, value in zip(model.trainable_variables, trainable, strict=True):
            variable.assign(value)
        for variable, value in zip(optimizer.variables, optimizer_values, strict=True):
            variable.assign(value)
        return loss

    return _loop(setting, step, model)


@scenario(plain=False, quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("ConfigurationError", "same options")))
def other_options_for_the_same_job(setting: Setting) -> dict[str, Any]:
    options = phalanx.CommunicationOptions(implementation=phalanx.CommunicationImplementation.RING)
    phalanx.MultiWorkerMirroredStrategy(communication_options=options)
    return {}


@scenario(plain=False)
def reduction_along_an_axis_of_halves_and_of_integers(setting: Setting) -> dict[str, Any]:
    strategy, replicas = setting.strategy, setting.world_size
    halves = keras.ops.ones((1000,), "bfloat16")
    mean, total = (strategy.reduce(op, halves, axis=0) for op in ("MEAN", "SUM"))
    assert keras.backend.standardize_dtype(mean.dtype) == "bfloat16"
    assert float(mean) == 1.0
    assert abs(float(total) / (1000 * replicas) - 1) < 0.01
    right = tensor(np.arange(6, dtype="int32") < 5)
    for value in (right, keras.ops.cast(right, "int32")):
        assert abs(float(strategy.reduce("MEAN", value, axis=0)) - 5 / 6) < 1e-6
    mean = strategy.reduce("MEAN", tensor(np.int32(setting.rank)))
    assert float(mean) == float(strategy.reduce("MEAN", setting.rank)) == (replicas - 1) / 2
    return {}
