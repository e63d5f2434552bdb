"""`phalanx run --hosts`, through a fake ssh that runs the command on this machine."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.launcher.host_messages import WorkerSpec
from phalanx.launcher.host_slots import HostSpec
from phalanx.launcher.hosts import ssh_connection
from phalanx.launcher.hosts.ssh_host import SSHHost
from tests.launcher.conftest import JOB_BOUND_S, Launcher, wait_until

# Loopback addresses that are not "localhost" stand for other hosts; all of them reach this machine.
A, B = "127.0.0.2", "127.0.0.3"
END_BOUND_S = 20.0

# What ssh does, as far as it matters: the command goes to the login shell, in the home folder, without the
# environment of the caller; the connection is stdin and stdout.
FAKE_SSH = """#!{python}
import os, sys
host, command = sys.argv[-2:]
with open({log!r}, "a") as log:
    log.write(repr(sys.argv) + "\\n")
environment = {{name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "PHALANX_TEST_MARK")}}
environment["REMOTE_HOST"] = host
os.chdir("/")
{before}
os.execve("/bin/sh", ["sh", "-c", command], environment)
"""

# The real ssh stays between both ends, and nothing but its death ends the connection.
RELAY = """
import subprocess, threading
far = subprocess.Popen(["sh", "-c", command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def relay(source, target):
    while data := os.read(source, 65536):
        os.write(target, data)
    os.close(target)
threading.Thread(target=relay, args=(0, far.stdin.fileno()), daemon=True).start()
with open({pid_file!r}, "w") as file:
    file.write(str(os.getpid()))
relay(far.stdout.fileno(), 1)
sys.exit(far.wait())
"""


@pytest.fixture
def remote(launcher: Launcher) -> Launcher:
    install_ssh(launcher)
    return launcher


def install_ssh(launcher: Launcher, before: str = "") -> None:
    path = launcher.folder / "fake-ssh"
    path.write_text(FAKE_SSH.format(python=sys.executable, log=str(launcher.folder / "ssh.log"), before=before))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    launcher.environment["PHALANX_SSH"] = str(path)


def test_workers_run_on_their_hosts_with_ports_of_their_own(remote: Launcher) -> None:
    script = remote.script(
        """
        import socket
        listener = socket.socket(fileno=int(os.environ["PHALANX_LISTEN_FD"]))
        print(json.dumps({"rank": rank, "host": os.environ["REMOTE_HOST"], "port": listener.getsockname()[1],
            "cluster": json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"], "folder": os.getcwd(),
            "secret": os.environ["PHALANX_SECRET"], "backend": os.environ["KERAS_BACKEND"],
            "home": os.environ.get("OF_THE_LAUNCHER")}))
        """
    )
    remote.environment["OF_THE_LAUNCHER"] = "yes"
    job = remote.run("--hosts", f"{A}:2,{B}:1", "--backend", "torch", script)
    assert job.code == 0, job.err
    reports = {report["rank"]: report for report in (json.loads(line.partition("] ")[2]) for line in job.lines)}
    assert [reports[rank]["host"] for rank in range(3)] == [A, A, B]
    for rank, report in reports.items():
        assert report["cluster"] == reports[0]["cluster"]
        assert report["cluster"][rank] == f"{report['host']}:{report['port']}"
        assert report["folder"] == str(remote.folder)
        assert report["secret"] == reports[0]["secret"]
        assert report["backend"] == "torch"
        assert report["home"] is None
    assert reports[0]["secret"] not in (remote.folder / "ssh.log").read_text()


def test_output_errors_and_exit_codes_come_back(remote: Launcher) -> None:
    script = remote.script(
        """
        from phalanx.runtime.progress import report
        report("evaluate", epoch=1)
        print("out", rank)
        print("err", rank, file=sys.stderr)
        touch(f"said-{rank}")
        if rank == 1:
            wait_for("said-0")
            raise ValueError("boom far away")
        """
    )
    job = remote.run("--hosts", f"{A}:1,{B}:1", "--log-dir", "logs", script)
    assert job.code == 1
    assert sorted(job.lines) == ["[worker/0] out 0", "[worker/1] out 1"]
    assert "[worker/1] err 1" in job.err
    assert f"on {B}) failed with ValueError: boom far away" in job.err
    assert "it was in: evaluate, epoch 2" in job.err
    assert (remote.folder / "logs" / "worker-1.log").read_text().startswith("out 1\n")


def test_the_stack_of_a_worker_that_hangs_elsewhere_is_shown(remote: Launcher) -> None:
    script = remote.script(
        """
        def stuck():
            touch("stuck")
            hang()
        if rank == 0:
            stuck()
        wait_for("stuck")
        sys.exit(3)
        """
    )
    job = remote.run("--hosts", f"{A}:1,{B}:1", script)
    assert job.code == 3
    assert "in stuck" in job.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_the_workers_elsewhere_end(number: signal.Signals, remote: Launcher) -> None:
    script = remote.script("try:\n    touch(f'there-{rank}')\n    hang()\nfinally:\n    touch(f'finally-{rank}')\n")
    process = remote.start_run("--hosts", f"{A}:1,{B}:1", script)
    wait_until(lambda: all((remote.folder / f"there-{rank}").exists() for rank in range(2)), bound_s=60)
    process.send_signal(number)
    process.communicate(timeout=END_BOUND_S)
    assert process.returncode == 128 + number
    if number == signal.SIGINT:
        assert all((remote.folder / f"finally-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("victim", ["launcher", "connection", "agent"])
def test_nothing_is_left_elsewhere_whatever_is_killed(victim: str, remote: Launcher) -> None:
    install_ssh(remote, before=RELAY.format(pid_file=str(remote.folder / "connection")))
    script = remote.script("Path(f'agent-{rank}').write_text(str(os.getppid()))\ntouch(f'there-{rank}')\nhang()")
    process = remote.start_run("--hosts", f"{A}:2", script)
    wait_until(lambda: all((remote.folder / f"there-{rank}").exists() for rank in range(2)), bound_s=60)
    pids = {
        "launcher": lambda: process.pid,
        "agent": lambda: int((remote.folder / "agent-0").read_text()),
        "connection": lambda: int((remote.folder / "connection").read_text()),
    }
    psutil.Process(pids[victim]()).kill()
    _, err = process.communicate(timeout=END_BOUND_S)
    assert process.returncode == (-signal.SIGKILL if victim == "launcher" else 71)
    if victim != "launcher":
        assert "was lost with its host" in err
    remote.assert_all_gone()


def test_a_host_that_cannot_be_reached_is_named(remote: Launcher) -> None:
    install_ssh(remote, before="sys.stderr.write('connection refused\\n'); sys.exit(255)")
    job = remote.run("--hosts", f"{A}:1", remote.script("pass"))
    assert job.code == 66
    assert "connection refused" in job.err
    assert f"ssh to {A} ended with exit code 255" in job.err
    assert "Traceback" not in job.err


def test_a_host_that_does_not_answer_is_given_up(remote: Launcher) -> None:
    install_ssh(remote, before="import time; time.sleep(1000)")
    job = remote.run("--hosts", f"{A}:1,{B}:1", "--start-timeout", "1", remote.script("pass"))
    assert job.code == 66
    assert "did not answer through ssh in time" in job.err


@pytest.mark.parametrize(
    ("ssh", "message"),
    [("no-such-ssh", "No such file"), ("ssh 'open", "No closing quotation"), ("/dev/null", "denied")],
)
def test_an_ssh_that_is_none_is_told_of(ssh: str, message: str, remote: Launcher) -> None:
    remote.environment["PHALANX_SSH"] = ssh
    job = remote.run("--hosts", f"{A}:1", remote.script("pass"))
    assert job.code == 64
    assert message in job.err
    assert "Traceback" not in job.err


def test_what_is_not_utf_8_cannot_go_to_another_host(remote: Launcher) -> None:
    job = remote.run("--hosts", f"{A}:1", remote.script("pass"), "\udcff")
    assert job.code == 64
    assert "is not UTF-8" in job.err
    assert "Traceback" not in job.err
    remote.environment["KERAS_ODD"] = "\udcff"
    job = remote.run("--hosts", f"{A}:1", remote.script("pass"))
    assert job.code == 64
    assert "KERAS_ODD='\\udcff' cannot be sent" in job.err


def test_settings_without_a_value_are_none_and_a_start_may_take_for_ever(remote: Launcher) -> None:
    remote.environment["PHALANX_REMOTE_PYTHON"] = ""
    job = remote.run("--hosts", f"{A}:1", "--start-timeout", "inf", remote.script("print('fine')"))
    assert job.lines == ["[worker/0] fine"], job.err


def test_a_host_without_the_jobs_folder_is_named(remote: Launcher) -> None:
    install_ssh(remote, before=f"os.rename({str(remote.folder)!r}, {str(remote.folder) + '-gone'!r})")
    job = remote.run("--hosts", f"{A}:1", remote.script("pass"))
    (remote.folder.parent / f"{remote.folder.name}-gone").rename(remote.folder)
    assert job.code == 64
    assert f"{A}: cannot work in {remote.folder}" in job.err


def test_what_a_login_script_prints_does_no_harm(remote: Launcher) -> None:
    install_ssh(remote, before="print('Welcome to the host!', flush=True)")
    job = remote.run("--hosts", f"{A}:1", remote.script("print('fine')"))
    assert job.code == 0
    assert job.lines == ["[worker/0] fine"]
    assert f"[{A}] Welcome to the host!" in job.err


def test_a_login_script_that_leaves_a_line_open_does_no_harm(remote: Launcher) -> None:
    install_ssh(remote, before="print('\\033]0;title\\007', end='', flush=True)")
    job = remote.run("--hosts", f"{A}:1", "--start-timeout", "30", remote.script("print('fine')"))
    assert job.code == 0, job.err
    assert job.lines == ["[worker/0] fine"]


def test_an_ssh_that_does_not_block_loses_nothing_of_what_the_job_and_its_page_say(remote: Launcher) -> None:
    install_ssh(remote, before="os.set_blocking(2, False)\nsys.stderr.write('warning of ssh\\r\\n')")
    script = remote.script("for i in range(20_000):\n    print('line', i)\nsys.exit('boom')")
    ours, theirs = os.pipe()
    process = remote.start_run("--hosts", f"{A}:1", script, stdout=theirs, stderr=theirs)
    wait_until(lambda: not select.select([], [theirs], [], 0)[1], bound_s=JOB_BOUND_S)  # the pipe is full
    os.close(theirs)
    with open(ours) as output:
        lines = output.read().splitlines()
    assert process.wait(END_BOUND_S) == 1
    assert lines[1] == f"[{A}] warning of ssh"
    assert lines[2:20_002] == [f"[worker/0] line {i}" for i in range(20_000)]
    said = lines.index("worker/0 said last:")
    assert lines[said + 1] == "boom"
    assert lines[-1] == "-" * 78


def test_localhost_needs_no_ssh(remote: Launcher) -> None:
    job = remote.run("--hosts", "localhost:2", remote.script("print(rank)"))
    assert sorted(job.lines) == ["[worker/0] 0", "[worker/1] 1"]
    assert not (remote.folder / "ssh.log").exists()


def test_an_agent_learns_that_a_launcher_is_there_which_does_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its terminal is paused, with Ctrl-S: the launcher waits until what it shows is read."""
    monkeypatch.setattr(ssh_connection, "HEARTBEAT_S", 0.01)
    received = tmp_path / "received"
    (ssh := tmp_path / "ssh").write_text(f"#!/bin/sh\nexec cat > {received}\n")
    ssh.chmod(0o700)
    with selectors.DefaultSelector() as selector:
        host = SSHHost(selector, HostSpec(A, 1), show_line=print, environ={"PHALANX_SSH": str(ssh), "PATH": os.defpath})
        host.connect()
        host.start([WorkerSpec(0, ("program.py",), {})])
        wait_until(lambda: received.exists() and received.read_bytes().count(b"keep_alive") > 2)
        host.close()
