"""A few programs of the differential search; `make differential` runs as many as there is time for."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tests.differential.comparison import differences, flatten
from tests.differential.pool import Result
from tests.differential.programs import TOLERANCES, Program
from tests.differential.search import Different, Judge, Tally
from tests.differential.worker import Outcome
from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import finish
from tests.support.programs import environment

BOUND_S = 900.0
"""Against hanging only."""


def test_a_difference_in_a_number_a_key_an_order_or_a_shape_is_found():
    value = {"history": {"loss": [1.0, 0.5], "mae": [2.0, 1.0]}, "weights": [np.ones((2, 3))], "name": "a"}
    same = flatten(value)
    tolerance = TOLERANCES["float32"]
    others = [
        {**value, "history": {"loss": [1.0, 0.501], "mae": [2.0, 1.0]}},
        {**value, "history": {"loss": [1.0], "mae": [2.0, 1.0]}},
        {**value, "history": {"mae": [2.0, 1.0], "loss": [1.0, 0.5]}},
        {**value, "history": {"loss": [1.0, float("nan")], "mae": [2.0, 1.0]}},
        {**value, "weights": [np.ones((3, 2))]},
        {**value, "name": None},
        {key: item for key, item in value.items() if key != "weights"},
    ]
    assert differences(same, flatten(value), tolerance) == []
    for other in others:
        assert differences(flatten(other), same, tolerance)
        assert differences(same, flatten(other), tolerance)


def test_what_rounding_changes_by_itself_is_no_difference():
    expected, noisy = {"weights": np.array([1.0, 2.0])}, {"weights": np.array([1.01, 2.0])}
    assert differences({"weights": np.array([1.02, 2.0])}, expected, 1e-5, [noisy]) == []
    assert differences({"weights": np.array([1.5, 2.0])}, expected, 1e-5, [noisy])


class _Pool:
    """Replicas that train twice as far as plain Keras, until `renew`."""

    def __init__(self):
        self.sources = ["an earlier program"]
        self._factor = 2.0

    def run(self, source, world_size):
        self.sources.append(source)
        plain, ours = ({"0. loss": {"": np.array([value])}} for value in (1.0, self._factor))
        return Result(Outcome(plain), [Outcome(ours)] * world_size)

    def plain_again(self, source, seed):
        return None

    def renew(self):
        self.sources.clear()
        self._factor = 1.0


def test_a_program_that_differs_only_after_others_is_found_with_these():
    with pytest.raises(Different, match="instead of 1") as found:
        Judge(_Pool(), Tally(), None).check(Program("this program", 2, 1e-5))
    assert found.value.kind == "equal without the programs before, after them numbers: loss"
    assert found.value.before == ("an earlier program",)


class _SkippingPool(_Pool):
    """Plain Keras has skipped a step."""

    def run(self, source, world_size):
        outcomes = [Outcome({"0. state": {" iterations": np.array(steps)}}) for steps in (7.0, 8.0)]
        return Result(outcomes[0], [outcomes[1]] * world_size)


def test_a_skipped_step_is_no_difference_where_the_documents_say_so():
    policy, tally = "keras.config.set_dtype_policy('mixed_float16')", Tally()
    Judge(_SkippingPool(), tally, None).check(Program(f"{policy}; Wrapped()", 2, 1e-5))
    assert tally.outcomes == {"at the edge of overflow": 1}
    for source in (policy, "Wrapped()"):
        with pytest.raises(Different, match="8 instead of 7"):
            Judge(_SkippingPool(), tally, None).check(Program(source, 2, 1e-5))


class _RefusingPool(_Pool):
    def run(self, source, world_size):
        error = (
            "UnsupportedError",
            "Replicas would not compute what one process does: the loss is another",
            "traceback",
        )
        return Result(Outcome({}), [Outcome({}, error)] * world_size)


def test_a_refusal_of_a_program_that_relates_no_samples_is_found():
    with pytest.raises(Different, match="traceback") as found:
        Judge(_RefusingPool(), Tally(), None).check(Program("this program", 2, 1e-5))
    assert "refused without need" in found.value.kind


class _RoundingPool(_RefusingPool):
    """Plain Keras has other numbers with other rounding errors."""

    def plain_again(self, source, seed):
        return Outcome({"loss": {"": np.array(0.1 * (seed or 0))}})

    def run(self, source, world_size):
        refused = super().run(source, world_size)
        return Result(Outcome({"loss": {"": np.array(0.0)}}), refused.ranks)


def test_a_refusal_of_a_program_whose_numbers_are_rounding_errors_is_none():
    tally = Tally()
    Judge(_RoundingPool(), tally, None).check(Program("this program", 2, 1e-5))
    assert list(tally.outcomes) == ["refused, as rounding errors alone change its numbers"]


@pytest.mark.timeout(BOUND_S + 60)
@pytest.mark.parametrize(
    ("backend", "programs"),
    [
        pytest.param(
            backend,
            count,
            marks=[getattr(pytest.mark, backend), *([] if (backend, count) == (FIRST, 1) else [pytest.mark.slow])],
        )
        for backend in BACKENDS
        for count in (1, 100)
    ],
)
def test_random_programs(tmp_path, backend, programs):
    command = ["-m", "tests.differential.run", "--backend", backend, "--programs", str(programs)]
    command += ["--seed", "1", "--shrink", "0", "--minutes", "14", "--folder", str(tmp_path)]
    variables = environment(backend)
    code, output = finish([sys.executable, *command], variables, bound_s=BOUND_S, start=fork_server.popen)
    assert code == 0, output
    assert (found := re.search(r"(\d+) programs: .*?(\d+) equal", output)), output
    assert int(found[2]) >= int(found[1]) / 2, output
