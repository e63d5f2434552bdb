"""Jobs on bad networks: late, lost and waiting packets change how long a job takes, and nothing else."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.job import Shape
from tests.chaos.schedule import Fault, Kind, Plan
from tests.chaos.trial import trial, undisturbed
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import finish
from tests.support.network import Network
from tests.support.programs import environment
from tests.support.weather import LINE_S, Way, Weather

RAIN = Weather(delay_ms=25, jitter_ms=10)
STORM = Weather(delay_ms=50, jitter_ms=25, loss=0.01, mbits=8)
"""Between two hosts, whose packets go through two cables: 100 to 150 ms each way, 2 % lost, 1 MB/s."""
NARROW = Weather(mbits=0.5)
BOUND_S = 400.0


# The weather itself.


def arrivals(weather: Weather, sizes: list[int], times: list[float]) -> list[float | None]:
    way = Way(weather, 0, random.Random(1))
    return [way.arrival(size, now) for size, now in zip(sizes, times, strict=True)]


def test_frames_are_late_and_keep_their_order() -> None:
    times = [index * 1e-4 for index in range(1000)]
    found = arrivals(Weather(delay_ms=10, jitter_ms=5), [100] * 1000, times)
    assert found == sorted(found)
    late = [at - now for at, now in zip(found, times, strict=True)]
    assert 0.010 <= min(late) < max(late) <= 0.0151


def test_some_frames_are_lost() -> None:
    found = arrivals(Weather(loss=0.1), [100] * 5000, [0.0] * 5000)
    assert 400 < found.count(None) < 600


def test_a_cable_carries_so_much_in_a_second_and_no_endless_line() -> None:
    found = arrivals(Weather(mbits=8), [1000] * 3000, [0.0] * 3000)
    arrived = [at for at in found if at is not None]
    assert np.allclose(np.diff(arrived), 1e-3)
    assert abs(arrived[-1] - LINE_S) < 0.01


# Jobs.


def run(folder: Path, weather: Weather, *arguments: str, backend: str = FIRST, hosts: int = 2) -> str:
    """`phalanx run` of a job with a host for each task, which has to succeed; what it wrote."""
    if problem := Network.problem(weather):
        pytest.skip(problem)
    with Network(hosts, weather) as network:
        prefix, variables = network.launcher(folder)
        code, output = finish(
            [*prefix, sys.executable, "-m", "phalanx", "run", "--hosts", network.slots, *arguments],
            {**environment(backend), **variables},
            bound_s=BOUND_S,
        )
    assert code == 0, output
    return output


def train(folder: Path, weather: Weather, kind: str, *arguments: str, hosts: int, backend: str = FIRST) -> Any:
    folder.mkdir()
    path = folder / "result.json"
    run(folder, weather, *arguments, "-m", "tests.weather.program", str(path), kind, hosts=hosts, backend=backend)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The result of one process, by backend."""
    found: dict[str, Any] = {}

    def result(backend: str) -> Any:
        if backend not in found:
            path = tmp_path_factory.mktemp(backend) / "result.json"
            program = [sys.executable, "-m", "tests.weather.program", str(path), "replicas"]
            code, output = finish(program, environment(backend), bound_s=BOUND_S)
            assert code == 0, output
            found[backend] = json.loads(path.read_text())
        return found[backend]

    return result


def assert_same(result: Any, expected: Any) -> None:
    assert np.allclose(result["losses"], expected["losses"], atol=1e-4)
    assert np.allclose(result["weights"], expected["weights"], atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_in_the_rain(tmp_path: Path, alone: Callable[[str], Any]) -> None:
    assert_same(train(tmp_path / "job", RAIN, "replicas", "--workers", "2", hosts=2), alone(FIRST))


@pytest.mark.timeout(600)
def test_the_last_words_of_who_leaves_arrive(tmp_path: Path) -> None:
    """What the others send while they wait for them must not make the kernel forget them."""
    assert train(tmp_path / "job", NARROW, "leaving", "--workers", "2", hosts=2) == {"whole": True}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_in_a_storm(tmp_path: Path, alone: Callable[[str], Any], backend: str) -> None:
    result = train(tmp_path / "job", STORM, "replicas", "--workers", "3", hosts=3, backend=backend)
    assert_same(result, alone(backend))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_servers_in_a_storm(tmp_path: Path, alone: Callable[[str], Any], backend: str) -> None:
    """Synchronous, with copies: each update goes through both servers."""
    result = train(tmp_path / "job", STORM, "synchronous", "--ps", "2", "--workers", "2", hosts=4, backend=backend)
    assert_same(result, alone(backend))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_asynchronous_servers_in_a_storm(tmp_path: Path) -> None:
    losses = train(tmp_path / "job", STORM, "asynchronous", "--ps", "1", "--workers", "2", hosts=3)["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_coordinator_in_a_storm(tmp_path: Path) -> None:
    result = train(tmp_path / "job", STORM, "coordinator", "--ps", "1", "--chief", "--workers", "2", hosts=4)
    assert result == {"values": list(range(10))}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_doctors_measure_each_other_in_a_storm(tmp_path: Path) -> None:
    output = run(tmp_path, STORM, "--workers", "3", "-m", "phalanx", "doctor", hosts=3)
    assert output.count("No problem found") == 3
    assert output.count(" ms") >= 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chief", [False, True], ids=["a worker", "the chief"])
def test_a_member_is_killed_in_a_storm(tmp_path: Path, chief: bool) -> None:
    """Those who are left go on, it comes back, and the model is that of an undisturbed job."""
    if problem := Network.problem(STORM):
        pytest.skip(problem)
    shape = Shape(FIRST, epochs=2, samples=720, timeout_s=15.0)
    expected = undisturbed(tmp_path / "undisturbed", shape)
    plan = Plan(0, (Fault(6, Kind.KILL, chief=chief),), True, shape.timeout_s, STORM)
    verdict = trial(tmp_path / "job", shape, plan, expected)
    print(verdict)
    assert not verdict.violations, f"{verdict}\n{(tmp_path / 'job' / 'output.log').read_text(errors='replace')}"
    assert len(verdict.done) == 1
