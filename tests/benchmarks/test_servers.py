"""The benchmarks of parameter servers: what they make of their measurements, and that their programs run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.server_calls import ADAM, BARE, Calls
from benchmarks.servers import Growth, Limits, markdown, save
from tests.support.backends import BACKENDS
from tests.support.commands import ROOT

BOUND_S = 150


def limits() -> Limits:
    machine = {
        "processor": "a processor",
        "cores_used": 2,
        "cores": 4,
        "system": "a system",
        "matmul_gflops_per_core": 100,
        "load_before": 0.1,
    }
    return Limits(
        "2026-01-01",
        machine,
        {"keras": "3"},
        gloo_ms=[1.0, 20.0, 1.2],
        calls=[
            *[Calls(BARE, 1, ms, 1e3 / ms, 0.25) for ms in (0.4, 10.0, 0.8)],
            Calls(ADAM, 1, 2.0, 500.0, 1.25),
            Calls(ADAM, 2, 3.0, 700.0, 1.25),
        ],
        growth=[Growth(1, 1, 1000.0), Growth(1, 2, 1500.0), Growth(2, 2, 1800.0)],
    )


def test_bars_are_formed_round_by_round_and_from_the_servers_processor_time() -> None:
    assert [(measured, met) for _, measured, met in limits().verdicts()] == [
        ("0.50", True),  # the median of 0.40, 0.50 and 0.67
        ("4,000", True),
        ("800", False),
    ]


def test_the_page_shows_calls_growth_and_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = limits()
    found.failures.append("a training: hung\nmore")
    save(found, "page", tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert page in capsys.readouterr().out
    assert "| bare | 1 | 0.800 | 1,250 | 0.250 | 4,000 |" in page
    assert "| 1 | 1,000 | 1,500 |" in page
    assert "| 2 |  | 1,800 |" in page
    assert "keeps up with at least 1000 updates/s | 800 | NO |" in page
    assert "- a training: hung\n" in page
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_results_survive_their_file() -> None:
    found = limits()
    again = Limits.from_dict(json.loads(json.dumps(asdict(found))))
    assert again == found
    assert markdown(again) == markdown(found)


def _python(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PHALANX_", "BENCH_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not {"jax", "torch"} <= set(BACKENDS), reason="a server on JAX, and gloo of PyTorch")
def test_a_server_is_timed_against_gloo(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    _python("-m", "benchmarks.server_calls", "--calls", "5", "--clients", "2", "--json", str(path))
    found = json.loads(path.read_text())
    assert found["gloo_ms"] > 0
    assert [(each["optimizer"], each["clients"]) for each in found["calls"]] == [(BARE, 2), (ADAM, 2)]
    assert all(each["ms"] > 0 and each["updates_per_s"] > 0 for each in found["calls"])


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="they run on JAX")
@pytest.mark.parametrize("tool", ["servers-jax", "mirrored-jax"])
def test_both_ways_to_train_are_timed_with_a_slow_worker(tool: str) -> None:
    figures = json.loads(_python("-m", "benchmarks.job", tool, "uneven64", "--windows", "1"))
    assert len(figures["ms_per_step"]) == 1
    assert figures["first_step_s"] > 0
