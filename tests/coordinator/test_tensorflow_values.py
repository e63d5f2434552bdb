"""What TensorFlow itself does not pickle, or not as it is, and what travels with functions of a coordinator."""

from __future__ import annotations

import pytest

from tests.support.programs import check_python

pytestmark = pytest.mark.tensorflow

PROGRAM = """
from __future__ import annotations

import tensorflow as tf

from phalanx.engines import make_tensors
from phalanx.coordinator.function_pickling import References, pack, unpack
from phalanx.coordinator.change_detection import trace_references, traces_equal
from phalanx.errors import UnsupportedError
from phalanx.training.scope_registry import ScopeRegistry

references = References({}, ScopeRegistry(), make_tensors())


def travel(thing, load=references.load):
    return unpack(pack(thing, references, "It"), load)


ragged = tf.ragged.constant([[[1.0], []], [[2.0, 3.0, 4.0]]])
for load in (references.load, references.load_on_host):
    assert travel({"a": [ragged]}, load)["a"][0].to_list() == ragged.to_list()
sparse = travel(tf.sparse.from_dense([[0.0, 5.0]]))
assert isinstance(sparse, tf.SparseTensor)
assert tf.sparse.to_dense(sparse).numpy().tolist() == [[0.0, 5.0]]


class Trainer:
    def __init__(self, factor):
        self.factor = factor

    @tf.function
    def step(self, x):
        if x > 0:
            return x * self.factor
        return x


trainer = Trainer(2.0)
assert float(trainer.step(tf.constant(3.0))) == 6.0
step, other = travel((trainer.step, trainer))
assert float(step(tf.constant(3.0))) == float(other.step(tf.constant(3.0))) == 6.0
assert float(step(tf.constant(-3.0))) == -3.0


def traced():
    return trace_references(trainer.step, lambda thing: False, lambda thing: pack(thing, references, "It"))


before = traced()
assert traces_equal(before, traced())
trainer.factor = 3.0
assert not traces_equal(before, traced())
gone = Trainer(1.0).step
try:
    travel(gone)
except UnsupportedError as error:
    assert "no longer exists" in str(error), error
else:
    raise AssertionError("the object of the method is gone")
Number = tf.Tensor  # a global that only annotations name
FACTOR = 2.0  # and one that only a default names


def absolute(x: Number, factor: float = FACTOR) -> Number:
    if x < 0:
        return -x * factor
    return x


assert float(tf.function(travel(absolute))(tf.constant(-3.0))) == 6.0
del annotations  # as if the program had not imported it
assert float(tf.function(travel(absolute))(tf.constant(-3.0))) == 6.0
print("travelled")
"""


def test_ragged_tensors_and_methods_travel_as_they_are(tmp_path: object) -> None:
    program = f"{tmp_path}/program.py"
    with open(program, "w") as file:  # AutoGraph reads the source
        file.write(PROGRAM)
    assert "travelled" in check_python(program, backend="tensorflow")
