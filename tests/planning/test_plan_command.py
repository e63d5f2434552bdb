"""`phalanx plan` for replicas: the program is measured, ended, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.config.environment import process_environment
from phalanx.config.plan_request import PlanRequest
from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.planning import examined_program
from phalanx.planning.examined_program import MAX_REPLICAS, examine
from phalanx.planning.step_measurement import StepMeasurement
from tests.support import fork_server
from tests.support.backends import FIRST
from tests.support.commands import ROOT, finish
from tests.support.programs import environment

BOUND_S = 500.0
PROGRAM = str(ROOT / "tests/planning/program.py")
WEIGHTS = 21 * 600 + 601
MERGED = WEIGHTS + 2 * 2
"""Numbers in a step's one all-reduce: gradients, and total and count of two metrics."""


def plan(*arguments: str) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "phalanx", "plan", *arguments]
    return finish(
        command,
        environment(FIRST),
        bound_s=BOUND_S,
        start=lambda *given, **options: fork_server.popen(*given, starts_others=True, **options),
    )


@pytest.mark.timeout(560)
def test_a_program_is_measured_and_ended_before_it_writes_anything(tmp_path: Path) -> None:
    options = ("--machines", "2", "--link", "1Gbit")
    code, output = plan(PROGRAM, *options, "--", str(tmp_path), "--batch-per-replica")
    assert code == 0, output
    assert f"{WEIGHTS:,} weights on {FIRST}" in output
    rows = [line.split() for line in output[output.index("machines") :].splitlines()]
    assert [row[:3] for row in rows[1:]] == [["1", "12", "12"], ["2", "24", "12"]], output
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(560)
def test_what_a_step_merges_is_known_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": fork_server.popen})
    monkeypatch.setattr(examined_program, "subprocess", forking)
    request = PlanRequest(tmp_path / "result", replicas=4)
    found = examine([PROGRAM, str(tmp_path)], request, StepMeasurement, environment(FIRST), BOUND_S)
    assert (found.replicas, found.local_batch, found.global_batch, found.cycle) == (4, 3, 12, 1)
    assert [call.kind for call in found.collectives] == ["all_reduce"]
    assert 4 * WEIGHTS < found.merged_bytes <= 4 * (MERGED + 8)
    assert found.computed_s > 0


def test_a_program_that_trains_nothing_is_an_error_that_says_so(tmp_path: Path) -> None:
    request = PlanRequest(tmp_path / "result")
    with pytest.raises(PhalanxError, match=r"ended without a fit.*\n    nothing to train"):
        examine(["-c", "print('nothing to train')"], request, StepMeasurement, process_environment(), BOUND_S)


def test_a_program_that_fails_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    request = PlanRequest(tmp_path / "result")
    with pytest.raises(PhalanxError, match=r"exit code 3(.|\n)*no such file"):
        examine(["-c", "import sys; print('no such file'); sys.exit(3)"], request, StepMeasurement, {}, BOUND_S)


def test_a_program_that_is_killed_has_not_run_out_of_time(tmp_path: Path) -> None:
    """The kernel kills one that needs more memory than there is."""
    request = PlanRequest(tmp_path / "result")
    with pytest.raises(PhalanxError, match="was killed by SIGKILL before its fit"):
        examine(["-c", "import os; os.kill(os.getpid(), 9)"], request, StepMeasurement, {}, BOUND_S)


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    request = PlanRequest(tmp_path / "result")
    hangs = "import time; print('waits', flush=True); time.sleep(600)"
    with pytest.raises(PhalanxError, match=r"within 1 s(.|\n)*waits"):
        examine(["-c", hangs], request, StepMeasurement, {}, timeout_s=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROGRAM, "--machines", "2"], "Say what to plan for"),
        ([PROGRAM, "--machines", "2", "--link", "fast"], "100Mbit, 10Gbit"),
        ([PROGRAM, "--machines", "2", "--link", "1Gbit", "--plot", "plan.pdf"], ".svg or .png"),
        (["no_such.py", "--machines", "2", "--link", "1Gbit"], "no_such.py"),
    ],
    ids=["no link", "no rate", "no plot", "no script"],
)
def test_bad_input_is_refused_with_the_remedy(arguments: list[str], message: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from phalanx.cli.plan import plan as command

    outcome = CliRunner().invoke(command, arguments)
    assert outcome.exit_code != 0
    assert message in outcome.output + str(outcome.exception)


def test_a_program_can_be_told_of_many_replicas(tmp_path: Path) -> None:
    """The kernel limits each variable of an environment."""
    request = PlanRequest(tmp_path / "result", replicas=MAX_REPLICAS)
    tells = "import json, os; print(len(json.loads(os.environ['TF_CONFIG'])['cluster']['worker']), 'workers')"
    with pytest.raises(PhalanxError, match=f"{MAX_REPLICAS} workers"):
        examine(["-c", tells], request, StepMeasurement, {}, BOUND_S)


def test_a_request_survives_the_environment() -> None:
    request = PlanRequest(Path("/tmp/x"), 64, "v5e:2x4")
    assert PlanRequest.from_text(request.as_text()) == request
    with pytest.raises(ConfigurationError, match="PHALANX_PLAN="):
        PlanRequest.from_text("yes")
