"""Functions scheduled on workers, in real jobs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.coordinator.cases import CASES
from tests.coordinator.serving import SERVERS
from tests.parameter_server.tasks import Tasks
from tests.support.backends import BACKENDS, FIRST
from tests.training.compare import assert_close

pytestmark = [
    pytest.mark.parametrize(
        "backend", [pytest.param(name, marks=[] if name == FIRST else pytest.mark.slow) for name in BACKENDS]
    ),
    pytest.mark.timeout(700),
]

ALONE = ("training_like_one_process",)
"""Cases for a single worker, whose chief is worker 0."""
SERVED = ("made_later",)
"""Cases for workers that run no program of their own."""
Found = Callable[[str, str], Any]


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["programs", "servers"])
def serves(request: pytest.FixtureRequest) -> bool:
    """Whether the workers run no program of their own."""
    return bool(request.param)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, serves: bool) -> Found:
    """What the chief found in a case; all cases for as many workers run in one job."""
    finished: dict[tuple[str, bool], Path] = {}
    settings = SERVERS if serves else {}

    def of(backend: str, name: str) -> Any:
        alone = name in ALONE
        if (name in SERVED and not settings) or (alone and settings):
            pytest.skip("the case is for other workers")
        if (backend, alone) not in finished:
            folder = finished[backend, alone] = tmp_path_factory.mktemp(f"{backend}-{alone}")
            names = [case for case in CASES if (case in ALONE) == alone and (settings or case not in SERVED)]
            program = ["-m", "tests.coordinator.cases", str(folder), *names]
            # The chief is a task of its own in one job, and worker 0 in the other.
            servers = 1 + alone
            with Tasks(
                folder,
                program,
                servers=servers,
                workers=2,
                backend=backend,
                chief=not alone,
                settings=settings,
                cases=len(names),
            ) as tasks:
                codes: dict[str, int] = {}
                try:
                    codes = tasks.ends()
                finally:
                    (folder / "said").write_text(f"{codes}\n{tasks.everything()}")
        file = finished[backend, alone] / name
        assert file.exists(), (finished[backend, alone] / "said").read_text()
        return pickle.loads(file.read_bytes())

    return of


def test_results_come_back(found: Found, backend: str) -> None:
    assert found(backend, "results") == {
        "fetched": {"all": [(n + 10) * 2 for n in range(20)], "other": 5},
        "done": True,
    }


def test_results_can_be_arguments(found: Found, backend: str) -> None:
    result = found(backend, "results_are_arguments")
    np.testing.assert_array_equal(result.pop("first"), np.arange(4))
    assert result.pop("third") == [1, 11]
    assert result == {"is_array": True, "is_tensor": True, "second": 11, "arguments are tensors": True}


def test_all_workers_run_functions_and_the_chief_none(found: Found, backend: str) -> None:
    assert found(backend, "all_workers") == {"workers": 2, "chief": False}


def test_workers_drop_units_of_their_own(found: Found, backend: str) -> None:
    first, second = found(backend, "own_numbers")
    assert first != second


def test_an_error_is_raised_once_and_what_waits_is_cancelled(found: Found, backend: str) -> None:
    result = found(backend, "errors")
    kind, text, cause = result["join"]
    assert (kind, text) == ("KeyError", "'what went wrong'")
    assert "in worker/" in cause
    assert "line" in cause
    assert result["ends"] == ["CancelledError", "KeyError"]
    assert result["after"] == 1
    assert result["fetch"][:2] == result["schedule"][:2] == result["needs"][:2] == (kind, text)
    assert result["done"]


def test_what_the_chief_assigns_after_an_error_reaches_the_workers(found: Found, backend: str) -> None:
    assert found(backend, "changes_after_errors") == [{"workers": True, "chief": True}] * 2


def test_an_error_travels_also_if_its_init_has_other_arguments(found: Found, backend: str) -> None:
    kind, text, cause = found(backend, "errors_with_other_arguments")
    assert (kind, text) == ("Odd", "an odd one")
    assert "raise Odd(1, 2)" in cause


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("lock", "UnsupportedError", "cannot be sent to another task: cannot pickle '_thread.lock' object"),
        ("generator", "UnsupportedError", "An argument of what_does_not_travel.<locals>"),
        ("outside", "UnsupportedError", "was not created in strategy.scope() before the ClusterCoordinator"),
        ("late", "UnsupportedError", "was not created in strategy.scope() before the ClusterCoordinator"),
        ("called", "ConfigurationError", "schedule() got 5 to call"),
        ("result", "UnsupportedError", "The result of the function cannot be sent"),
        ("next", "UnsupportedError", "The iterators are the workers'"),
        ("run", "UnsupportedError", "for functions that a ClusterCoordinator has scheduled"),
        ("fit", "UnsupportedError", "fit() was called inside a function"),
        ("nested", "UnsupportedError", "Only the chief's program schedules functions"),
        ("exits", "PhalanxError", "A function called sys.exit(0)"),
        ("index", "RuntimeError", "was called outside of the functions that workers run"),
    ],
)
def test_what_cannot_travel_is_a_clear_error(
    found: Found, serves: bool, backend: str, what: str, kind: str, text: str
) -> None:
    if serves and what == "late":
        kind = text = ""  # workers that serve make what was made later too
    found_kind, found_text, _ = found(backend, "what_does_not_travel")[what]
    assert found_kind == kind
    assert text in found_text


def test_each_worker_has_its_own_dataset(found: Found, backend: str) -> None:
    result = found(backend, "own_datasets")
    for numbers in result["numbers"]:
        start = numbers[0] // 100 * 100
        assert numbers == list(range(start, start + len(numbers))), "the worker's own, from the start, in order"
    assert sum(map(len, result["numbers"])) == 36
    assert result["ended"][0] == "OutOfRangeError"
    assert "The data of a worker ended" in result["ended"][1]
    assert result["not made"][:2] == ("ZeroDivisionError", "division by zero")


def test_each_worker_has_its_own_values(found: Found, backend: str) -> None:
    assert all(found(backend, "own_values"))


def test_metrics_are_added_up_at_the_chief(found: Found, backend: str) -> None:
    (first, first_count, inside), (second, second_count, _) = found(backend, "metrics")
    assert (first_count, second_count) == (21, 20)
    assert first == pytest.approx((5 + 90) / 21)
    assert second == pytest.approx(4.5)
    assert inside == pytest.approx(list(range(10))), "inside a function a metric is of that function"


def test_functions_and_large_arrays_are_sent_to_a_worker_once(found: Found, backend: str) -> None:
    for calls, arrays, sums in found(backend, "functions_are_kept"):
        assert calls == list(range(1, len(calls) + 1))
        assert arrays == 1
        assert sums == {sum(range(100_000))}


def test_what_the_program_sets_after_join_is_everybodys(found: Found, backend: str) -> None:
    result = found(backend, "values_that_the_program_sets")
    assert result == {"seen": [0.5] * 4, "after": [0.5] * 4, "set by functions": [0.5] * 8}


def test_the_state_of_layers_comes_to_the_chief(found: Found, backend: str) -> None:
    result = found(backend, "state_of_layers")
    assert np.any(result["worker"])
    np.testing.assert_array_equal(result["chief"], result["worker"])
    assert result["count"] == 3


def test_the_strategy_runs_and_reduces_inside_a_function(found: Found, backend: str) -> None:
    reduced, is_current = found(backend, "run_inside")
    assert float(reduced) == 2
    assert is_current


def test_datasets_of_the_backend_are_read_on_workers(found: Found, backend: str) -> None:
    assert found(backend, "own_batches")


def test_the_servers_train(found: Found, backend: str) -> None:
    result = found(backend, "training")
    assert result["losses"][-1] < 0.6 * result["losses"][0]
    assert result["accuracy"] > 0.8
    assert result["counted"] == 96, "every sample of the last epoch, once"
    assert result["iterations"] == result["global_step"] == 12 * 6


def test_workers_without_a_program_get_what_is_made_later(found: Found, backend: str) -> None:
    result = found(backend, "made_later")
    assert result["values"] == [(2.0, True, False)] * 4
    assert result["changed"] == (6.0, True, False)
    assert result["mean"] == 3.0
    assert result["numbers"] == [[2], [1]], "what a layer has learned by adapt"


@pytest.mark.slow
def test_one_worker_trains_as_one_process(found: Found, backend: str) -> None:
    result = found(backend, "training_like_one_process")
    for kind in ("weights", "optimizer", "metric"):
        assert_close(result[f"job {kind}"], result[f"plain {kind}"], 1e-4, kind)
