"""`CentralStorageStrategy` in real jobs: the numbers of plain Keras, and nothing left behind by what goes wrong."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import ConfigurationError
from tests.launcher.conftest import Launcher, launcher, wait_until
from tests.parameter_server.central import NAMES
from tests.parameter_server.tasks import CASE_S
from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import ROOT
from tests.support.programs import environment
from tests.training.compare import assert_close

__all__ = ["launcher"]

pytestmark = pytest.mark.timeout(900)

SLOW = pytest.mark.slow
QUICK = {"jax": ("adam",), FIRST: ("adam", "own_train_step", "early_stopping", "single_batches")}
"""Who stores the variables is the same for all backends; one case shows that compiled steps train with it."""
Found = dict[str, Any]
TOLERANCE = 1e-4
BOUND_S = 300
END_BOUND_S = 60
RUN = ("-m", "phalanx", "run", "--workers", "2")
PROGRAM = ("-m", "tests.parameter_server.central")


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[Found]]:
    """What each replica found in a case; all selected cases of a backend run in one job, started plainly."""
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.module is request.module and {"backend", "name"} <= parameters.keys():
            selected.setdefault(parameters["backend"], []).append(parameters["name"])
    finished: dict[str, Path] = {}

    def of(backend: str, name: str) -> list[Found]:
        if backend not in finished:
            finished[backend] = tmp_path_factory.mktemp(backend)
            _run(backend, finished[backend], selected[backend])
        folder = finished[backend]
        files = [folder / f"{name}.{rank}" for rank in range(2)]
        assert all(file.exists() for file in files), (folder / "said").read_text()[-6000:]
        return [pickle.loads(file.read_bytes()) for file in files]

    return of


def _run(backend: str, folder: Path, names: Sequence[str], *before: str) -> None:
    with (
        open(folder / "said", "wb") as said,
        fork_server.popen(
            [sys.executable, *before, *PROGRAM, str(folder), *names],
            starts_others=True,  # the other replica
            cwd=ROOT,
            env=environment(backend),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        ) as process,
    ):
        try:
            code = process.wait(BOUND_S + CASE_S * (len(names) - 1))
        except subprocess.TimeoutExpired:
            process.kill()  # its replica dies with it
            code = -1
    assert code == 0, f"exit code {code}\n{(folder / 'said').read_text()[-6000:]}"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=[] if name in QUICK.get(backend, ()) else SLOW)
        for backend in BACKENDS
        for name in NAMES
    ],
)
def test_the_numbers_are_those_of_one_process(found: Callable[..., list[Found]], backend: str, name: str) -> None:
    first, second = found(backend, name)
    for key, expected in first["plain"].items():
        assert_close(first["job"][key], expected, TOLERANCE, key)
        if key != "optimizer":  # its state lies with the first
            assert_close(second["job"][key], first["job"][key], 0.0, f"{key} on the other replica")


@pytest.mark.slow
def test_under_phalanx_run_the_workers_are_the_replicas(tmp_path: Path) -> None:
    _run(FIRST, tmp_path, ["adam"], *RUN)
    assert (tmp_path / "adam.1").exists()


# What ends a job before its time.

TRAINING = """
    import keras
    import numpy as np
    import phalanx
    strategy = phalanx.CentralStorageStrategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.ones((64, 8), "float32")
    def end(epoch, logs):
        touch(f"epoch-{{strategy.rank}}")
        if strategy.rank == 1:
            {then}
    noted = keras.callbacks.LambdaCallback(on_epoch_end=end)
    model.fit(x, x[:, :1], batch_size=16, epochs={epochs}, verbose=0, callbacks=[noted])
"""


def start(launcher: Launcher, then: str = "pass", epochs: int = 1_000_000, **variables: str) -> subprocess.Popen[str]:
    # Time for a failing replica to end by itself on a loaded machine.
    launcher.environment |= environment(FIRST) | {"PHALANX_GRACE": "15"} | variables
    launcher.popen = partial(fork_server.popen, starts_others=True)  # the other replica
    return launcher.start(launcher.script(TRAINING.format(then=then, epochs=epochs)))


def trains(launcher: Launcher) -> None:
    wait_until(lambda: all((launcher.folder / f"epoch-{rank}").exists() for rank in range(2)), bound_s=END_BOUND_S)


def ended(launcher: Launcher, process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=END_BOUND_S)
    launcher.assert_all_gone()
    return process.returncode, err


def test_a_killed_replica_ends_the_job_and_is_named(launcher: Launcher) -> None:
    process = start(launcher)
    trains(launcher)
    os.kill(int((launcher.folder / "epoch-1").read_text()), signal.SIGKILL)
    code, said = ended(launcher, process)
    assert code == 128 + signal.SIGKILL
    assert "PeerLostError" in said
    assert "lost worker/1" in said


@pytest.mark.slow
def test_a_replica_that_fails_decides_the_exit_code(launcher: Launcher) -> None:
    code, said = ended(launcher, start(launcher, "raise ValueError('boom of one')"))
    assert code == 1
    assert "ValueError: boom of one" in said
    assert "PeerLostError" in said


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *[pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGKILL)]]
)
def test_signals_end_all_of_it(launcher: Launcher, number: signal.Signals) -> None:
    process = start(launcher)
    trains(launcher)
    process.send_signal(number)
    code, _ = ended(launcher, process)
    assert code == -number


@pytest.mark.slow
def test_a_stopped_replica_ends_the_job_after_the_bound(launcher: Launcher) -> None:
    process = start(launcher, PHALANX_TIMEOUT="5")
    trains(launcher)
    os.kill(int((launcher.folder / "epoch-1").read_text()), signal.SIGSTOP)
    code, said = ended(launcher, process)
    assert code != 0
    assert "CollectiveTimeoutError" in said


# What cannot be.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute_devices": 0}, "CentralStorageStrategy needs at least one device"),
        ({"compute_devices": "cpu:0"}, "must be a number of replicas or a list"),
        (
            {"compute_devices": 2, "parameter_device": "gpu:3"},
            "parameter_device is 'gpu:3'; the first replica stores the variables",
        ),
        ({"compute_devices": 2, "parameter_device": "tpu"}, "'tpu' is not a device"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        phalanx.CentralStorageStrategy(**arguments)


def test_a_cluster_with_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"worker": ["localhost:1"], "ps": ["localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec, "task": {"type": "worker", "index": 0}}))
    monkeypatch.setenv("PHALANX_JOB_ID", "a job")
    with pytest.raises(ConfigurationError, match="Start it without `--ps`"):
        phalanx.CentralStorageStrategy()


@pytest.mark.slow
def test_a_job_on_several_hosts_is_refused(launcher: Launcher) -> None:
    launcher.environment["KERAS_BACKEND"] = FIRST
    program = launcher.script(
        """
        os.environ["PHALANX_HOST_ID"] = f"host {rank}"
        import phalanx
        phalanx.experimental.CentralStorageStrategy()
        """
    )
    job = launcher.run("-n", "2", program)
    assert job.code == ConfigurationError.exit_code, job.err
    assert "is for one host, and this job runs on host 0, host 1" in job.out + job.err


def test_a_single_replica_is_plain_keras(launcher: Launcher) -> None:
    launcher.environment |= environment(FIRST)
    launcher.popen = fork_server.popen
    program = launcher.script(
        """
        import phalanx
        strategy = phalanx.CentralStorageStrategy(1, parameter_device="/cpu:0")
        print(strategy.num_replicas_in_sync, strategy.local_devices, "TF_CONFIG" in os.environ)
        """
    )
    job = launcher.python(program)
    assert job.lines == ["1 ('cpu:0',) False"], job.err
