"""Embeddings of which single rows travel: in real jobs against plain Keras, and what stands in their place."""

from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parameter_server.embeddings import BATCH, CASES, SAMPLES, USERS, Case, data
from tests.parameter_server.tasks import Tasks
from tests.support.backends import BACKENDS, FIRST
from tests.training.compare import assert_close

pytestmark = pytest.mark.timeout(600)

Found = dict[str, Any]
TOLERANCE = 1e-4

QUICK = "alone alone_in_pieces bounded_staleness"


def cases(*, exact: bool) -> list[Any]:
    names = [name for name, case in CASES.items() if case.exact is exact and name != "lazy_adam"]
    return [pytest.param(n, marks=[] if n in QUICK.split() else pytest.mark.slow) for n in names]


each_backend = pytest.mark.parametrize(
    "backend", [FIRST, *[pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS[1:]]]
)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[Found]]:
    """What each worker found in a case; all selected cases with as many workers and servers run in one job."""
    selected: dict[str, set[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.module is request.module and "backend" in parameters:
            selected.setdefault(parameters["backend"], set()).add(parameters.get("name", "lazy_adam"))
    finished: dict[tuple[str, int, int], Path] = {}

    def of(backend: str, name: str) -> list[Found]:
        case = CASES[name]
        key = (backend, case.workers, case.servers)
        if key not in finished:
            folder = finished[key] = tmp_path_factory.mktemp("-".join(map(str, key)))
            alike = [n for n, c in CASES.items() if (c.workers, c.servers) == key[1:] and n in selected[backend]]
            program = ["-m", "tests.parameter_server.embeddings", str(folder), *alike]
            with Tasks(
                folder, program, servers=case.servers, workers=case.workers, backend=backend, cases=len(alike)
            ) as tasks:
                codes = tasks.ends()
                assert set(codes.values()) == {0}, f"{codes}\n{tasks.everything()}"
        files = [finished[key] / f"{name}.{worker}" for worker in range(case.workers)]
        return [pickle.loads(file.read_bytes()) for file in files]

    return of


@each_backend
@pytest.mark.parametrize("name", cases(exact=True))
def test_the_numbers_are_those_of_plain_keras(found: Callable[..., list[Found]], backend: str, name: str) -> None:
    chief, *others = found(backend, name)
    expected_tables = 1 if name == "sequential" else 4
    assert len(chief["tables"]) == expected_tables, f"rows of {chief['tables']} have travelled"
    for key, expected in chief["plain"].items():
        assert_close(chief["job"][key], expected, TOLERANCE, key)
    for other in others:
        assert_close(other["job"]["weights"], chief["job"]["weights"], 0.0, "weights on another worker")


@each_backend
@pytest.mark.parametrize("name", cases(exact=False))
def test_workers_share_the_tables_and_the_model_learns(
    found: Callable[..., list[Found]], backend: str, name: str
) -> None:
    chief, other = found(backend, name)
    losses = chief["job"]["history"]["loss"]
    assert len(losses) == CASES[name].fit["epochs"]
    assert losses[-1] < losses[0]
    assert_close(other["job"]["weights"], chief["job"]["weights"], 0.0, "weights on another worker")
    assert chief["job"]["history"]["val_loss"][-1] == pytest.approx(chief["job"]["evaluated"][0], rel=1e-5)


@each_backend
def test_adam_leaves_alone_what_a_batch_does_not_touch(found: Callable[..., list[Found]], backend: str) -> None:
    (chief,) = found(backend, "lazy_adam")
    start = chief["job"]["start"][0]
    table, momentum, velocity = _lazy_adam(start, CASES["lazy_adam"], rate=0.05)
    assert_close(chief["job"]["weights"][0], table, TOLERANCE, "table")
    of_table = [value for value in chief["job"]["optimizer"] if value.shape == table.shape]
    assert_close(of_table[0], momentum, TOLERANCE, "momentum")
    assert_close(of_table[1], velocity, TOLERANCE, "velocity")
    untouched = np.setdiff1d(np.arange(USERS), data(CASES["lazy_adam"])[0])
    assert len(untouched) > USERS // 2
    np.testing.assert_array_equal(chief["job"]["weights"][0][untouched], start[untouched])


def _lazy_adam(table: np.ndarray, case: Case, rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kingma & Ba 2014, as Keras has it, on the rows of each batch alone."""
    table = table.astype("float64")
    momentum, velocity = np.zeros_like(table), np.zeros_like(table)
    x, y = data(case)
    step = 0
    for _ in range(2):
        for start in range(0, SAMPLES, BATCH):
            step += 1
            users, targets = x[start : start + BATCH, 0], y[start : start + BATCH]
            gradient = np.zeros_like(table)
            np.add.at(gradient, users, 2 * (table[users] - targets) / targets.size)
            rows = np.unique(users)
            momentum[rows] += (gradient[rows] - momentum[rows]) * 0.1
            velocity[rows] += (gradient[rows] ** 2 - velocity[rows]) * 0.001
            corrected = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            table[rows] -= corrected * momentum[rows] / (np.sqrt(velocity[rows]) + 1e-7)
    return table, momentum, velocity


# A job of its own for what is measured, and for what is disturbed.


@pytest.mark.slow
def test_bytes_of_a_step_do_not_grow_with_the_table(tmp_path: Path) -> None:
    heights = (10_000, 100_000, 1_000_000)
    program = ["-m", "tests.parameter_server.embedding_traffic", str(tmp_path), *map(str, heights)]
    with Tasks(tmp_path, program, servers=2, workers=1, backend=FIRST) as tasks:
        assert set(tasks.ends().values()) == {0}, tasks.everything()
    lines = (tmp_path / "traffic").read_text().splitlines()
    taken = {int(height): (float(sent), float(received)) for height, sent, received in map(str.split, lines)}
    assert set(taken) == set(heights)
    for sent, received in taken.values():
        assert sent == pytest.approx(taken[heights[0]][0], rel=0.02)
        assert received == pytest.approx(taken[heights[0]][1], rel=0.02)
        assert sent + received < 100_000, "64 rows of 128 bytes, there and back, and a small network"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_the_batch_of_a_killed_worker_is_trained_by_another(tmp_path: Path, kind: str) -> None:
    program = ["-m", "tests.parameter_server.embedding_traffic", str(tmp_path), kind]
    with Tasks(tmp_path, program, servers=2, workers=3, backend=FIRST) as tasks:
        tasks.wait_for((tmp_path / "2.epoch").exists, "worker 2 trains")
        tasks.send("worker/2", signal.SIGKILL)
        survivors = ("worker/0", "worker/1", "ps/0", "ps/1")
        assert tasks.ends(*survivors) == dict.fromkeys(survivors, 0), tasks.everything()
    steps, finite = (tmp_path / "0.end").read_text().split()
    assert (int(steps), finite) == (12 * 64, "True"), "every batch of every epoch, once"


# What needs no job.


def a_model(keras: Any) -> Any:
    items = keras.Input((3,), dtype="int32")
    table = keras.layers.Embedding(50, 4, name="table", mask_zero=True)
    return keras.Model(items, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(table(items))))


def _find(model: Any, optimizer: Any = None) -> list[Any]:
    import keras

    from phalanx.keras_compat.variables.optimizer_slots import slots_of_model
    from phalanx.training.sparse_embeddings import find_tables

    model.compile(optimizer or keras.optimizers.SGD(), "mse")
    model.optimizer.build(model.trainable_variables)
    return find_tables(model, slots_of_model(model.optimizer, model.trainable_variables))


class _Engine:
    """The variables themselves."""

    def __init__(self) -> None:
        self.retraced = 0

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def retrace(self) -> None:
        self.retraced += 1

    def write(self, values: Any) -> None:
        for variable, value in values:
            variable.assign(value)


def test_a_layer_with_rows_gives_what_the_whole_one_gives() -> None:
    import keras

    from phalanx.training.sparse_embeddings import SparseEmbeddings

    model, engine = a_model(keras), _Engine()
    paths = [variable.path for variable in model.variables]
    rows = SparseEmbeddings(model, _find(model))
    random = np.random.default_rng(0)
    whole = model.get_weights()[0]
    for room, size in ((8, 2), (50, 30), (50, 3)):  # the second needs more
        x = random.integers(-50, 50, (size, 3)).astype("int32")
        x[0, 0] = 0
        expected = keras.ops.convert_to_numpy(model(x))
        (numbers,) = rows.numbers((x, None, None))
        np.testing.assert_array_equal(numbers, np.unique(x % 50))
        rows.load(engine, [numbers], [whole[numbers]])
        assert model.trainable_variables[0].shape[0] == room
        np.testing.assert_allclose(keras.ops.convert_to_numpy(model(x)), expected, rtol=1e-5, atol=1e-6)
        rows.restore_tables()
    assert engine.retraced == 2
    np.testing.assert_array_equal(model.get_weights()[0], whole)
    assert [variable.path for variable in model.variables] == paths


def test_what_looks_at_a_table_that_is_not_there_is_told(tmp_path: Path) -> None:
    import keras

    from phalanx.errors import UnsupportedError
    from phalanx.training.sparse_embeddings import SparseEmbeddings

    model = a_model(keras)
    rows = SparseEmbeddings(model, _find(model))
    (numbers,) = rows.numbers((np.array([[1, 2, 3]], "int32"), None, None))
    rows.load(_Engine(), [numbers], [np.zeros((3, 4), "float32")])
    with pytest.raises(UnsupportedError, match="cannot be saved between two batches"):
        model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(UnsupportedError, match=re.escape("embeddings` [50, 4] is not in this process")):
        keras.ops.matmul(np.zeros((1, 4), "float32"), keras.ops.transpose(model.get_layer("table").embeddings))
    assert np.isnan(keras.ops.convert_to_numpy(model(np.array([[1, 2, 9]], "int32")))).all(), "9 is not among the rows"
    rows.restore_tables()
    model.save_weights(tmp_path / "model.weights.h5")


@pytest.mark.parametrize(("number", "shown"), [(50, 50), (-51, -51)])
def test_a_number_outside_of_the_table_is_named(number: int, shown: int) -> None:
    import keras

    from phalanx.errors import ConfigurationError
    from phalanx.training.sparse_embeddings import SparseEmbeddings

    model = a_model(keras)
    rows = SparseEmbeddings(model, _find(model))
    with pytest.raises(ConfigurationError, match=rf"layer `table` holds the number {shown}; its table has 50 rows"):
        rows.numbers((np.array([[1, 2, number]]), None, None))


def _in_a_class(keras: Any) -> Any:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(50, 4)
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(self.table(x))

    model = Model()
    model(np.zeros((1, 3), "int32"))
    return model


def _with(keras: Any, after: Callable[[Any, Any], Any] = lambda x, y: y, **options: Any) -> Any:
    items = keras.Input((3,), dtype="int32")
    table = keras.layers.Embedding(50, 4, **options)
    return keras.Model(items, after(table, table(items)))


def _tied(keras: Any) -> Any:
    return _with(keras, lambda table, y: keras.ops.tensordot(y, table.embeddings, [[2], [1]]))


def _from_weights(keras: Any) -> Any:
    inputs = keras.Input((3,))
    numbers = keras.ops.argmax(keras.layers.Dense(50, name="choose")(inputs), axis=-1)
    return keras.Model(inputs, keras.layers.Embedding(50, 4)(numbers))


def _nested(keras: Any) -> Any:
    items = keras.Input((3,), dtype="int32")
    inner = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(50, 4)])
    return keras.Model(items, keras.layers.Dense(1)(inner(items)))


def _own_step(keras: Any) -> Any:
    class Model(keras.Model):
        def train_step(self, *arguments: Any) -> Any:
            return super().train_step(*arguments)

    plain = a_model(keras)
    return Model(plain.inputs, plain.outputs)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (_in_a_class, "not made of layers in a graph"),
        (_own_step, "overrides `train_step`"),
        (_nested, "inside another layer or model"),
        (_tied, "an operation of the model uses it as well"),
        (_from_weights, "depends on `choose`, which has weights"),
        (lambda keras: _with(keras, embeddings_regularizer="l2"), "has a regularizer"),
        (lambda keras: _with(keras, embeddings_constraint="unit_norm"), "has a constraint"),
        (lambda keras: _with(keras), ""),
    ],
)
def test_a_table_that_must_travel_whole_says_why(model: Callable[[Any], Any], problem: str) -> None:
    import keras

    (table,) = _find(model(keras))
    assert problem in table.problem
    assert bool(problem) == bool(table.problem)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Lamb", {}, "computes with a variable as a whole"),
        ("Adam", {"use_ema": True}, "averages weights"),
        ("Adam", {"gradient_accumulation_steps": 2}, "accumulates gradients"),
        ("Ftrl", {}, ""),
    ],
)
def test_an_optimizer_that_needs_whole_tables_says_why(name: str, options: dict[str, Any], problem: str) -> None:
    import keras

    (table,) = _find(a_model(keras), getattr(keras.optimizers, name)(**options))
    assert problem in table.problem
    assert bool(problem) == bool(table.problem)


def test_tables_that_are_worth_it_are_chosen(caplog: pytest.LogCaptureFixture) -> None:
    import keras

    from phalanx.training.sparse_embeddings import select_tables

    def table(rows: int, width: int, **options: Any) -> Any:
        inputs = keras.Input((1,), dtype="int32")
        (found,) = _find(keras.Model(inputs, keras.layers.Embedding(rows, width, **options)(inputs)))
        return found

    large, small = table(100_000, 16), table(1000, 16)
    whole = table(300_000, 16, embeddings_regularizer="l2")
    assert select_tables([large, small, whole], False, lambda _: [64, 64]) == []
    assert select_tables([large, small, whole], "auto", lambda _: [64, 64]) == [large]
    assert select_tables([large], "auto", lambda _: [10_000]) == [], "a batch uses much of it"
    assert select_tables([large, small, whole], True, lambda _: [64, 64]) == [large, small]
    assert "[300000, 16] are sent at every step, because it has a regularizer" in caplog.text


def test_rows_of_several_workers_are_summed_by_number() -> None:
    from phalanx.parameter_server.table_rows import TableRows, weighted_sum

    left = TableRows(np.array([1, 4], "int32"), np.array([[1.0], [2.0]], "float32"))
    right = TableRows(np.array([0, 4], "int32"), np.array([[3.0], [4.0]], "float32"))
    idle = TableRows(np.array([9], "int32"), np.array([[5.0]], "float32"))
    merged = weighted_sum([left, right, idle], [0.25, 0.75, 0.0])
    np.testing.assert_array_equal(merged.numbers, [0, 1, 4])
    np.testing.assert_allclose(merged.values, [[2.25], [0.25], [3.5]])


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad", "Ftrl", "Nadam", "Lion", "Adadelta"])
def test_where_every_row_is_touched_rows_are_updated_as_tables(name: str) -> None:
    import json

    import keras

    from phalanx.engines import make_updater
    from phalanx.engines.updater import UpdaterPiece
    from phalanx.parameter_server.server.embedding_tables import EmbeddingTableUpdater
    from phalanx.parameter_server.table_rows import TableRows

    random = np.random.default_rng(0)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = json.dumps(keras.saving.serialize_keras_object(getattr(keras.optimizers, name)(0.1, **options)))
    pieces = [
        UpdaterPiece("dense", random.normal(size=(3, 2)).astype("float32"), None, True),
        UpdaterPiece("table", random.normal(size=(200, 2)).astype("float32"), None, True),
    ]
    whole = make_updater(optimizer, pieces, ungrouped=[0, 1])
    by_rows = EmbeddingTableUpdater(optimizer, [piece._replace(value=piece.value.copy()) for piece in pieces], [1])
    by_rows.load_optimizer(
        [dict(zip(whole.slots, whole.optimizer_values(), strict=True))[slot] for slot in by_rows.slots]
    )
    numbers = np.arange(200, dtype="int32")
    for _ in range(3):
        gradients = [random.normal(size=piece.value.shape).astype("float32") for piece in pieces]
        whole.apply(gradients)
        by_rows.apply([gradients[0], TableRows(numbers, gradients[1])])
    assert_close([*by_rows.values(), *by_rows.tables()], whole.values(), 1e-5, "values")
    state = dict(zip(whole.slots, whole.optimizer_values(), strict=True))
    assert set(by_rows.slots) == state.keys()
    assert_close(by_rows.optimizer_values(), [state[slot] for slot in by_rows.slots], 1e-5, "state")
    slots, values = by_rows.without_tables()
    assert set(slots) == {slot for slot in state if slot.variable != 1}
    assert_close(values, [state[slot] for slot in slots], 1e-5)
