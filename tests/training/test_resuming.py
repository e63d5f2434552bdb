"""Jobs that are killed as a whole, or told to end, and go on from their checkpoint: they end with the model of a job
that nothing happened to."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.errors import PreemptedError
from tests.launcher.conftest import Launcher, wait_until
from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST, slow_after_the_first
from tests.support.programs import environment

pytestmark = pytest.mark.timeout(900)
PROGRAM = str(Path(__file__).with_name("resumed_program.py"))
START_BOUND_S = 200.0
END_BOUND_S = 300.0


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    launcher.environment.pop("PHALANX_GRACE")
    launcher.environment |= environment(FIRST)
    launcher.popen = fork_server.popen
    try:
        yield launcher
        launcher.assert_all_gone()
    finally:
        for process in launcher.processes():
            process.kill()


_references: dict[tuple[str, ...], dict[str, Any]] = {}


class Program:
    """The program of the tests, started in a folder once and again."""

    def __init__(self, launcher: Launcher, backend: str, *arguments: str, folder: str = "checkpoints"):
        launcher.environment |= environment(backend)
        self.launcher = launcher
        self.folder = launcher.folder / folder
        self.result = launcher.folder / f"{folder}.npz"
        self._arguments = (PROGRAM, str(self.folder), str(self.result), *arguments)

    def start(self, workers: str, *options: str, **variables: str) -> Any:
        settings = {**self.launcher.environment, **variables}
        return self.launcher.start_run("--workers", workers, *options, *self._arguments, env=settings)

    def run(self, workers: str, *options: str, code: int = 0, **variables: str) -> str:
        process = self.start(workers, *options, **variables)
        return self.end(process, code)

    def end(self, process: Any, code: int) -> str:
        out, err = process.communicate(timeout=END_BOUND_S)
        assert process.returncode == code, out + err
        return out + err

    def reaches(self, steps: int, process: Any) -> None:
        """Wait until this life of the job has made so many steps."""
        progress = self.folder / "progress"

        def there() -> bool:
            assert process.poll() is None, process.communicate()
            return progress.exists() and int(progress.read_text() or 0) >= steps

        wait_until(there, bound_s=START_BOUND_S)

    def worker(self, rank: int) -> int:
        """The process id of a rank."""
        return int((self.folder / f"process.{rank}").read_text())

    def equals(self, reference: dict[str, Any]) -> None:
        with np.load(self.result) as found:
            self.is_whole(found, reference)
            for name in found.files:
                np.testing.assert_allclose(found[name], reference[name], atol=1e-3, err_msg=name)

    @staticmethod
    def is_whole(found: Any, reference: dict[str, Any]) -> None:
        """Every sample once in each epoch, and all epochs."""
        assert found["once"]
        assert list(found["epochs"]) == list(reference["epochs"])


def undisturbed(launcher: Launcher, backend: str, workers: str = "2", *arguments: str) -> dict[str, Any]:
    key = (backend, workers, *arguments)
    if key not in _references:
        program = Program(launcher, backend, *arguments, folder="undisturbed")
        program.run(workers)
        with np.load(program.result) as found:
            _references[key] = {name: found[name] for name in found.files}
    return _references[key]


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_a_job_that_lost_a_worker_is_started_again_as_a_whole(launcher: Launcher, backend: str) -> None:
    reference = undisturbed(launcher, backend)
    program = Program(launcher, backend)
    step, victim = random.randint(8, 50), random.randint(0, 1)
    said = program.run("2", "--max-restarts", "2", DIE=str(step), VICTIM=str(victim))
    assert "Starting the whole job again (1 of 2)" in said, (step, victim)
    program.equals(reference)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("diloco",), ("topk",)])
@pytest.mark.parametrize("workers", ["2", pytest.param("2:2", marks=pytest.mark.slow)])
def test_what_replicas_keep_to_themselves_is_saved(
    launcher: Launcher, arguments: tuple[str, ...], workers: str
) -> None:
    reference = undisturbed(launcher, FIRST, workers, *arguments)
    program = Program(launcher, FIRST, *arguments)
    said = program.run(workers, "--max-restarts", "1", "--restarts", "0", DIE="22", VICTIM="0", EVERY="4")
    assert "Starting the whole job again (1 of 1)" in said
    if "topk" in arguments:
        # Half of what two ranks have left over is not what each had; but it is not lost.
        with np.load(program.result) as found:
            program.is_whole(found, reference)
            np.testing.assert_allclose(found["losses"], reference["losses"], rtol=0.05)
    else:
        program.equals(reference)


def kill_everything(launcher: Launcher, process: Any) -> None:
    """The launcher first: what it would do must not help."""
    os.kill(process.pid, signal.SIGKILL)
    for each in launcher.processes():
        each.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2", "2:2"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arguments", [(), ("dropout",)])
def test_everything_killed_and_started_again(
    launcher: Launcher, backend: str, workers: str, arguments: tuple[str, ...]
) -> None:
    reference = undisturbed(launcher, backend, workers, *arguments)
    program = Program(launcher, backend, *arguments)
    for _ in range(2):
        process = program.start(workers, PAUSE="0.05")
        program.reaches(random.randint(5, 20), process)
        kill_everything(launcher, process)
        (program.folder / "progress").unlink()
    program.run(workers)
    program.equals(reference)


@pytest.mark.slow
def test_a_job_goes_on_with_another_number_of_workers(launcher: Launcher) -> None:
    reference = undisturbed(launcher, FIRST)
    program = Program(launcher, FIRST)
    for workers, step in (("3", 17), ("1", 20), ("2:2", 12)):
        process = program.start(workers, PAUSE="0.05")
        program.reaches(step, process)
        kill_everything(launcher, process)
        (program.folder / "progress").unlink()
    program.run("2")
    program.equals(reference)


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ("2", "worker"),
        pytest.param("2", "launcher", marks=pytest.mark.slow),
        pytest.param("2:2", "worker", marks=pytest.mark.slow),
        pytest.param("2:2", "launcher", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_is_told_to_end_saves_and_goes_on_when_started_again(
    launcher: Launcher, workers: str, told: str
) -> None:
    reference = undisturbed(launcher, FIRST, workers)
    program = Program(launcher, FIRST)
    process = program.start(workers, PAUSE="0.2", EVERY="1000")
    program.reaches(19, process)
    os.kill(process.pid if told == "launcher" else program.worker(1), signal.SIGTERM)
    said = program.end(process, PreemptedError.exit_code)
    assert "The job was preempted after" in said
    assert "Traceback" not in said
    assert len(list(program.folder.glob("*.weights.h5"))) == 1
    program.run(workers)
    program.equals(reference)


@pytest.mark.slow
def test_interrupted_when_it_was_told_to_end_it_ends_at_once(launcher: Launcher) -> None:
    program = Program(launcher, FIRST)
    process = program.start("2", PAUSE="5", EVERY="1000")
    program.reaches(1, process)
    os.kill(process.pid, signal.SIGTERM)
    signal.sigtimedwait([], 0.5)  # else Python hears of SIGINT first
    os.kill(process.pid, signal.SIGINT)
    program.end(process, 128 + signal.SIGTERM)
    assert not list(program.folder.glob("*.weights.h5"))


@pytest.mark.slow
def test_another_signal_can_be_chosen(launcher: Launcher) -> None:
    program = Program(launcher, FIRST)
    process = program.start("2", "--preemption-signal", "USR1", PAUSE="0.05", EVERY="1000")
    program.reaches(3, process)
    os.kill(process.pid, signal.SIGUSR1)
    program.end(process, PreemptedError.exit_code)


@pytest.mark.slow
def test_a_job_that_dies_again_and_again_is_given_up(launcher: Launcher) -> None:
    script = launcher.script("raise SystemExit(7)")
    ended = launcher.run("--workers", "1", "--max-restarts", "20", script)
    assert ended.code == 7
    assert "Starting the whole job again (4 of 20)" in ended.out + ended.err
    # Four, unless one of the lives was long: on a busy machine even a short script may take seconds to start.
    assert "(12 of 20)" not in ended.out + ended.err
    ended = launcher.run("--workers", "1", "--max-restarts", "2", launcher.script("import os; os.kill(os.getpid(), 9)"))
    assert ended.code == 128 + signal.SIGKILL
    assert "(2 of 2)" in ended.out + ended.err


FINISHED = """
import sys
import keras
import numpy as np
import phalanx
import torch

keras.utils.set_random_seed(3)
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.normal(size=(32, 6)).astype("float32")
checkpoint = phalanx.callbacks.Checkpoint(sys.argv[1])
model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[checkpoint])
drawn = torch.randn(32, 6).numpy()
history = model.fit(drawn, x[:, :1], batch_size=8, epochs=2, verbose=0).history
if strategy.is_chief:
    print("then", drawn[0].tolist(), history)
"""


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="elsewhere, layers do not draw from the program's generators")
def test_a_fit_that_is_over_leaves_the_random_numbers_that_it_left_when_it_ran(launcher: Launcher) -> None:
    launcher.environment |= environment("torch")
    script, folder = launcher.script(FINISHED), str(launcher.folder / "checkpoints")
    first, second = (launcher.run("--workers", "2", script, folder).out for _ in range(2))
    assert "then" in first
    assert second == first


BACKUPS = """
import keras
import numpy as np
import phalanx
from tests.support.seeds import set_random_seed

class Broken(Exception):
    pass

class BreakOff(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step, self.steps = step, []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(batch)
        if len(self.steps) == self.step:
            raise Broken

strategy = phalanx.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(100, 6)).astype("float32")

def fit(folder, step, **options):
    set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    breaking = BreakOff(step)
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=2)
    try:
        model.fit(x, x[:, :1], batch_size=10, epochs=3, verbose=0, callbacks=[backup, breaking], **options)
    except Broken:
        pass
    return model, breaking.steps

for name, options in (("passes", {}), ("parts", {"steps_per_epoch": 4})):
    undisturbed, steps = fit(f"{name}-a", 1000, **options)
    per_epoch = len(steps) // 3 if not options else 4
    _, before = fit(f"{name}-b", 7, **options)  # its backup is of step 6
    resumed, after = fit(f"{name}-b", 1000, **options)
    for a, b in zip(undisturbed.get_weights(), resumed.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert before[:6] + after == steps, (before, after, steps)
if rank == 0:
    print("goes on at the step")
"""


def test_backups_of_keras_in_the_middle_of_epochs_go_on_at_their_step(launcher: Launcher) -> None:
    process = launcher.start_run("--workers", "2", launcher.script(BACKUPS))
    out, err = process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 0, out + err
    assert "goes on at the step" in out


KILLED_BACKUP = """
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import phalanx

file = Path(sys.argv[1]) / "training_metadata.json"

def kill(content):
    if file.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return json.JSONEncoder().encode(content)

class Watch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if rank == 0:
            print(f"epoch {epoch}")

strategy = phalanx.MultiWorkerMirroredStrategy()
rank = strategy.rank
is_first = not file.exists()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((20, 6), "float32")
backup = keras.callbacks.BackupAndRestore(sys.argv[1], double_checkpoint=True)
if is_first:
    json.dumps = kill  # Keras writes its second backup
model.fit(x, x[:, :1], batch_size=10, epochs=4, verbose=0, callbacks=[backup, Watch()])
"""


@pytest.mark.slow
def test_a_backup_of_keras_that_is_cut_off_leaves_the_one_before(launcher: Launcher) -> None:
    script, folder = launcher.script(KILLED_BACKUP), str(launcher.folder / "backup")
    process = launcher.start_run("--workers", "2", script, folder)
    out, err = process.communicate(timeout=END_BOUND_S)
    assert process.returncode != 0
    assert "epoch 1" in out, out + err
    process = launcher.start_run("--workers", "2", script, folder)
    out, err = process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 0, out + err
    assert [line[-7:] for line in out.splitlines() if "epoch" in line] == ["epoch 1", "epoch 2", "epoch 3"]
