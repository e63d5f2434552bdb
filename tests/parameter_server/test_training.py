"""`fit` with parameter servers, in real jobs, against plain Keras."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parameter_server.cases import CASES
from tests.parameter_server.tasks import Tasks
from tests.support.backends import BACKENDS, FIRST
from tests.training.compare import assert_close

pytestmark = pytest.mark.timeout(900)

SERVERS = 2
QUICK = ("synchronous_in_pieces_clipped",)
"""On every backend. All other cases are slow: a case that is quick runs nearly the same code."""
QUICK_ON_THE_FIRST = (*QUICK, "synchronous_with_own_train_step", "asynchronous")
"""Who computes the gradients, and when servers apply them, is the same for all backends. Of a worker that is alone,
`test_embedding_rows` has the numbers."""
Found = dict[str, Any]
TOLERANCE = 1e-4
BATCHES = 6  # of an epoch: 101 samples in batches of 20


def _quick(backend: str) -> tuple[str, ...]:
    return QUICK_ON_THE_FIRST if backend == FIRST else QUICK


def on_each_backend(*, exact: bool, refused: bool = False) -> pytest.MarkDecorator:
    """All cases with exact numbers, or all others, on all backends; or those that end with an error."""

    names = [name for name, case in CASES.items() if case.exact is exact and bool(case.error) is refused]
    return pytest.mark.parametrize(
        ("backend", "name"),
        [
            pytest.param(backend, name, marks=[] if name in _quick(backend) else pytest.mark.slow)
            for backend in BACKENDS
            for name in names
        ],
    )


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[Found]]:
    """What each worker found in a case; all cases that were selected and have as many workers run in one job."""
    selected: dict[str, set[str]] = {}
    for item in request.session.items:
        if item.module is request.module:
            selected.setdefault(item.callspec.params["backend"], set()).add(item.callspec.params["name"])
    finished: dict[tuple[str, int], Path] = {}

    def of(backend: str, name: str) -> list[Found]:
        workers = CASES[name].workers
        if (backend, workers) not in finished:
            folder = finished[backend, workers] = tmp_path_factory.mktemp(f"{backend}-{workers}")
            names = [name for name in CASES if CASES[name].workers == workers and name in selected[backend]]
            program = ["-m", "tests.parameter_server.cases", str(folder), *names]
            with Tasks(folder, program, servers=SERVERS, workers=workers, backend=backend, cases=len(names)) as tasks:
                try:
                    codes = tasks.ends()
                finally:
                    (folder / "said").write_text(tasks.everything())
                assert set(codes.values()) == {0}, f"{codes}\n{tasks.everything()}"
        folder = finished[backend, workers]
        files = [folder / f"{name}.{worker}" for worker in range(workers)]
        assert all(file.exists() for file in files), (folder / "said").read_text()
        return [pickle.loads(file.read_bytes()) for file in files]

    return of


@on_each_backend(exact=True)
def test_the_numbers_are_those_of_one_process(found: Callable[..., list[Found]], backend: str, name: str) -> None:
    chief, *others = found(backend, name)
    for key, expected in chief["plain"].items():
        assert_close(chief["job"][key], expected, TOLERANCE, key)
    for other in others:
        assert_close(other["job"]["weights"], chief["job"]["weights"], 0.0, "weights on another worker")
        assert validation_of(other) == validation_of(chief)


def validation_of(found: Found) -> dict[str, list[float]]:
    """What a worker's history has of the chief's validation."""
    return {name: values for name, values in found["job"]["history"].items() if name.startswith("val_")}


@on_each_backend(exact=True, refused=True)
def test_what_is_not_the_same_on_parts_is_refused(found: Callable[..., list[str]], backend: str, name: str) -> None:
    for error in found(backend, name):
        assert CASES[name].error in error


@on_each_backend(exact=False)
def test_workers_share_the_batches_and_the_model_learns(
    found: Callable[..., list[Found]], backend: str, name: str
) -> None:
    chief, *others = found(backend, name)
    epochs = CASES[name].fit.get("epochs", 2)
    history = chief["job"]["history"]
    assert len(history["loss"]) == epochs
    assert history["loss"][-1] < history["loss"][0]
    # Every batch once in each epoch, no matter which worker took it.
    assert chief["steps"] == epochs * CASES[name].fit.get("steps_per_epoch", BATCHES)
    assert int(chief["job"]["optimizer"][0]) == chief["steps"], "what schedules see are the job's steps"
    for other in others:
        for own, chiefs in zip(other["job"]["weights"], chief["job"]["weights"], strict=True):
            np.testing.assert_array_equal(own, chiefs)
        # A worker that is late may have been given those of a later epoch.
        assert validation_of(other).keys() <= validation_of(chief).keys()
        assert set(validation_of(other).get("val_loss", [])) <= set(validation_of(chief).get("val_loss", []))
        # Of an epoch in which it had no batch a worker has no logs, and not a loss of 0.
        losses = other["job"]["history"].get("loss", [])
        assert all(loss > 0 for loss in losses), losses
