"""The local replicas of a program that was started plainly."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import keras
import pytest

import phalanx
from phalanx.config.environment_variables import DEVICES_PER_WORKER, HOST_GPUS
from phalanx.devices.devices_per_worker import check_single_device, worker_device_variables
from phalanx.devices.gpu_assignment import check_devices, device_variables, worker_gpu_variables
from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.launcher import local_replicas
from phalanx.launcher.failures.root_cause import WorkerExit, find_root_cause
from phalanx.launcher.host_messages import WorkerDiagnostics
from phalanx.launcher.job_supervisor import JobOutcome
from phalanx.runtime.crash_report import CrashReport
from phalanx.strategies import mirrored_strategy
from tests.launcher.conftest import Launcher, wait_until

END_BOUND_S = 40.0

START = """
    from phalanx.errors import PeerLostError
    from phalanx.runtime import process_exit
    from phalanx.launcher.local_replicas import start_local_replicas
    process_exit.install()
    replicas = start_local_replicas(["cpu:0"] * {count})
    rank = replicas.rank
    def lose(other):
        raise PeerLostError(f"lost worker/{{other}}", rank=other, task=f"worker/{{other}}", host="here")
"""


def program(launcher: Launcher, code: str, count: int = 2) -> str:
    return launcher.script(textwrap.dedent(START.format(count=count)) + textwrap.dedent(code))


def test_the_same_program_runs_once_for_each_rank(launcher: Launcher) -> None:
    script = program(
        launcher,
        """
    touch(f"part-{rank}")
    Path(f"part-{rank}").write_text(json.dumps({
        "argv": sys.argv, "config": json.loads(os.environ["TF_CONFIG"]),
        "secret": os.environ["PHALANX_SECRET"],
        "cores": sorted(os.sched_getaffinity(0)), "flags": sys.flags.optimize, "count": replicas.count,
        "again": start_local_replicas(["cpu:0"] * 3) is replicas}))
    print("out of", rank)
    print("err of", rank, file=sys.stderr)
    """,
        count=3,
    )
    job = launcher.python("-O", script, "--lr", "1")
    assert job.code == 0, job.err
    assert job.lines == ["out of 0"]
    assert sorted(job.err.splitlines()) == ["[worker/1] err of 1", "[worker/2] err of 2", "err of 0"]
    parts = [json.loads((launcher.folder / f"part-{rank}").read_text()) for rank in range(3)]
    for rank, part in enumerate(parts):
        assert part["argv"] == [script, "--lr", "1"]
        assert part["config"]["cluster"] == parts[0]["config"]["cluster"]
        assert part["config"]["task"] == {"type": "worker", "index": rank}
        assert part["secret"] == parts[0]["secret"]
        assert part["flags"] == 1
        assert part["count"] == 3
        assert part["again"]
    if len(os.sched_getaffinity(0)) >= 3:
        assert not set(parts[0]["cores"]) & set(parts[1]["cores"])


def test_a_module_runs_again_as_a_module(launcher: Launcher) -> None:
    program(launcher, "Path(f'name-{rank}').write_text(__spec__.name)")
    job = launcher.python("-m", "program", "x")
    assert job.code == 0, job.err
    assert [(launcher.folder / f"name-{rank}").read_text() for rank in range(2)] == ["program", "program"]


def test_code_on_the_command_line_runs_again(launcher: Launcher) -> None:
    code = (
        "from phalanx.launcher.local_replicas import start_local_replicas as s; from pathlib import Path; "
        "import sys; rank = s(['cpu:0'] * 2).rank; Path(f'part-{rank}').write_text(repr(sys.argv))"
    )
    assert launcher.python("-c", code, "a").code == 0
    assert (launcher.folder / "part-1").read_text() == (launcher.folder / "part-0").read_text() == "['-c', 'a']"


@pytest.mark.parametrize("started_as", ["folder", pytest.param("script.py", marks=pytest.mark.slow)])
def test_a_program_that_leaves_its_folder_runs_again_where_it_was_started(started_as: str, launcher: Launcher) -> None:
    script = Path(program(launcher, 'Path(f"{sys.argv[1]}-{rank}").write_text(str(folder))'))
    code = script.read_text()
    inside = launcher.folder / "jobs" / "folder"
    inside.mkdir(parents=True)
    place = inside / "__main__.py" if started_as == "folder" else inside.parent / started_as
    place.write_text("import os\nfolder = os.getcwd()\nos.chdir('/')\n" + code)
    job = launcher.python(f"jobs/{started_as}", str(launcher.folder / "part"))
    assert job.code == 0, job.err
    assert [(launcher.folder / f"part-{rank}").read_text() for rank in (0, 1)] == [str(launcher.folder)] * 2


@pytest.mark.parametrize("config", ["{}", pytest.param("", marks=pytest.mark.slow)])
def test_an_empty_tf_config_is_none(config: str, launcher: Launcher) -> None:
    launcher.environment["TF_CONFIG"] = config
    job = launcher.python(program(launcher, "print('out of', replicas.rank)"))
    assert job.code == 0, job.err
    assert job.lines == ["out of 0"]


def test_threads_that_run_already_are_bound_too(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import threading
        from phalanx.launcher.local_replicas import start_local_replicas
        running, stop = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (running.set(), stop.wait()))
        thread.start(); running.wait()
        start_local_replicas(["cpu:0"] * 2)
        own = os.sched_getaffinity(0)
        others = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
        stop.set()
        print(all(share == own for share in others), len(others) >= 2)
        """
    )
    assert launcher.python(script).lines == ["True True"]


def test_a_failing_replica_says_why_and_decides_the_exit_code(launcher: Launcher) -> None:
    script = program(
        launcher,
        """
    if rank == 1:
        touch("gone")
        raise ValueError("boom of one")
    wait_for("gone")
    lose(1)
    """,
    )
    launcher.environment["PHALANX_GRACE"] = "20"
    job = launcher.python(script)
    assert job.code == 1
    assert "PeerLostError: lost worker/1" in job.err
    assert "worker/1 (rank 1" in job.err
    assert job.err.count("\nValueError: boom of one\n") == 1


def test_the_error_of_a_replica_that_took_too_long_to_exit_is_the_cause() -> None:
    diagnostics = WorkerDiagnostics(error=CrashReport("ValueError", "the cause", "traceback"))
    end = WorkerExit(1, "worker/1", "here", 2, 1, 0, was_ended_by_launcher=True, diagnostics=diagnostics)
    supervisor = object.__new__(local_replicas._ReplicaSupervisor)
    supervisor._outcome = JobOutcome(find_root_cause([end], interrupted_by=signal.SIGTERM), [end])
    assert supervisor.failure is None, "rank 0 has ended it"
    supervisor._look_for_cause()
    assert supervisor.failure is not None
    assert "ValueError: the cause" in supervisor.failure.root_cause.reason


def test_a_rank_0_that_does_not_notice_is_ended(launcher: Launcher) -> None:
    script = program(launcher, "if rank == 1:\n    sys.exit(6)\ndef stuck():\n    hang()\nstuck()")
    job = launcher.python(script)
    assert job.code == 6
    assert "ended with exit code 6" in job.err
    assert "in stuck" in job.err


def test_a_failure_after_rank_0_is_done_is_reported_as_well(launcher: Launcher) -> None:
    script = program(
        launcher,
        """
    if rank == 1:
        wait_for("done")
        time.sleep(0.3)
        sys.exit(5)
    touch("done")
    """,
    )
    job = launcher.python(script)
    assert job.code == 5
    assert "worker/1" in job.err


def test_close_waits_and_raises_what_failed(launcher: Launcher) -> None:
    script = program(
        launcher,
        """
    if rank == 1:
        time.sleep(0.3)
        sys.exit(5)
    try:
        replicas.close()
    except PeerLostError as error:
        print("caught", error.task, error)
        sys.stdout.flush()
    os._exit(0)
    """,
    )
    job = launcher.python(script)
    assert job.out.startswith("caught worker/1 A local replica failed: worker/1 (rank 1"), job.err
    assert job.code == 0


def test_an_error_of_rank_0_ends_the_replicas_without_a_word(launcher: Launcher) -> None:
    script = program(launcher, "touch(f'there-{rank}')\nwait_for('there-1')\n1 / 0 if rank == 0 else hang()")
    job = launcher.python(script)
    assert job.code == 1
    assert job.err.rstrip().endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_replicas_die_with_rank_0(number: signal.Signals, launcher: Launcher) -> None:
    process = launcher.start(program(launcher, "touch(f'there-{rank}')\nhang()", count=3))
    wait_until(lambda: all((launcher.folder / f"there-{rank}").exists() for rank in range(3)), bound_s=60)
    process.send_signal(number)
    process.communicate(timeout=END_BOUND_S)
    assert process.returncode != 0
    launcher.assert_all_gone()


def test_a_fork_of_rank_0_does_not_keep_replicas_alive(launcher: Launcher) -> None:
    script = program(
        launcher,
        """
    touch(f"there-{rank}")
    if rank == 0:
        wait_for("there-1")
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        Path("fork").write_text(str(child))
    hang()
    """,
    )
    process = launcher.start(script, stdout=None, stderr=None)
    wait_until(lambda: (launcher.folder / "fork").exists() and (launcher.folder / "fork").read_text(), bound_s=60)
    replica = int((launcher.folder / "there-1").read_text())
    process.kill()
    process.wait()
    wait_until(lambda: replica not in {running.pid for running in launcher.processes()})
    os.kill(int((launcher.folder / "fork").read_text()), signal.SIGKILL)


def test_a_fork_of_rank_0_that_ends_normally_touches_nothing(launcher: Launcher) -> None:
    script = program(
        launcher,
        """
    if rank == 0 and os.fork() == 0:
        sys.exit(0)
    if rank == 0:
        os.wait()
        touch("done")
    wait_for("done")
    time.sleep(0.2)
    touch(f"end-{rank}")
    """,
    )
    assert launcher.python(script).code == 0
    assert (launcher.folder / "end-1").exists()


IGNORE = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_program_that_ignores_the_ends_of_its_children_hears_of_its_replicas(moment: str, launcher: Launcher) -> None:
    script = Path(
        program(launcher, (IGNORE if moment == "after" else "") + "touch(f'there-{rank}')\nwait_for('go on')")
    )
    if moment == "before":
        script.write_text(IGNORE + script.read_text())
    for killed in (False, True):
        process = launcher.start(str(script))
        wait_until(lambda: all((launcher.folder / f"there-{rank}").exists() for rank in range(2)), bound_s=60)
        if killed:
            os.kill(int((launcher.folder / "there-1").read_text()), signal.SIGKILL)
        else:
            (launcher.folder / "go on").touch()
        _, err = process.communicate(timeout=END_BOUND_S)
        assert process.returncode == {"before": 137, "after": 1}[moment] * killed, err
        assert ("worker/1 (rank 1" in err) == killed
        for name in ("there-0", "there-1", "go on"):
            (launcher.folder / name).unlink(missing_ok=True)


def test_a_watch_that_fails_ends_the_program_and_says_why(launcher: Launcher) -> None:
    script = program(
        launcher,
        """
    from phalanx.launcher.hosts.local_host import LocalHost
    def fail(self):
        raise KeyError("a defect")
    LocalHost.events = fail
    hang()
    """,
    )
    job = launcher.python(script)
    assert job.code == PhalanxError.exit_code
    assert "KeyError: 'a defect'" in job.err
    assert "in hang" in job.err


def test_one_replica_starts_nothing(launcher: Launcher) -> None:
    job = launcher.python(program(launcher, "print(replicas.rank, 'TF_CONFIG' in os.environ)", count=1))
    assert (job.code, job.lines) == (0, ["0 False"])


def test_another_number_is_explained(launcher: Launcher) -> None:
    code = 'if rank == 0:\n    start_local_replicas(["cpu:0"] * 3)\nwait_for("never", 2)\n'
    job = launcher.python(program(launcher, code))
    assert job.code == 64
    assert "runs as 2 local replicas and now asks for 3" in job.err


def test_an_interactive_session_is_pointed_to_launch(launcher: Launcher) -> None:
    (launcher.folder / "input").write_text(
        'from phalanx.launcher.local_replicas import start_local_replicas\nstart_local_replicas(["cpu:0"] * 2)\n'
    )
    with (launcher.folder / "input").open() as commands:
        job = launcher.python(stdin=commands)
    assert job.code == 1
    assert "phalanx.launch(function, workers=N)" in job.err


def test_a_task_of_another_job_starts_no_replicas(launcher: Launcher) -> None:
    job = launcher.run("-n", "1", program(launcher, ""))
    assert job.code == 64
    assert "already a task of a job" in job.err


def test_a_child_of_multiprocessing_starts_no_replicas(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import multiprocessing
        from phalanx.launcher.local_replicas import start_local_replicas
        def work():
            try:
                start_local_replicas(["cpu:0"] * 2)
            except Exception as error:
                print(type(error).__name__, error)
        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
            process.join()
        """
    )
    job = launcher.python(script)
    assert job.out.startswith("ConfigurationError This process was started by multiprocessing"), job.err


@pytest.mark.parametrize("name", ["gpu:1", "/gpu:1", "GPU:1", "/device:GPU:1", "cuda:1", " gpu:1 "])
def test_a_gpu_is_the_only_one_that_its_replica_sees(name: str) -> None:
    assert device_variables(name, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert device_variables(name, {"CUDA_VISIBLE_DEVICES": "4,6"}) == {"CUDA_VISIBLE_DEVICES": "6"}


def test_on_a_cpu_no_gpu_is_seen() -> None:
    assert device_variables("cpu:1", {"CUDA_VISIBLE_DEVICES": "4,6"}) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("name", ["tpu:0", "gpu:x", "", "gpu:2"])
def test_a_device_that_is_none_or_not_there_is_an_error(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a device|does not exist"):
        device_variables(name, {"CUDA_VISIBLE_DEVICES": "4,6"})


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu:0", "foo"], "'foo' is not a device"),
        (["gpu:0", 1], "1 is not a device"),
        (["gpu:0", "/GPU:0"], "'/GPU:0' is listed twice"),
        (["gpu:0", "gpu:2"], "'gpu:2' does not exist: this host has 2"),
    ],
)
def test_devices_that_make_no_sense_are_refused(devices: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_devices(devices, 2)


def test_devices_are_named_as_tensorflow_names_them() -> None:
    check_devices(["cpu:0", "cpu:0", "/job:localhost/replica:0/task:0/device:GPU:1", "/gpu:0"], 2)
    check_devices(["gpu:7"])


def test_each_worker_gets_a_gpu_of_its_own_where_there_are_enough() -> None:
    assert worker_gpu_variables(2, 4, {}) == [
        {"CUDA_VISIBLE_DEVICES": "0", HOST_GPUS: "0,1,2,3"},
        {"CUDA_VISIBLE_DEVICES": "1", HOST_GPUS: "0,1,2,3"},
    ]
    assert worker_gpu_variables(2, 2, {"CUDA_VISIBLE_DEVICES": "4,6"}) == [
        {"CUDA_VISIBLE_DEVICES": "4", HOST_GPUS: "4,6"},
        {"CUDA_VISIBLE_DEVICES": "6", HOST_GPUS: "4,6"},
    ]


def test_workers_take_gpus_in_turn_where_there_are_fewer_and_their_memory_as_they_need_it() -> None:
    growing = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    shares = worker_gpu_variables(3, 2, {"CUDA_VISIBLE_DEVICES": "4,6"})
    assert shares == [{"CUDA_VISIBLE_DEVICES": gpu, HOST_GPUS: "4,6", **growing} for gpu in ("4", "6", "4")]
    (own, _) = worker_gpu_variables(2, 1, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})
    assert own == {**growing, "CUDA_VISIBLE_DEVICES": "0", HOST_GPUS: "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}


def test_nothing_is_set_where_there_is_no_gpu() -> None:
    assert worker_gpu_variables(2, 0, {}) == [{}, {}]


def test_workers_of_several_devices_get_different_gpus_or_parts_of_their_cores() -> None:
    assert worker_device_variables([8, 8], 2, 5, {"CUDA_VISIBLE_DEVICES": "7,5,3,1,0"}) == [
        {DEVICES_PER_WORKER: "2", "CUDA_VISIBLE_DEVICES": "7,5", HOST_GPUS: "7,5,3,1,0"},
        {DEVICES_PER_WORKER: "2", "CUDA_VISIBLE_DEVICES": "3,1", HOST_GPUS: "7,5,3,1,0"},
    ]
    assert worker_device_variables([1, 20], 4, 0, {}) == [
        {DEVICES_PER_WORKER: "4", "JAX_NUM_CPU_DEVICES": "4", "PJRT_NPROC": "16"},
        {DEVICES_PER_WORKER: "4", "JAX_NUM_CPU_DEVICES": "4", "PJRT_NPROC": "20"},
    ]
    assert worker_device_variables([1], 4, 0, {"PJRT_NPROC": "3"})[0]["PJRT_NPROC"] == "3"
    with pytest.raises(ConfigurationError, match="2 workers need 6 GPUs, and this host has 5"):
        worker_device_variables([8, 8], 3, 5, {})


def test_a_strategy_of_replicas_refuses_workers_of_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_PER_WORKER, "2")
    for strategy in (
        phalanx.MultiWorkerMirroredStrategy,
        phalanx.ParameterServerStrategy,
        phalanx.DiLoCoStrategy,
        lambda: phalanx.MirroredStrategy(engine="replicas"),
    ):
        with pytest.raises(ConfigurationError, match="--devices-per-worker 2` gives it 2, for one program"):
            strategy()
    monkeypatch.setenv("PHALANX_JOB_ID", "job")
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert mirrored_strategy._prefers_spmd(), "it was started for one program over all devices"
    monkeypatch.delenv(DEVICES_PER_WORKER)
    assert not mirrored_strategy._prefers_spmd(), "its workers are replicas"
    check_single_device("Strategy", {})
    check_single_device("Strategy", {DEVICES_PER_WORKER: "1"})
