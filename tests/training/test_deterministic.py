"""With `CommunicationOptions(deterministic=True)` no bit depends on the number of workers."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import compilation, fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import finish
from tests.support.programs import environment
from tests.training.compare import assert_close

BOUND_S = 600.0
"""Against hanging only."""
PROGRAM = Path(__file__).with_name("deterministic_program.py")
ALL = ("mlp", "sequence", "rows", "convolution")
pytestmark = pytest.mark.timeout(2 * BOUND_S)

Job = Callable[..., dict[str, Any]]
backends = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in BACKENDS]
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What a job of so many workers found out, once for each backend and set of models. One worker is started without a
    launcher, and so has all cores."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def run(backend: str, workers: int, *models: str, dropout: float = 0.0, micro_batches: int = 24) -> dict[str, Any]:
        key = (backend, workers, dropout, models)
        if key not in made:
            file = tmp_path_factory.mktemp("deterministic") / "found"
            launcher = [] if workers == 1 else ["-m", "phalanx", "run", "--workers", str(workers), "--backend", backend]
            settings = environment(backend)
            if workers == 1:
                settings.pop("OMP_NUM_THREADS", None)
            if models == ALL:  # else compilation is cheap
                for variable in compilation.CHEAP:
                    settings.pop(variable, None)
            command = [sys.executable, *launcher, str(PROGRAM), str(file), str(micro_batches), str(dropout), *models]
            code, output = finish(command, settings, bound_s=BOUND_S, start=fork_server.popen)
            assert code == 0, output[-6000:]
            made[key] = pickle.loads(file.read_bytes())
        return made[key]

    return run


def assert_same_bits(found: Any, expected: Any, place: str) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), place
        for name, value in expected.items():
            assert_same_bits(found[name], value, f"{place}, {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            assert_same_bits(found[index], value, f"{place} {index}")
    else:
        found, expected = np.asarray(found), np.asarray(expected)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), place
        assert found.tobytes() == expected.tobytes(), f"{place} differs by up to {abs(found - expected).max()}"


def quick_model(backend: str) -> str:
    """All methods of a model where nothing is compiled; elsewhere `fit`, for whose sizes of batches that takes long."""
    return "mlp" if backend == FIRST else "mlp_in_fit"


@backends
def test_several_workers_train_to_the_bit_what_one_does(backend: str, job: Job) -> None:
    model = quick_model(backend)
    several, one = (job(backend, number, model, micro_batches=7) for number in (3 if backend == FIRST else 2, 1))
    assert_same_bits(several[model], one[model], model)


@backends
def test_the_numbers_are_those_of_plain_keras(backend: str, job: Job) -> None:
    model = quick_model(backend)
    found = job(backend, 1, model, micro_batches=7)
    assert_close(found[model], found[f"plain {model}"], 1e-5)


@pytest.mark.slow
@backends
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 8])
def test_any_number_of_workers_trains_to_the_bit_what_one_does(backend: str, workers: int, job: Job) -> None:
    alone, together = (job(backend, each, *ALL, dropout=0.2) for each in (1, workers))
    for name in ALL:
        assert_same_bits(together[name], alone[name], name)


@pytest.mark.slow
@backends
@pytest.mark.parametrize("model", ALL)
def test_the_numbers_of_all_models_are_those_of_plain_keras(backend: str, model: str, job: Job) -> None:
    found = job(backend, 1, *ALL)
    assert_close(found[model], found[f"plain {model}"], 1e-5)
