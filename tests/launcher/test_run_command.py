"""`phalanx run`, with real processes that use no Keras."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx import errors
from phalanx.launcher.shutdown import INTERRUPT_GRACE_S
from tests.launcher.conftest import JOB_BOUND_S, Launcher, wait_until
from tests.support.backends import BACKENDS

# How long a job may take to end after its launcher or a worker was killed.
END_BOUND_S = 20.0


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text(), lambda: f"no {path.name}", JOB_BOUND_S)
    return int(path.read_text())


def test_each_worker_knows_its_place_and_shares_nothing_but_the_secret(launcher: Launcher) -> None:
    script = launcher.script(
        """
        names = ["TF_CONFIG", "PHALANX_SECRET", "PHALANX_JOB_ID", "PHALANX_LISTEN_FD", "OMP_NUM_THREADS",
                 "KERAS_BACKEND"]
        import socket
        listener = socket.socket(fileno=int(os.environ["PHALANX_LISTEN_FD"]))
        print(json.dumps({"rank": rank, "argv": sys.argv, "cores": sorted(os.sched_getaffinity(0)),
            "port": listener.getsockname()[1], "accepts": listener.getsockopt(socket.SOL_SOCKET,
            socket.SO_ACCEPTCONN), "group": os.getpgid(0), **{name: os.environ[name] for name in names}}))
        """
    )
    job = launcher.run("--workers", "3", "--backend", "jax", script, "--lr", "1", "-n", "5")
    assert job.code == 0, job.err
    reports = {}
    for line in job.lines:
        task, _, text = line.partition("] ")
        report = json.loads(text)
        assert task == f"[worker/{report['rank']}"
        reports[report["rank"]] = report
    assert sorted(reports) == [0, 1, 2]
    configs = [json.loads(reports[rank]["TF_CONFIG"]) for rank in range(3)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
    assert configs[0]["cluster"] == configs[1]["cluster"] == configs[2]["cluster"]
    for rank, report in reports.items():
        assert configs[0]["cluster"]["worker"][rank] == f"127.0.0.1:{report['port']}"
        assert report["accepts"] == 1
        assert report["argv"] == [script, "--lr", "1", "-n", "5"]
        assert report["KERAS_BACKEND"] == "jax"
        assert report["OMP_NUM_THREADS"] == str(len(report["cores"]))
    assert len({report["PHALANX_SECRET"] for report in reports.values()}) == 1
    assert len({report["PHALANX_JOB_ID"] for report in reports.values()}) == 1
    assert len({report["group"] for report in reports.values()}) == 3
    assert all(len(report["PHALANX_SECRET"]) >= 32 for report in reports.values())


def test_the_secret_is_on_no_command_line_and_fresh_for_each_job(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import glob
        secret = os.environ["PHALANX_SECRET"]
        lines = []
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                lines.append(Path(path).read_text())
            except OSError:
                pass
        print(secret, any(secret in line for line in lines))
        """
    )
    outputs = [launcher.run("-n", "1", script).out.split() for _ in range(2)]
    assert outputs[0][2] == outputs[1][2] == "False"
    assert outputs[0][1] != outputs[1][1]


def test_settings_of_the_user_win(launcher: Launcher) -> None:
    launcher.environment["OMP_NUM_THREADS"] = "17"
    job = launcher.run("-n", "1", launcher.script("print(os.environ['OMP_NUM_THREADS'])"))
    assert job.lines == ["[worker/0] 17"]


def test_the_program_sees_what_it_would_see_under_plain_python(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import inspect, pickle, __main__
        class Thing: pass
        assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
        def function(): pass
        assert "def function" in inspect.getsource(function)
        assert __main__.__file__ == __file__ and __name__ == "__main__" and __spec__ is None
        assert not any(name.startswith("_ROOT") or name == "WorkerBootstrap" for name in globals())
        names = sorted(name for name in os.environ if name in ("PHALANX_WORKER_BOOTSTRAP",))
        print(json.dumps([sys.argv, __file__, sys.path[0], names]))
        """
    )
    job = launcher.run("-n", "1", Path(script).name, "a")
    assert job.code == 0, job.err
    plain = launcher.python(Path(script).name, "a")
    assert json.loads(job.out.partition("] ")[2]) == json.loads(plain.out)


def test_a_module_a_package_folder_and_code_run_too(launcher: Launcher) -> None:
    package = launcher.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(__name__, sys.argv[1:], __package__)")
    (package / "part.py").write_text("import sys; print(__name__, sys.argv[1:], __spec__.name)")
    assert launcher.run("-n", "1", "-m", "package.part", "-x").lines == ["[worker/0] __main__ ['-x'] package.part"]
    assert launcher.run("-n", "1", "-m", "package", "y").lines == ["[worker/0] __main__ ['y'] package"]
    assert launcher.run("-n", "1", "package", "z").lines == ["[worker/0] __main__ ['z'] "]
    own = launcher.run("-n", "1", "-m", "package", "--verbose", "--log-dir", "logs", "-n", "9")
    assert own.lines == ["[worker/0] __main__ ['--verbose', '--log-dir', 'logs', '-n', '9'] package"]
    assert not (launcher.folder / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "2", "x.py"], r"No such option.* Did you mean '?--workers'?\?"),  # versions of click differ
        (["--workers", "2", "--bakend", "jax", "x.py"], r"Did you mean '?--backend'?\?"),
        (["x.py", "--workers", "2"], "options of phalanx run come before the script"),
        (["--workers", "2", "python3", "x.py"], "Leave out 'python3'"),
    ],
)
def test_a_command_line_that_is_not_understood_is_told_of(
    arguments: list[str], message: str, launcher: Launcher
) -> None:
    job = launcher.run(*arguments)
    assert job.code in (2, 64)
    assert re.search(message, " ".join(job.err.split()))


def test_without_stdout_it_runs_all_the_same(launcher: Launcher) -> None:
    script = launcher.script("print('said')\ntouch(f'ran-{rank}')")
    command = f"{shlex.quote(sys.executable)} -m phalanx run -n 2 {shlex.quote(script)}"
    for number, redirection in enumerate((">&-", ">&- 2>&- <&-", ">/dev/full", ">/dev/full 2>&1")):
        done = subprocess.run(
            ["bash", "-c", f"{command} {redirection}"],
            cwd=launcher.folder,
            env=launcher.environment,
            capture_output=True,
            text=True,
            timeout=JOB_BOUND_S,
        )
        assert done.returncode == 0, (redirection, done.stderr)
        assert ("the output ends here (No space left on device)" in done.stderr) == (number == 2)
        for rank in range(2):
            (launcher.folder / f"ran-{rank}").unlink()


def test_a_worker_that_ends_well_before_the_job_begins_is_the_cause(launcher: Launcher) -> None:
    script = launcher.script(
        """
        if rank == 1:
            sys.exit()
        import phalanx
        from phalanx.cluster import join
        join(phalanx.resolve())
        """
    )
    job = launcher.run("-n", "2", script)
    assert job.code == 71
    assert "worker/1 (rank 1) has ended before the job began" in job.err
    assert "worker/1 left the job with exit code 0 while the others still depended on it" in job.err


@pytest.mark.parametrize(
    "keeps",
    [
        pytest.param("threading.Thread(target=hang).start()", id="thread"),
        pytest.param("atexit.register(hang)", id="exit handler", marks=pytest.mark.slow),
    ],
)
def test_an_error_ends_a_process_that_something_keeps(keeps: str, launcher: Launcher) -> None:
    launcher.environment["PHALANX_GRACE"] = "1"
    script = launcher.script(f"import atexit, threading\nif rank:\n    {keeps}\n    raise ValueError('boom')\nhang()")
    job = launcher.run("-n", "2", script)
    assert job.code == 1
    assert job.err.count("\nValueError: boom\n") == 1


def test_after_ctrl_c_the_page_that_v_shows_says_where_everyone_was(launcher: Launcher) -> None:
    script = launcher.script("touch(f'there-{rank}')\nhang()")
    process = launcher.start_run("-n", "2", "-v", script)
    for rank in range(2):
        pid_in(launcher.folder / f"there-{rank}")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.count("in hang") == 2, err


@pytest.mark.parametrize("verbose", [False, True])
def test_a_worker_that_is_interrupted_alone_is_named(verbose: bool, launcher: Launcher) -> None:
    script = launcher.script("if rank == 1:\n    raise KeyboardInterrupt\nhang()")
    job = launcher.run("-n", "2", *(["-v"] if verbose else []), script)
    assert job.code == 130
    named = [line for line in job.err.splitlines() if "was interrupted (KeyboardInterrupt or SIGINT)" in line]
    assert len(named) == 1, job.err
    assert "worker/1 (rank 1, pid " in named[0]
    assert ("Exit code 130: " in job.err) == verbose


def test_multiprocessing_works_in_a_worker(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
        """
    )
    job = launcher.run("-n", "1", script)
    assert job.lines == ["[worker/0] [1, 4, 9]"], job.err


def test_the_failing_workers_error_comes_first_and_its_code_is_returned(launcher: Launcher) -> None:
    script = launcher.script(
        """
        if rank == 1:
            raise ValueError("boom of one")
        hang()
        """
    )
    job = launcher.run("-n", "2", script)
    assert job.code == 1
    _, *lines = [line for line in job.err.splitlines() if line.strip("-")]
    assert lines[0].startswith("The job ended: worker/1 (rank 1, pid ")
    assert lines[0].endswith("failed with ValueError: boom of one")
    assert lines[1].endswith('in <module>: raise ValueError("boom of one")')
    assert lines[3] == "Traceback (most recent call last):"
    assert "bootstrap.py" not in job.err
    assert "worker/0  ended by the launcher" in job.err


def test_what_a_worker_said_without_a_traceback_follows_the_cause(launcher: Launcher) -> None:
    script = launcher.script(
        """
        if rank == 1:
            sys.exit("stopped: bad data")
        hang()
        """
    )
    job = launcher.run("-n", "2", script)
    assert job.code == 1
    assert "\nworker/1 said last:\nstopped: bad data\n" in job.err


def test_what_a_worker_said_is_known_where_both_outputs_are_one(launcher: Launcher) -> None:
    script = launcher.script(
        r"""
        print("\r\x1b[1m1/2\r\x1b[1m2/2\x1b[0m")
        if rank == 1:
            sys.exit("stopped: bad data")
        hang()
        """
    )
    job = launcher.run("-n", "2", script, stderr=subprocess.STDOUT)
    assert job.code == 1
    assert "\nworker/1 said last:\n2/2\nstopped: bad data\n" in job.out


def test_too_few_open_files_are_told_of(launcher: Launcher) -> None:
    limited = launcher.script(
        """
        import resource, runpy
        resource.setrlimit(resource.RLIMIT_NOFILE, (34, 34))
        sys.argv = ["phalanx", "run", "-n", "20", sys.argv[1]]
        runpy.run_module("phalanx", run_name="__main__")
        """,
        "limited.py",
    )
    job = launcher.python(limited, launcher.script("hang()"))
    assert job.code == 64
    assert "more open files than the 34" in job.err
    assert "Traceback" not in job.err


def test_more_tasks_than_open_files_are_allowed(launcher: Launcher) -> None:
    script = launcher.script("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 48)")
    limited = launcher.script(
        """
        import resource, runpy
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (34, limits[1]))
        sys.argv = ["phalanx", "run", "-n", "2", sys.argv[1]]
        runpy.run_module("phalanx", run_name="__main__")
        """,
        "limited.py",
    )
    job = launcher.python(limited, script)
    assert sorted(job.lines) == ["[worker/0] True", "[worker/1] True"], job.err


def test_a_survivors_lost_peer_is_a_consequence_even_if_seen_first(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from phalanx.errors import PeerLostError
        if rank == 0:
            touch("gone")
            raise PeerLostError("lost worker/1", rank=1, task="worker/1", host="here")
        wait_for("gone")
        survivor = int(Path("gone").read_text())
        while Path(f"/proc/{survivor}").exists():  # until the launcher has reaped it
            time.sleep(0.01)
        raise KeyError("the cause")
        """
    )
    launcher.environment["PHALANX_GRACE"] = "20"
    job = launcher.run("-n", "2", script)
    assert job.code == 1
    assert "worker/1 (rank 1" in job.err
    assert "failed with KeyError: 'the cause'" in job.err


@pytest.mark.parametrize("caught", ["raise RuntimeError('wrapped')", pytest.param("pass", marks=pytest.mark.slow)])
def test_a_program_that_catches_its_errors_and_ends_itself_tells_of_them_all_the_same(
    caught: str, launcher: Launcher
) -> None:
    script = launcher.script(
        f"""
        from phalanx.errors import PeerLostError
        try:
            try:
                if rank == 0:
                    touch("gone")
                    raise PeerLostError("lost worker/1", rank=1, task="worker/1", host="here")
                wait_for("gone")
                survivor = int(Path("gone").read_text())
                while Path(f"/proc/{{survivor}}").exists():
                    time.sleep(0.01)
                raise KeyError("the cause")
            except KeyError:
                raise
            except Exception:
                {caught}
                raise
        except Exception:
            sys.exit(3)
        """
    )
    launcher.environment["PHALANX_GRACE"] = "20"
    job = launcher.run("-n", "2", script)
    assert job.code == 3
    assert "worker/1 (rank 1" in job.err
    assert "failed with KeyError: 'the cause'" in job.err
    assert "worker/0  exit code 3 (PeerLostError)" in job.err or "worker/0  exit code 3 (RuntimeError)" in job.err


@pytest.mark.parametrize("error", ["ValueError(os.fsdecode(b'caf\\xe9'))", "Mute()"], ids=["no UTF-8", "mute"])
def test_an_error_that_cannot_be_told_ends_its_process_all_the_same(error: str, launcher: Launcher) -> None:
    script = launcher.script(
        f"""
        import threading
        class Mute(Exception):
            def __str__(self):
                raise KeyError("no words")
        threading.Thread(target=hang).start()
        from phalanx.errors import ConfigurationError
        raise {error} from ConfigurationError("wrong")
        """
    )
    launcher.environment["PHALANX_GRACE"] = "1"
    job = launcher.run("-n", "1", script)
    assert job.code == errors.ConfigurationError.exit_code
    said = "ValueError: caf\\udce9" if "caf" in error else "Mute: <exception str() failed>"
    assert f"failed with {said}" in job.err


@pytest.mark.parametrize(
    ("moment", "fails"),
    [
        ("before", False),
        ("around", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("after", False), ("around", False))),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("before", True), ("after", True))),
    ],
)
def test_a_hook_of_the_programs_prints_and_neither_code_nor_reason_depend_on_it(
    moment: str, fails: bool, launcher: Launcher
) -> None:
    script = launcher.script(
        f"""
        import traceback
        from phalanx.errors import ConfigurationError
        from phalanx.runtime import process_exit
        def hook(kind, error, stack):
            print("mine", [Path(frame.filename).name for frame in traceback.extract_tb(stack)])
            if {fails}:
                raise OSError("broken hook")
        if {moment!r} == "before":
            sys.excepthook = hook
        process_exit.install()
        former = sys.excepthook
        if {moment!r} == "after":
            sys.excepthook = hook
        if {moment!r} == "around":
            sys.excepthook = lambda *error: (hook(*error), former(*error))
        raise ConfigurationError("wrong")
        """
    )
    job = launcher.run("-n", "1", script)
    assert job.code == errors.ConfigurationError.exit_code
    assert job.lines == ["[worker/0] mine ['program.py']"]
    assert "failed with ConfigurationError: wrong" in job.err
    assert ("OSError: broken hook" in job.err) == fails


def test_an_error_of_a_fork_is_not_the_workers(launcher: Launcher) -> None:
    script = launcher.script(
        """
        if os.fork() == 0:
            raise ValueError("of the fork")
        os.wait()
        sys.exit(3)
        """
    )
    job = launcher.run("-n", "1", script)
    assert job.code == 3
    assert "worker/0  exit code 3; last in" in job.err


def test_files_of_the_program_are_left_alone_where_it_has_closed_ours(launcher: Launcher) -> None:
    script = launcher.script(
        """
        os.closerange(3, 100)
        files = [open(f"file-{i}", "w+") for i in range(30)]
        raise ValueError("boom")
        """
    )
    assert launcher.run("-n", "1", script).code == 1
    assert {path.read_text() for path in launcher.folder.glob("file-*")} == {""}


def test_leaving_early_with_code_0_is_named_as_the_cause(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from phalanx.errors import PeerLostError
        if rank == 1:
            touch("gone")
            os._exit(0)
        wait_for("gone")
        raise PeerLostError("lost worker/1", rank=1, task="worker/1", host="here")
        """
    )
    job = launcher.run("-n", "2", script)
    assert job.code == errors.PeerLostError.exit_code
    assert "worker/1 left the job with exit code 0" in job.err


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(3)", 3),
        pytest.param("sys.exit('words')", 1, marks=pytest.mark.slow),
        ("os.kill(os.getpid(), 9)", 137),
        pytest.param("os.abort()", 134, marks=pytest.mark.slow),
        ("raise __import__('phalanx.errors').errors.ConfigurationError('wrong')", 64),
        ("raise ValueError('x') from __import__('phalanx.errors').errors.RendezvousError('late')", 66),
        ("sys.exit(0)", 0),
    ],
)
def test_the_exit_code_tells_the_causes_apart(code: str, status: int, launcher: Launcher) -> None:
    job = launcher.run("-n", "2", launcher.script(f"if rank == 1:\n    {code}\n"))
    assert job.code == status, job.err
    assert (f"Exit code {status}: " in job.err) == (status != 0)


@pytest.mark.parametrize("leave", ["sys.exit(3)", pytest.param("sys.exit('words')", marks=pytest.mark.slow)])
def test_a_worker_that_ends_itself_and_is_kept_by_an_exit_handler_is_the_cause(leave: str, launcher: Launcher) -> None:
    launcher.environment["PHALANX_GRACE"] = "2"
    script = launcher.script(
        f"""
        import atexit
        from phalanx.errors import PeerLostError
        if rank == 1:
            atexit.register(hang)
            atexit.register(touch, "gone")
            {leave}
        wait_for("gone")
        raise PeerLostError("lost worker/1", rank=1, task="worker/1", host="here")
        """
    )
    job = launcher.run("-n", "2", script)
    code = 3 if "3" in leave else 1
    assert job.code == code, job.err
    assert f"ended with exit code {code}\n" in job.err
    assert f"Exit code {code}: " in job.err
    assert ("words" in job.err) == ("words" in leave)


def test_a_crash_of_native_code_shows_its_python_stack(launcher: Launcher) -> None:
    script = launcher.script("def crash():\n    import ctypes; ctypes.string_at(0)\ncrash()")
    job = launcher.run("-n", "1", script)
    assert job.code == 139
    assert "was killed by SIGSEGV" in job.err
    assert re.search(r"program.py.*in crash", job.err)


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(3)", 71, "worker/1 left the job and did not end"),
        pytest.param("raise ValueError('boom')", 1, "failed with ValueError: boom", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_native_code_keeps_from_going_down_is_the_cause(
    ending: str, code: int, words: str, launcher: Launcher
) -> None:
    """When its stacks are asked for, Python has given its handlers up already."""
    script = launcher.script(
        f"""
        import ctypes
        from phalanx.errors import PeerLostError
        if rank == 1:
            libc = ctypes.CDLL(None)
            libc.__cxa_atexit(ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.c_void_p(600), None)
            touch("leaves")
            {ending}
        wait_for("leaves")
        time.sleep(0.5)
        raise PeerLostError("lost worker/1", rank=1, task="worker/1", host="here")
        """
    )
    launcher.environment["PHALANX_GRACE"] = "2"
    job = launcher.run("-n", "2", script)
    assert job.code == code, job.err
    assert words in job.err
    assert "SIGUSR2" not in job.err


def test_the_page_shows_where_a_rank_hangs_and_what_each_did_last(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from phalanx.runtime.progress import report
        report("all_reduce", epoch=2, step=10 + rank)
        if rank == 0:
            touch("there")
            def stuck_here():
                hang()
            stuck_here()
        wait_for("there")
        from phalanx.errors import CollectiveTimeoutError
        raise CollectiveTimeoutError("worker/0 did not come")
        """
    )
    job = launcher.run("-n", "2", "--log-dir", "logs", script)
    assert job.code == errors.CollectiveTimeoutError.exit_code
    page = (launcher.folder / "logs" / "failure.txt").read_text()
    for text in (job.err, page):
        assert "worker/0 hung" in text
        assert re.search(r"program.py.* in stuck_here", text)
        assert "last in all_reduce, epoch 3, step 11" in text
        assert "last in all_reduce, epoch 3, step 12" in text
    report = json.loads((launcher.folder / "logs" / "failure.json").read_text())
    assert report["exit_code"] == job.code
    assert report["cause"] == "worker/1"
    assert report["tasks"][0]["hung"] is True
    assert report["tasks"][0]["words"]["step"] == 10


def test_a_stopped_worker_is_named_as_stopped(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import signal
        if rank == 0:
            touch("there")
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for("there")
        sys.exit(3)
        """
    )
    job = launcher.run("-n", "2", "--log-dir", "logs", script)
    assert job.code == 3
    report = json.loads((launcher.folder / "logs" / "failure.json").read_text())
    assert report["tasks"][0]["words"]["state"] == "T"


def test_a_worker_that_ignores_sigterm_is_killed(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import signal
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            touch("deaf")
            hang()
        wait_for("deaf")
        sys.exit(9)
        """
    )
    assert launcher.run("-n", "2", script).code == 9


def test_a_later_success_leaves_nothing_of_an_earlier_failure(launcher: Launcher) -> None:
    logs = launcher.folder / "logs"
    assert launcher.run("-n", "2", "--log-dir", "logs", launcher.script("sys.exit(5)")).code == 5
    assert {path.name for path in logs.iterdir()} >= {"failure.txt", "worker-1.log"}
    (logs / "mine-1.log").touch()
    assert launcher.run("-n", "1", "--log-dir", "logs", launcher.script("print('fine')")).code == 0
    assert sorted(path.name for path in logs.iterdir()) == ["events.jsonl", "mine-1.log", "worker-0.log"]


def test_two_jobs_do_not_write_to_one_log_directory(launcher: Launcher) -> None:
    logs = launcher.folder / "logs"
    first = launcher.start_run("-n", "1", "--log-dir", "logs", launcher.script("print('first'); wait_for('end')"))
    wait_until(lambda: (logs / "worker-0.log").exists() and (logs / "worker-0.log").read_text())
    second = launcher.run("-n", "2", "--log-dir", "logs", launcher.script("print('second')", "second.py"))
    assert second.code == 64
    assert "Another job writes its logs to logs" in second.err
    (launcher.folder / "end").touch()
    assert first.wait() == 0
    assert sorted(path.name for path in logs.iterdir()) == ["events.jsonl", "worker-0.log"]
    assert (logs / "worker-0.log").read_text() == "first\n"
    assert launcher.run("-n", "2", "--log-dir", "logs", launcher.script("print('second')", "second.py")).code == 0
    assert (logs / "worker-0.log").read_text() == "second\n"


def test_a_full_disk_ends_the_logs_and_not_the_job(launcher: Launcher) -> None:
    logs = launcher.folder / "logs"
    logs.mkdir()
    try:
        os.mknod(logs / "worker-0.log", stat.S_IFCHR | 0o600, os.stat("/dev/full").st_rdev)
    except PermissionError:
        pytest.skip("only root may make the device that is always full")
    job = launcher.run("-n", "2", "--log-dir", "logs", launcher.script("print('fine')"))
    assert job.code == 0
    assert sorted(job.lines) == ["[worker/0] fine", "[worker/1] fine"]
    assert "the log files end here" in job.err


@pytest.mark.parametrize(
    "name",
    [
        "worker-0.log",
        "failure.txt",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("failure.json", "events.jsonl")),
    ],
)
def test_logs_and_reports_are_not_written_through_links(launcher: Launcher, name: str) -> None:
    """Where others may write, a link could lead to any file of this user."""
    logs, precious = launcher.folder / "logs", launcher.folder / "precious"
    logs.mkdir()
    precious.write_text("precious")
    is_opened_at_once = name in ("worker-0.log", "events.jsonl")
    plant = "" if is_opened_at_once else f"os.symlink({str(precious)!r}, 'logs/{name}')"
    if not plant:
        (logs / name).symlink_to(precious)
    job = launcher.run("-n", "1", "--log-dir", "logs", launcher.script(f"{plant}\nsys.exit(5)"))
    assert precious.read_text() == "precious"
    assert f"logs{' cannot be written to' if not plant else ''}" in job.err


def test_the_log_directory_keeps_each_tasks_output(launcher: Launcher) -> None:
    script = launcher.script(
        r"""
        for i in range(3):
            sys.stdout.write(f"\r{rank}: {i}/3"); sys.stdout.flush()
        print()
        print("to stderr", file=sys.stderr, end="")
        """
    )
    job = launcher.run("-n", "2", "--log-dir", "deep/logs", script)
    assert sorted(job.lines) == ["[worker/0] 0: 2/3", "[worker/1] 1: 2/3"]
    assert sorted(job.err.splitlines()[1:]) == [
        "[worker/0] to stderr",
        "[worker/1] to stderr",
        "phalanx: `phalanx report deep/logs` makes a page of this job",
    ]
    for rank in range(2):
        log = (launcher.folder / "deep" / "logs" / f"worker-{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"{rank}: 2/3", "to stderr"]


def test_much_output_arrives_whole_and_in_order(launcher: Launcher) -> None:
    script = launcher.script("for i in range(20_000):\n    print('line', i)\n")
    job = launcher.run("-n", "2", script)
    for rank in range(2):
        own = [line for line in job.lines if line.startswith(f"[worker/{rank}]")]
        assert own == [f"[worker/{rank}] line {i}" for i in range(20_000)]


def test_a_worker_that_never_stops_writing_is_ended_as_well(launcher: Launcher) -> None:
    script = launcher.script(
        """
        if rank == 0:
            while True:
                os.write(1, b"x" * 70 + b"\\n")
        time.sleep(0.5)
        sys.exit(3)
        """
    )
    with open(os.devnull, "w") as nowhere:
        job = launcher.run("-n", "2", script, stdout=nowhere)
    assert job.code == 3


def test_a_reader_that_goes_away_ends_the_job_quietly(launcher: Launcher) -> None:
    process = launcher.start_run("-n", "2", launcher.script("while True:\n    print('line')\n"))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(END_BOUND_S)
    assert process.returncode == 141
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read().replace("[worker", "")
    process.stderr.close()


@pytest.mark.slow  # It imports every backend that is installed.
def test_doctor_without_a_cluster_checks_this_machine(launcher: Launcher) -> None:
    done = launcher.python("-m", "phalanx", "doctor")
    assert "Traceback" not in done.err
    for subject in ("Python 3", " cores", "memory", "/dev/shm", "open files", BACKENDS[0], "ports of this machine"):
        assert re.search(f"^(ok|note|problem) .*{subject}", done.out, re.MULTILINE), (subject, done.out)


def test_stdout_and_stderr_in_one_file_keep_their_order(launcher: Launcher) -> None:
    script = launcher.script(
        "for i in range(300):\n    print(i, file=sys.stderr if i % 2 else sys.stdout, flush=True)\n"
    )
    with (launcher.folder / "both").open("w+") as both:
        assert launcher.run("-n", "1", script, stdout=both, stderr=both).code == 0
    lines = (launcher.folder / "both").read_text().splitlines()
    assert lines[1:] == [f"[worker/0] {i}" for i in range(300)]


def test_rank_0_reads_what_is_piped_in_and_the_others_nothing(launcher: Launcher) -> None:
    (launcher.folder / "input").write_text("data")
    with (launcher.folder / "input").open() as data:
        job = launcher.run("-n", "2", launcher.script("print(repr(sys.stdin.read()))"), stdin=data)
    assert sorted(job.lines) == ["[worker/0] 'data'", "[worker/1] ''"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_told_to_end_the_whole_job_ends(number: signal.Signals, launcher: Launcher) -> None:
    script = launcher.script("touch(f'there-{rank}')\nhang()")
    process = launcher.start_run("-n", "2", "--log-dir", "logs", script)
    for rank in range(2):
        pid_in(launcher.folder / f"there-{rank}")
    process.send_signal(number)
    _, err = process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 128 + number
    page = (launcher.folder / "logs" / "failure.txt").read_text()
    assert "it was stopped from outside" in page
    assert re.search(r"program.py.* in hang", page)
    # A scheduler's log keeps the page; who pressed Ctrl-C knows why the job ended.
    lines = err.splitlines()
    if number == signal.SIGINT:
        assert lines[1] == "phalanx: interrupted; ending the job (Ctrl-C again kills it at once)"
        assert [line for line in lines[2:] if "phalanx report logs" not in line] == []
    else:
        assert any("it was stopped from outside" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_told_to_end_while_it_waits_for_ssh_it_ends_that_as_well(number: signal.Signals, launcher: Launcher) -> None:
    ssh, pids = launcher.folder / "ssh", launcher.folder / "pids"
    ssh.write_text(f"#!/bin/sh\necho $$ >> {pids}\nexec sleep 600\n")
    ssh.chmod(0o755)
    launcher.environment["PHALANX_SSH"] = str(ssh)
    process = launcher.start_run("--hosts", "127.0.0.2:1,127.0.0.3:1", launcher.script("pass"))
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.send_signal(number)
    process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 128 + number
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split()))


def test_told_to_end_in_the_moment_in_which_it_starts_ssh_it_ends_that_as_well(launcher: Launcher) -> None:
    ssh, pids = launcher.folder / "ssh", launcher.folder / "pids"
    ssh.write_text(f"#!/bin/sh\nkill $PPID\necho $$ >> {pids}\nexec sleep 600\n")
    ssh.chmod(0o755)
    launcher.environment["PHALANX_SSH"] = str(ssh)
    process = launcher.start_run("--hosts", "127.0.0.2:1", launcher.script("pass"))
    process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_under_nohup_a_closed_terminal_does_not_matter(launcher: Launcher) -> None:
    script = launcher.script("touch('there')\nwait_for('go on')\nprint('done')")
    code = "import os, signal, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    process = launcher.start("-c", code, sys.executable, "-m", "phalanx", "run", "-n", "1", script)
    pid_in(launcher.folder / "there")
    process.send_signal(signal.SIGHUP)
    (launcher.folder / "go on").touch()
    out, _ = process.communicate(timeout=END_BOUND_S)
    assert (process.returncode, out) == (0, "[worker/0] done\n")


def test_told_twice_it_ends_at_once(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import signal
        signal.signal(signal.SIGINT, lambda *_: touch("told"))
        touch("deaf")
        while True:
            time.sleep(0.1)
        """
    )
    process = launcher.start_run("-n", "1", script)
    pid_in(launcher.folder / "deaf")
    process.send_signal(signal.SIGINT)
    pid_in(launcher.folder / "told")
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 130
    assert time.monotonic() - start < INTERRUPT_GRACE_S


def test_the_program_may_finish_something_after_ctrl_c(launcher: Launcher) -> None:
    script = launcher.script(
        """
        try:
            touch(f"there-{rank}")
            hang()
        except KeyboardInterrupt:
            time.sleep(0.5)
            touch(f"saved-{rank}")
        """
    )
    process = launcher.start_run("-n", "2", script)
    for rank in range(2):
        pid_in(launcher.folder / f"there-{rank}")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 130
    assert all((launcher.folder / f"saved-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killing_a_worker_ends_the_job_with_its_signal(rank: int, launcher: Launcher) -> None:
    script = launcher.script("touch(f'there-{rank}')\nhang()")
    process = launcher.start_run("-n", "2", script)
    pids = [pid_in(launcher.folder / f"there-{r}") for r in range(2)]
    os.kill(pids[rank], signal.SIGKILL)
    _, err = process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 137
    assert f"worker/{rank} (rank {rank}, pid {pids[rank]}" in err


def test_killing_the_launcher_kills_the_workers_and_what_they_started(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import subprocess
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(f"helper-{rank}").write_text(str(helper.pid))
        touch(f"there-{rank}")
        while True:   # holds the interpreter, as native code may
            pass
        """
    )
    process = launcher.start_run("-n", "2", script)
    pids = [pid_in(launcher.folder / f"{kind}-{r}") for kind in ("there", "helper") for r in range(2)]
    assert all(psutil.pid_exists(pid) for pid in pids)
    process.kill()
    process.communicate(timeout=END_BOUND_S)
    launcher.assert_all_gone()


def test_killing_the_launcher_at_a_random_moment_of_the_start_leaves_nothing(launcher: Launcher) -> None:
    script = launcher.script("hang()")
    for files in range(3, 9):  # the moment is a number of processes' open files, not a time
        process = launcher.start_run("-n", "3", script)
        own = psutil.Process(process.pid)
        wait_until(lambda own=own, files=files: own.num_fds() >= files + 3 or len(launcher.processes()) > 2)
        process.kill()
        process.communicate(timeout=END_BOUND_S)
    launcher.assert_all_gone()


def test_a_daemon_that_left_its_group_is_ended_with_the_job(launcher: Launcher) -> None:
    script = launcher.script(
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                touch("daemon")
                hang()
            os._exit(0)
        os.wait()
        wait_for("daemon")
        """
    )
    assert launcher.run("-n", "1", script).code == 0
    assert not psutil.pid_exists(pid_in(launcher.folder / "daemon"))


def test_orphans_that_have_ended_do_not_stay_as_zombies_of_the_launcher(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import subprocess
        subprocess.run("for i in 1 2 3 4 5; do sleep 0.01 & done", shell=True)
        def children():
            return Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        while children() != [str(os.getpid())]:
            time.sleep(0.01)
        """
    )
    job = launcher.run("-n", "1", script)
    assert job.code == 0, job.err


def test_what_the_shell_has_started_before_the_launcher_is_left_alone(launcher: Launcher) -> None:
    """The entry point of many containers: `tensorboard & exec "$@"`."""
    command = f"sleep 600 & echo $! > other; exec {shlex.quote(sys.executable)} -m phalanx run -n 1 "
    script = launcher.script("if os.fork() == 0:\n    os.setsid()\n    touch('own')\n    hang()\nwait_for('own')")
    subprocess.run(
        ["bash", "-c", command + shlex.quote(script)],
        cwd=launcher.folder,
        env=launcher.environment,
        timeout=JOB_BOUND_S,
        check=True,
    )
    other = psutil.Process(pid_in(launcher.folder / "other"))
    assert not psutil.pid_exists(pid_in(launcher.folder / "own"))
    assert other.is_running()
    other.kill()


def test_no_file_is_left_in_the_temporary_folders(launcher: Launcher) -> None:
    temporary = launcher.folder / "tmp"
    temporary.mkdir()
    launcher.environment["TMPDIR"] = str(temporary)
    script = launcher.script("touch(f'there-{rank}')\nhang()")
    process = launcher.start_run("-n", "2", script)
    for rank in range(2):
        pid_in(launcher.folder / f"there-{rank}")
    process.kill()
    process.communicate(timeout=END_BOUND_S)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-n", "2", "missing.py"], 64, "There is no script missing.py"),
        (["--hosts", "a:x", "missing.py"], 64, "is not a host"),
        (["missing.py"], 64, "There is no script missing.py"),
        (["-np", "2", "-H", "a:1", "x.py"], 64, "the hosts have 1 places"),
        (["--hosts", "a:1", "--hostfile", "/dev/null", "x.py"], 64, "Give one of them"),
        (["-n", "0", "x.py"], 2, "--workers"),
        (["-n", "9999999999", "x.py"], 2, "at most 99999 workers"),
        (["--hosts", "a:9999999999", "x.py"], 64, "at most 99999 workers"),
        (["-np", "3", "--min-np", "4", "x.py"], 2, "ascending order"),
        (["-n", "2:3", "--max-np", "4", "x.py"], 2, "Use one of them"),
        (["-np", "3", "--min-np", "2", "--max-np", "4", "-H", "a:2", "x.py"], 64, "the hosts have 2 places"),
        (["-n", "2:4", "-H", "a:1", "x.py"], 64, "the hosts have 1 places"),
        (["-n", "1:4", "-H", "a:1", "missing.py"], 64, "There is no script missing.py"),  # the minimum is met
        (["-n", "2"], 2, "Name the script"),
        (["-n", "2", "--backend", "numpy", "x.py"], 2, "numpy"),
        (["-n", "1", "--log-dir", "/proc/nowhere", "."], 64, ""),
    ],
)
def test_a_bad_command_line_is_explained(arguments: list[str], code: int, message: str, launcher: Launcher) -> None:
    (launcher.folder / "__main__.py").touch()
    job = launcher.run(*arguments)
    assert job.code == code, job.err
    assert message in job.err
    assert "Traceback" not in job.err


def test_the_version_is_told(launcher: Launcher) -> None:
    from phalanx.version import __version__

    assert launcher.python("-m", "phalanx", "--version").out.split()[-1] == __version__


def test_the_launcher_imports_no_framework(launcher: Launcher) -> None:
    """While it runs a job, either: that would take its time from the workers."""
    program = f"""
        import atexit, sys
        from phalanx.cli.main import main
        atexit.register(lambda: print({{"keras", "numpy"}} & {{*sys.modules}}))
        sys.argv = ["phalanx", "run", "--workers", "1", {launcher.script("pass", "worker.py")!r}]
        main()
    """
    assert launcher.python(launcher.script(program)).lines[-1] == "set()"


def test_a_worker_imports_no_framework_before_the_program(launcher: Launcher) -> None:
    job = launcher.run("-n", "1", launcher.script("print({'keras', 'numpy', 'msgspec'} & {*sys.modules})"))
    assert job.lines == ["[worker/0] set()"]


def test_a_killed_task_of_a_job_with_servers_is_started_again_at_its_port(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import json, os, pathlib, signal, socket
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        name = task["type"] + str(task["index"])
        port = socket.socket(fileno=int(os.environ["PHALANX_LISTEN_FD"])).getsockname()[1]
        lives = pathlib.Path(name)
        with lives.open("a") as file:
            file.write(f"{port} {bool(os.environ.get('PHALANX_SNAPSHOTS'))}\\n")
        if name != "worker1" and len(lives.read_text().splitlines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "ps0":
            touch("served")
        else:
            wait_for("served")  # the job is over with its workers
        print(name, "has lived")
        """
    )
    job = launcher.run("--ps", "1", "--workers", "2", script)
    assert job.code == 0, job.err
    for name in ("worker/0", "ps/0"):
        assert f"phalanx: {name} was killed by SIGKILL; starting it again (1 of 10)" in job.err
        first, second = (launcher.folder / name.replace("/", "")).read_text().splitlines()
        assert first == second
        assert first.endswith(str(name == "ps/0"))


def test_what_is_kept_outlives_a_server_and_not_the_job(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import json, os, pathlib, signal
        if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
            kept = pathlib.Path(os.environ["PHALANX_SNAPSHOTS"].split(":")[0])
            if not kept.read_bytes():
                kept.write_bytes(b"of a former life")
                os.kill(os.getpid(), signal.SIGKILL)
            print(kept.read_bytes().decode(), os.readlink(kept).endswith("(deleted)"))
            touch("read")
        else:
            wait_for("read")
        """
    )
    job = launcher.run("--ps", "1", "--workers", "1", script)
    assert job.code == 0, job.err
    assert any(line.endswith("of a former life True") for line in job.lines)


def test_without_restarts_a_killed_server_ends_the_job(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import json, os, signal
        assert "PHALANX_SNAPSHOTS" not in os.environ
        if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    job = launcher.run("--restarts", "0", "--ps", "1", "--workers", "1", script)
    assert job.code == 137
    assert "starting it again" not in job.err
