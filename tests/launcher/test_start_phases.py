"""What is shown of a job before its first step."""

from __future__ import annotations

import io

import pytest

from phalanx.launcher.job_reporter import JobReporter
from phalanx.launcher.start_phases import StartPhases
from phalanx.monitoring.console import Console
from phalanx.monitoring.preparation import FIRST_STEP
from phalanx.monitoring.worker_figures import TaskReport
from tests.launcher.conftest import Launcher


def test_each_phase_is_shown_once_and_none_after_the_first_step() -> None:
    phases = StartPhases()
    reports = ["start of the program", "import of keras", "import of keras", "import of torch", "initial values"]
    lines = [phases.add(phase, None, None) for phase in reports]
    assert [line for line in lines if line] == ["importing keras", "importing torch"]
    assert phases.add("gradients", 0, 0) == "first step (JAX and TensorFlow compile the model)"
    assert phases.add("gradients", 0, 0) is None
    assert phases.add("import of jax", None, None) is None


@pytest.mark.parametrize("place", [(0, 3), (2, 0)])
def test_a_later_step_is_not_shown_as_the_first(place: tuple[int, int]) -> None:
    assert StartPhases().add("gradients", *place) is None


def test_no_phase_is_shown_once_the_job_is_being_ended() -> None:
    err = io.StringIO()
    reporter = JobReporter(Console(["worker/0"], io.StringIO(), err), verbose=False)
    reporter.task_reported("worker/0", 0, TaskReport("import of keras", None, None, 0.0))
    reporter.shutdown_started()
    reporter.task_reported("worker/0", 0, TaskReport(FIRST_STEP, 0, 0, 0.0))
    assert err.getvalue() == "phalanx: importing keras\n"


def test_the_import_of_a_large_library_is_a_phase_of_its_own(launcher: Launcher) -> None:
    (launcher.folder / "keras").mkdir()
    (launcher.folder / "keras" / "__init__.py").write_text("import torch\nimport sys\nsys.wait_for('go')\n")
    (launcher.folder / "keras" / "data.txt").write_text("data")
    (launcher.folder / "torch.py").write_text("")
    script = launcher.script(
        """
        import importlib.resources
        from phalanx.runtime import progress
        sys.wait_for = wait_for
        import keras
        assert progress.latest().phase == "start of the program"
        assert importlib.resources.files("keras").joinpath("data.txt").read_text() == "data"
        assert "exec_module" not in vars(keras.__spec__.loader)
        """
    )
    process = launcher.start_run("-n", "1", script, bufsize=1)
    assert process.stderr is not None
    assert process.stderr.readline() == "phalanx: starting 1 worker\n"
    assert process.stderr.readline() == "phalanx: importing keras\n"
    (launcher.folder / "go").touch()
    assert process.wait(30) == 0, process.stderr.read()
