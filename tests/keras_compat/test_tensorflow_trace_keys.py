"""On TensorFlow batches of several kinds in turn, each like the last one or not, are trained on as without Phalanx."""

from __future__ import annotations

import pytest

from tests.support.programs import check_python, run_python

pytestmark = pytest.mark.tensorflow

PROGRAM = """
import keras
import numpy as np
from phalanx.engines import make_engine

traced = []


class Counted(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        traced.append(inputs["x"].shape)
        return self.dense(inputs["x"]) + self.dense(inputs["x"][:, ::-1])


class Alone:
    updates_weights = is_unfused = repeats_steps = uses_micro_batches = once_per_step = synchronizes_batch_norm = False
    gather = global_size = fixed_size = None

    def all_reduce(self, local, share):
        return local

    def all_gather(self, local, share):
        return local, 0

    def __call__(self, layout, arrays, share):
        flats = layout.allocate()
        for view, array in zip(layout.unpack(flats), arrays, strict=True):
            view[...] = array
        return flats


def model():
    keras.utils.set_random_seed(1)
    made = Counted()
    made.compile("adam", "mse", metrics=["mae"])
    return made


def batches():
    random = np.random.default_rng(0)
    for size, weighted in [(8, False), (8, False), (5, False), (8, False), (8, True), (8, True), (1, True), (8, False)]:
        x, y = random.normal(size=(size, 4)).astype("float32"), random.normal(size=(size, 3)).astype("float32")
        yield {"x": x}, y, np.linspace(0, 2, size).astype("float32") if weighted else None


plain, own = model(), model()
engine = make_engine(own, Alone())
first = next(batches())
engine.build(first)
plain(first[0])
plain.set_weights(own.get_weights())
traced.clear()
engine.begin()
for x, y, weight in batches():
    engine.train((x, y, weight), 1.0)
engine.end()
print("traces", len(traced))
for x, y, weight in batches():
    plain.train_on_batch(x, y, weight)
for mine, keras_own in zip(own.get_weights(), plain.get_weights(), strict=True):
    np.testing.assert_allclose(mine, keras_own, rtol=1e-5, atol=1e-6)
"""


LOST_IN_A_GRAPH = """
import keras
import tensorflow as tf

import phalanx
from phalanx.errors import PeerLostError

strategy = phalanx.OneDeviceStrategy()


def lose(arrays):
    raise PeerLostError("worker/1 is lost", rank=1, task="worker/1", host="here")


step = tf.function(lambda x: strategy._tensors.call(lose, [x])[0])
try:
    strategy.run(step, args=(tf.ones(2),))
except PeerLostError:
    print("as it is")
try:
    tf.function(lambda x: tf.debugging.check_numerics(x, "no number"))(tf.fill([2], float("nan")))
except tf.errors.InvalidArgumentError as error:
    assert strategy._tensors.find_cause(error) is None
try:
    strategy._tensors.call(lambda arrays: exec("raise AssertionError"), [tf.ones(2)])
except AssertionError:
    assert strategy._tensors.find_cause(RuntimeError("of something else")) is None
step(tf.ones(2))
"""


CALLS = """
import tensorflow as tf

from phalanx.engines.replica.tensorflow.direct_calls import DirectCall

factor = tf.Variable(2.0)


@tf.function
def function(data, more):
    x, y, nothing = data
    return {"sum": factor * (10 * x["b"] + x["a"]["c"])}, y, more[0]


def arguments(scale):
    x = {"b": tf.constant([1.0, 2.0]) * scale, "a": {"c": tf.constant([3.0, 4.0]) * scale}}
    return (x, tf.constant([5.0]) * scale, None), [tf.constant(6.0) * scale]


first = arguments(1.0)
trace = DirectCall(function.get_concrete_function(*first), *first)
assert sorted(trace._order) == [0, 1, 2, 3], "this version of TensorFlow lets it be told"
factor.assign(3.0)
sums, y, more = trace(*arguments(2.0))
assert list(sums) == ["sum"] and sums["sum"].numpy().tolist() == [78.0, 144.0]
assert (y.numpy().tolist(), float(more)) == ([10.0], 12.0)

same = tf.ones(2)
difference = tf.function(lambda a, b: a - b)
trace = DirectCall(difference.get_concrete_function(same, same), same, same)
assert trace(3 * same, same).numpy().tolist() == [2.0, 2.0]
"""


LATER = """
import tensorflow as tf

from phalanx.engines.replica.tensorflow.host_calls import call_in_graph


@tf.function
def function(x, calls):
    return call_in_graph(lambda array: [array + 1], [x], [x.dtype])[0] if calls else x


assert function(tf.ones(2), False).numpy().tolist() == [1.0, 1.0]
assert function(tf.ones(2), True).numpy().tolist() == [2.0, 2.0]
"""


def test_an_error_in_the_middle_of_a_graph_counts_as_what_it_was() -> None:
    code, output = run_python("-c", LOST_IN_A_GRAPH, backend="tensorflow")
    assert "as it is\n" in output
    assert code == 71, output
    assert "direct cause" in output


@pytest.mark.slow
def test_batches_of_several_kinds() -> None:
    name, count = check_python("-c", PROGRAM, backend="tensorflow", bound_s=240).split()[-2:]
    assert name == "traces"
    # One for each structure, and one more where the size is found to vary.
    assert 2 <= int(count) <= 4


def test_traces_are_called_with_tensors_in_their_own_order() -> None:
    check_python("-c", CALLS, backend="tensorflow")


def test_the_first_call_of_the_host_may_come_in_a_later_trace() -> None:
    check_python("-c", LATER, backend="tensorflow")
