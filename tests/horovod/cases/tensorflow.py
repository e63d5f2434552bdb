"""TensorFlow: eager and inside `tf.function`, gradients, the tape."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
import tensorflow as tf

import phalanx.horovod.tensorflow as hvd
from phalanx.engines import make_tensors

v1 = tf.compat.v1

DTYPES = (tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)


def _both(function):
    """The function as it is, and compiled to a graph."""
    return function, tf.function(function)


def check_collectives_of_a_session_hold_none_of_its_threads() -> None:
    """The only thread of the session begins with another of two collectives on every other rank."""
    config = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    names = ["one", "two"] if hvd.rank() % 2 == 0 else ["two", "one"]
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        fed = v1.placeholder(tf.float32, [2])
        merged = {name: hvd.allreduce(fed * len(name), op=hvd.Sum, name=name) for name in names}
        for _ in range(3):
            found = session.run(merged, {fed: [1.0, hvd.rank()]})
    for name in names:
        np.testing.assert_allclose(found[name], [3 * hvd.size(), 3 * sum(range(hvd.size()))])


def check_merges_of_strategies_are_refused_in_a_session() -> None:
    """Also in a function that the session's graph calls."""
    with tf.Graph().as_default():
        for call in _both(lambda x: make_tensors().call(lambda arrays: arrays, [x])):
            with pytest.raises(Exception, match="that a session runs"):  # the type is AutoGraph's in a function
                call(tf.ones([2]))


def check_allreduce_of_every_dtype_eager_and_in_a_graph() -> None:
    total = sum(range(1, hvd.size() + 1))
    for dtype in DTYPES:
        mine = tf.cast(tf.fill([2, 3], hvd.rank() + 1), dtype)
        for call in _both(lambda x: hvd.allreduce(x, op=hvd.Sum)):
            merged = call(mine)
            assert merged.dtype == dtype
            assert merged.shape == (2, 3)
            np.testing.assert_array_equal(tf.cast(merged, tf.int32).numpy(), np.full((2, 3), total))


def check_other_operations_eager_and_in_a_graph() -> None:
    rank, size = hvd.rank(), hvd.size()
    for call in _both(lambda x: hvd.allgather(x)):
        gathered = call(tf.fill([rank + 1, 2], float(rank)))
        assert gathered[:, 0].numpy().tolist() == [r for r in range(size) for _ in range(r + 1)]
    for call in _both(lambda x: hvd.broadcast(x, size - 1)):
        assert call(tf.constant([rank])).numpy().tolist() == [size - 1]
    for call in _both(lambda x, splits: hvd.alltoall(x, splits)):
        received, counts = call(tf.fill([size], rank), tf.ones([size], tf.int32))
        assert received.numpy().tolist() == list(range(size))
        assert counts.numpy().tolist() == [1] * size
        received, counts = call(tf.fill([3], rank), tf.constant([3] + [0] * (size - 1)))
        assert received.shape[0] == (3 * size if rank == 0 else 0)
    for call in _both(lambda x: hvd.alltoall(x)):
        assert call(tf.fill([size], rank)).numpy().tolist() == list(range(size))
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be divided"):
        hvd.alltoall(tf.ones([2 * size - 1]))
    for call in _both(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
        assert call(tf.ones([size + 1])).numpy().tolist() == [size] * (2 if rank == 0 else 1)
    for call in _both(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)):
        assert [each.numpy().tolist() for each in call(tf.ones([2]))] == [[size] * 2, [2 * size] * 2]
    assert (hvd.rank_op().numpy(), hvd.size_op().numpy()) == (rank, size)
    hvd.barrier()


def check_tensors_of_unknown_rank_in_a_graph() -> None:
    anything = [tf.TensorSpec(None, tf.float32)]
    rows = tf.fill([hvd.size(), 2], float(hvd.rank()))
    gathered = tf.function(lambda x: hvd.allgather(x), input_signature=anything)(rows)
    assert gathered.shape == (hvd.size() ** 2, 2)
    received = tf.function(lambda x: hvd.alltoall(x), input_signature=anything)(rows)
    assert received[:, 0].numpy().tolist() == list(range(hvd.size()))
    scattered = tf.function(lambda x: hvd.reducescatter(x, op=hvd.Sum), input_signature=anything)(rows)
    assert scattered.numpy().tolist() == [[sum(range(hvd.size()))] * 2]


def check_a_graph_that_only_one_rank_traces_again() -> None:
    @tf.function
    def twice(x):
        return hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)

    for length in (2, 2, 3):
        mine = tf.ones([length], tf.float32)
        if hvd.rank() == 0:
            twice.get_concrete_function(tf.TensorSpec([length + 5], tf.float32))
        merged, gathered = twice(mine)
        assert merged.numpy().tolist() == [hvd.size()] * length
        assert gathered.shape[0] == length * hvd.size()


def check_collectives_in_a_loop_of_a_graph() -> None:
    @tf.function
    def loop(x):
        for _ in tf.range(4):
            x = hvd.allreduce(x, op=hvd.Sum)
        return x

    assert loop(tf.ones([2])).numpy().tolist() == [hvd.size() ** 4] * 2


def check_gradients_of_collectives() -> None:
    rank, size = hvd.rank(), hvd.size()

    def gradient(function, upstream=None):
        x = tf.ones([size, 2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x, output_gradients=None if upstream is None else tf.fill(tf.shape(y), upstream))

    total = sum(range(1, size + 1))
    for compiled in (False, True):
        run = tf.function(gradient) if compiled else gradient
        np.testing.assert_allclose(run(lambda x: hvd.allreduce(x, op=hvd.Sum), rank + 1.0), total)
        np.testing.assert_allclose(run(lambda x: hvd.allreduce(x), rank + 1.0), total / size)
        np.testing.assert_allclose(run(lambda x: hvd.allgather(x), rank + 1.0), total / size)
        np.testing.assert_allclose(run(lambda x: hvd.broadcast(x, 0), 2.0), 2.0 if rank == 0 else 0.0)
        back = run(lambda x: hvd.alltoall(x, tf.ones([size], tf.int32))[0], rank + 1.0)
        assert back[:, 0].numpy().tolist() == [r + 1.0 for r in range(size)]
        back = run(lambda x: hvd.reducescatter(x, op=hvd.Sum), rank + 1.0)
        assert back[:, 0].numpy().tolist() == [(r + 1.0) * size for r in range(size)]
    with pytest.raises(NotImplementedError, match="no gradient"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max))


def check_gradients_in_a_session() -> None:
    """Those of two results are two operations of one graph, and may begin in another dtype than the results have."""
    size = hvd.size()
    with tf.Graph().as_default(), v1.Session() as session:
        fed = v1.placeholder(tf.float64, [size])
        for collective, expected in (
            (lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum, name="same"), size),
            (hvd.grouped_allgather, 1),
            (lambda tensors: hvd.grouped_reducescatter(tensors, op=hvd.Sum), size),
        ):
            results = collective([fed, fed * 2])
            starts = [tf.ones(tf.shape(result), tf.float32) for result in results]
            gradients = [tf.gradients(*each)[0] for each in zip(results, [fed, fed], starts, strict=True)]
            found = session.run(gradients, {fed: np.ones(size)})
            np.testing.assert_array_equal(found, [[expected] * size, [2 * expected] * size])


def check_gradients_of_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()

    def twice(function):
        x = tf.fill([size, 2], rank + 1.0)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(function(x**3) ** 2) / 2
            first = tape.gradient(y, x)
        return outer.gradient(first, x)

    every = np.arange(1.0, size + 1)
    expected = 6 * (rank + 1.0) * size * (every**3).sum() + 3 * (rank + 1.0) ** 2 * size * (3 * every**2).sum()
    for run in (twice, tf.function(twice)):
        np.testing.assert_allclose(run(lambda x: hvd.allreduce(x, op=hvd.Sum)), expected, rtol=1e-5)
    scale = tf.Variable(2.0)

    def beside(function):
        x = tf.ones([size, 2])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(function(x))
            loss = scale * tf.reduce_sum(tf.stop_gradient(tape.gradient(y, x)))
        return outer.gradient(loss, scale)

    for function in (hvd.allgather, hvd.reducescatter, lambda x: hvd.broadcast(x, 0), lambda x: hvd.alltoall(x)):
        with pytest.raises(NotImplementedError, match="gradient of the gradient"):
            twice(function)
        with pytest.raises(tf.errors.OpError):
            tf.function(twice)(function)
        np.testing.assert_allclose(beside(tf.function(function)), beside(function))  # unused


def check_strings_are_refused() -> None:
    for text in (tf.constant("text"), tf.constant(["text"])):
        for call in (lambda text: hvd.broadcast(text, 0), hvd.allreduce):
            with pytest.raises(tf.errors.InvalidArgumentError, match="an array of"):
                call(text)
            with pytest.raises(tf.errors.OpError, match="an array of"):
                tf.function(call)(text)


def check_objects_with_the_arguments_of_tensorflow() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        assert hvd.broadcast_object({"rank": hvd.rank()}, 0, session) == {"rank": 0}
        assert hvd.allgather_object(hvd.rank(), session) == list(range(hvd.size()))
    assert hvd.broadcast_object(hvd.rank(), 0, None, "named") == 0
    assert hvd.broadcast_object_fn(0, None, "named")(hvd.rank()) == 0
    with pytest.raises(ValueError, match="a name is a string"):
        hvd.broadcast_object(hvd.rank(), 0, None, hvd.global_process_set)


def check_differences_raise_on_every_rank() -> None:
    last = hvd.rank() == hvd.size() - 1
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched shapes"):
        hvd.allreduce(tf.ones([3 if last else 2]), name="differs")
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched data types"):
        hvd.allreduce(tf.ones([2], tf.float64 if last else tf.float32), name="differs")
    with pytest.raises(tf.errors.OpError, match="Mismatched shapes"):
        tf.function(lambda x: hvd.allreduce(x, name="differs"))(tf.ones([3 if last else 2]))
    with tf.Graph().as_default(), v1.Session() as session:
        mine = tf.ones([3 if last else 2])
        in_branch = v1.cond(v1.placeholder_with_default(True, []), lambda: hvd.allreduce(mine), lambda: mine)
        for merged in (hvd.allreduce(mine), in_branch):
            with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched shapes") as caught:
                session.run(merged)
            assert isinstance(caught.value, hvd.HorovodInternalError)
        with pytest.raises(tf.errors.InvalidArgumentError, match="add up"):
            session.run(
                hvd.alltoall(tf.ones([hvd.size()]), v1.placeholder_with_default([1] * (hvd.size() + 1), [None]))
            )
        with pytest.raises(tf.errors.UnknownError, match="of the program"):
            session.run(tf.numpy_function(_raise, [0], tf.int32))
    assert hvd.allreduce(tf.ones([1]), op=hvd.Sum).numpy()[0] == hvd.size()


def _raise(_: object) -> None:
    raise RuntimeError("of the program")


def check_variables_are_broadcast() -> None:
    variables = [tf.Variable(tf.fill([2], float(hvd.rank()))), tf.Variable(hvd.rank())]
    hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
    assert [each.numpy().tolist() for each in variables] == [[hvd.size() - 1.0] * 2, hvd.size() - 1]

    @tf.function
    def in_graph():
        hvd.broadcast_variables(variables, root_rank=0)

    warned = io.StringIO()
    tf.get_logger().addHandler(handler := logging.StreamHandler(warned))
    in_graph()
    tf.get_logger().removeHandler(handler)
    assert [each.numpy().tolist() for each in variables] == [[hvd.size() - 1.0] * 2, hvd.size() - 1]
    assert "AutoGraph" not in warned.getvalue()


def check_slices_are_gathered_or_made_dense() -> None:
    table = tf.Variable(tf.zeros([4, 2]))
    for dense, divisor in ((False, 1.0), (True, 1.0), (False, 49.0)):  # 1 / 49 * 49 is not 1 in floats
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense, gradient_predivide_factor=divisor)
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices) is not dense
        expected = np.zeros((4, 2))
        expected[: hvd.size()] += 1 / hvd.size()
        expected[3] += 1
        np.testing.assert_allclose(tf.convert_to_tensor(gradient).numpy(), expected)
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0])
    for arguments in ({"op": hvd.Min}, {"op": hvd.Sum, "prescale_factor": 0.5}, {"postscale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match="sparse_as_dense"):
            hvd.allreduce(slices, **arguments)


def _session_problem():
    """Loss and variables of a linear regression in the present graph; the batch of this rank, and that of all ranks."""
    x, y = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.float32, [None, 1])
    table = v1.get_variable("table", initializer=tf.fill([5, 3], 0.5))
    weights = v1.get_variable("weights", initializer=tf.fill([3, 1], 0.1 * (1 + hvd.rank())))
    rows = v1.placeholder(tf.int32, [None])
    loss = tf.reduce_mean(tf.square(tf.matmul(x * tf.gather(table, rows), weights) - y))
    random = np.random.default_rng(3)
    inputs = random.normal(size=(hvd.size() * 4, 3)).astype("float32")
    chosen = random.integers(0, 5, len(inputs))
    targets = inputs.sum(axis=1, keepdims=True)

    def batch(part):
        return {x: inputs[part], y: targets[part], rows: chosen[part]}

    mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    return loss, [table, weights], batch(mine), batch(slice(None))


@pytest.mark.filterwarnings("ignore")
def check_an_optimizer_of_tensorflow_1_trains_as_one_process() -> None:
    def train(distribute, steps, batch_index, **options):
        with tf.Graph().as_default():
            loss, variables, *batches = _session_problem()
            step = v1.train.get_or_create_global_step()
            optimizer = v1.train.AdagradOptimizer(0.5)
            if distribute:
                optimizer = hvd.DistributedOptimizer(optimizer, **options)
            train_op = optimizer.minimize(loss, global_step=step)
            hook = hvd.BroadcastGlobalVariablesHook(0)
            with v1.train.MonitoredTrainingSession(hooks=[hook], summary_dir=None) as session:
                for _ in range(steps):
                    session.run(train_op, batches[batch_index])
                return session.run([step, *variables, optimizer.get_slot(variables[1], "accumulator")])

    expected = train(False, 3, 1)
    for options in ({}, {"sparse_as_dense": True}, {"compression": hvd.Compression.fp16}):
        found = train(True, 3, 0, **options)
        rtol = 1e-2 if "compression" in options else 1e-5
        for one, many in zip(expected, found, strict=True):
            np.testing.assert_allclose(many, one, rtol=rtol, err_msg=str(options))
    step, *accumulated = train(True, 6, 0, backward_passes_per_step=2, average_aggregated_gradients=True)
    assert step == 6, "it counts the runs"
    for one, many in zip(expected[1:], accumulated, strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5)


def check_local_variables_and_names_of_an_optimizer_of_tensorflow_1() -> None:
    with tf.Graph().as_default():
        loss, variables, mine, _ = _session_problem()
        with pytest.raises(ValueError, match="DistributedOptimizer already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)))
        optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.9))
        optimizer.register_local_var(variables[1])
        (merged, _), (own, _) = optimizer.compute_gradients(loss, variables)
        plain = v1.gradients(loss, variables)
        train_op = optimizer.apply_gradients([(own, variables[1])])
        assert optimizer.get_slot_names() == ["momentum"]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))
            found, kept, expected = session.run([merged.indices, own, plain[1]], mine)
            session.run(train_op, mine)
    assert len(found) == 4 * hvd.size()
    np.testing.assert_allclose(kept, expected / hvd.size(), rtol=1e-6)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def check_the_tape_trains_as_one_process() -> None:
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(8 * hvd.size(), 3)).astype("float32"),
        rng.normal(size=(8 * hvd.size(), 1)).astype("float32"),
    )
    own, alone = [tf.Variable(tf.fill([3, 1], 0.5)) for _ in range(2)]
    unused = tf.Variable(1.0)

    def step(variable, x, y, compression, *, merged):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variable - y) ** 2)
        if merged:
            tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradient, missing = tape.gradient(loss, [variable, unused])
        assert missing is None
        variable.assign_sub(0.1 * gradient)

    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        graph = tf.function(step)
        for _ in range(3):
            graph(own, x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()], compression, merged=True)
            step(alone, x, y, compression, merged=False)
        np.testing.assert_allclose(own, alone, rtol=1e-5 if compression is hvd.Compression.none else 1e-2)


def check_numbers_of_the_job_as_tensors() -> None:
    with pytest.MonkeyPatch.context() as patch:  # at the first call: AutoGraph warns of a function once
        warnings: list[str] = []
        patch.setattr(tf.get_logger(), "warning", lambda text, *_: warnings.append(text))
        assert tf.function(lambda: hvd.rank_op())().numpy() == hvd.rank()
    assert not warnings, "AutoGraph leaves what calls the host alone"
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 10
    with tf.Graph().as_default(), pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(tf.ones(2), process_set=unknown)
    evens = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    if not evens.included():
        with pytest.raises(tf.errors.InvalidArgumentError, match="no member"):
            hvd.allreduce(tf.ones(2), process_set=evens)
    for call in _both(lambda: hvd.process_set_included_op(evens.process_set_id)):
        assert call().numpy() == (hvd.rank() % 2 == 0)
    for call in _both(lambda: hvd.size_op(evens.process_set_id)):
        assert call().numpy() == evens.size()
    assert (hvd.local_rank_op().numpy(), hvd.local_size_op().numpy()) == (hvd.local_rank(), hvd.local_size())
    hvd.remove_process_set(evens)
    with pytest.raises(ValueError, match="no process set has the number 99"):
        hvd.size_op(99)
    assert [n for n in range(9) if hvd.check_num_rank_power_of_2(n)] == [1, 2, 4, 8]
    assert hvd.broadcast_object_fn(root_rank=hvd.size() - 1)(hvd.rank()) == hvd.size() - 1


def check_gradients_of_local_layers_are_not_merged() -> None:
    rank, size = hvd.rank(), hvd.size()
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 2))
    shared = tf.Variable([1.0, 1.0])
    for scale, expected in ((True, (rank + 1.0) / size), (False, rank + 1.0)):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(layer(tf.fill([1, 2], rank + 1.0))) + (rank + 1.0) * tf.reduce_sum(shared)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=scale)
        own, merged = tape.gradient(loss, [layer.kernel.value, shared])
        (pair,), others = tape.get_local_and_global_gradients(loss, [shared, layer.kernel.value])
        assert pair[0] is layer.kernel.value
        np.testing.assert_array_equal([pair[1], others[0][1][:, None]], [own, merged[:, None]])
        np.testing.assert_allclose(own, np.full((2, 1), expected), rtol=1e-6)
        np.testing.assert_allclose(merged, np.full(2, (size + 1) / 2), rtol=1e-6)


def check_elastic_state_of_variables() -> None:
    rank = hvd.rank()
    variables = [tf.Variable([1.0 + rank]), tf.Variable(rank)]
    state = hvd.elastic.TensorFlowState(variables, step=rank)
    state.commit()
    variables[0].assign([9.0])
    state.step = 9
    state.restore()
    assert (variables[0].numpy().tolist(), state.step) == ([1.0 + rank], rank)
    state.sync()
    assert (variables[0].numpy().tolist(), variables[1].numpy(), state.step) == ([1.0], 0, 0)
    with pytest.raises(NotImplementedError, match="neither sessions"):
        hvd.elastic.TensorFlowState()


def check_sync_batch_normalization_is_that_of_one_process_on_the_whole_batch() -> None:
    rank, size = hvd.rank(), hvd.size()
    rng = np.random.default_rng(0)
    rows = [2 * r + 3 for r in range(size)]
    whole = (3 * rng.normal(size=(sum(rows), 4, 5)) + 50).astype("float32")
    weights = rng.normal(size=whole.shape).astype("float32")
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    sync, plain = hvd.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    for layer in (sync, plain):
        layer.build(whole.shape)

    def gradients(layer, x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * weights)
        return y, *tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

    for call in _both(lambda x, weights: gradients(sync, x, weights)):
        y, of_x, *of_weights = gradients(plain, tf.constant(whole), weights)
        part, of_own, *of_own_weights = call(tf.constant(whole[mine]), weights[mine])
        np.testing.assert_allclose(part, y[mine], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(of_own, of_x[mine], rtol=1e-3, atol=1e-4)
        for own, expected in zip(of_own_weights, of_weights, strict=True):
            np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Sum), expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(sync.moving_mean, plain.moving_mean, rtol=1e-5)
        np.testing.assert_allclose(sync.moving_variance, plain.moving_variance, rtol=1e-4)
    with tf.Graph().as_default(), v1.Session() as session:
        sync = hvd.SyncBatchNormalization()
        fed = v1.placeholder(tf.float32, [None, *whole.shape[1:]])
        merged = sync(fed, training=True)
        of_fed = tf.gradients(tf.reduce_sum(merged * weights[mine]), fed)
        session.run(v1.global_variables_initializer())
        part, (of_own,) = session.run([merged, of_fed], {fed: whole[mine]})
    np.testing.assert_allclose(part, y[mine], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(of_own, of_x[mine], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
