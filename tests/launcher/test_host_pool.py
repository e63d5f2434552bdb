"""Elastic jobs over several hosts that join, leave and fail: through a fake ssh, with members that have no model."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.launcher.elastic_hosts.host_pool import ElasticOptions, HostPool
from phalanx.launcher.host_slots import HostSpec
from phalanx.launcher.hosts.output_streams import OutputStreams
from phalanx.launcher.job_observer import JobObserver
from tests.launcher.conftest import Launcher, wait_until
from tests.launcher.test_ssh_host import A, B, install_ssh

C = "127.0.0.4"
MEMBER = Path(__file__).with_name("member.py")
pytestmark = pytest.mark.timeout(900)

BOUND_S = 180.0
"""Against hanging only."""


class Running:
    """A job that runs; `output` is what it has said so far."""

    def __init__(self, launcher: Launcher, *arguments: str):
        self._launcher = launcher
        self.folder = launcher.folder
        self.output = ""
        self._process = launcher.start_run(
            *arguments, str(MEMBER), str(self.folder), stderr=subprocess.STDOUT, bufsize=1
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def says(self, text: str) -> None:
        """Returns when it has said this."""
        wait_until(lambda: text in self.output, lambda: f"{text!r} is not in\n{self.output}", BOUND_S)

    def steps(self, index: int) -> list[dict[str, Any]]:
        path = self.folder / f"worker-{index}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def takes_steps(self, index: int, **facts: Any) -> dict[str, Any]:
        """Returns when a worker takes a step, from now on, of which this is true; the step."""
        seen = len(self.steps(index))

        def found() -> list[dict[str, Any]]:
            return [s for s in self.steps(index)[seen:] if all(s[name] == value for name, value in facts.items())]

        wait_until(found, lambda: f"worker/{index} has no step with {facts}\n{self.output}", BOUND_S)
        return found()[0]

    def status(self) -> str:
        return self._launcher.python("-m", "phalanx", "status").out

    def interrupted(self) -> int:
        """As by Ctrl-C; its exit code."""
        self._process.send_signal(signal.SIGINT)
        return self.wait()

    def ends(self) -> int:
        """Tell it to stop; its exit code."""
        (self.folder / "stop").touch()
        return self.wait()

    def wait(self) -> int:
        code = self._process.wait(BOUND_S)
        self._reader.join(BOUND_S)
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    install_ssh(launcher)
    launcher.environment["PHALANX_JOBS"] = str(tmp_path / "jobs")
    launcher.environment["PHALANX_DISCOVERY_SECONDS"] = "0.2"
    yield lambda *arguments: Running(launcher, *arguments)
    for process in launcher.processes():  # of a test that has failed
        process.kill()


def hosts(folder: Path, text: str) -> None:
    """What the discovery script prints from now on."""
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / "hosts")


def test_hosts_that_are_drained_at_once_leave_enough_slots() -> None:
    host_specs = [HostSpec(name, 1) for name in (A, B, C)]
    with selectors.DefaultSelector() as selector:
        pool = HostPool(
            [f"worker/{rank}" for rank in range(3)],
            selector,
            OutputStreams(),
            ElasticOptions(minimum=2, maximum=3),
            host_specs=host_specs,
            observer=JobObserver(),
            on_host_line=print,
        )
        pool.drain(A)
        assert [host_spec.name for host_spec in pool.host_specs] == [B, C]
        with pytest.raises(ConfigurationError, match="the job has 1 slots, and needs 2"):
            pool.drain(B)


def test_a_host_is_lost_and_its_workers_go_to_where_there_is_room(run: Callable[..., Running]) -> None:
    job = run("--hosts", f"{A}:2,{B}:2", "--workers", "1:3", "--blacklist-cooldown-range", "2", "10")
    agent = job.takes_steps(0, members=3, host=A)["agent"]
    os.kill(agent, signal.SIGKILL)
    job.says(f"{A} is lost: the connection has ended; next attempt in 2 s")
    job.takes_steps(2, host=B, rank=0)  # the others go on, the next one as chief
    job.says(f"worker/0 starts on {B}")
    job.takes_steps(0, host=B)
    job.says(f"worker/1 starts on {A}")
    job.takes_steps(1, members=3, host=A)
    assert job.ends() == 0, job.output


def test_hosts_are_discovered_and_taken_back(run: Callable[..., Running], launcher: Launcher) -> None:
    hosts(launcher.folder, f"{A}:1\n{B}\n")
    job = run("-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", "cat hosts")
    job.takes_steps(0, members=2, host=A)
    hosts(launcher.folder, f"{A}:1\n{B}\n{C}:4\n")
    job.says(f"worker/2 starts on {C}")
    job.takes_steps(2, members=3, host=C)
    (launcher.folder / "hosts").unlink()
    job.says("the host discovery script cat hosts failed: it ended with exit code 1")
    hosts(launcher.folder, f"{B}\n{C}:4\n")
    job.says("the host discovery script cat hosts recovered")
    job.says(f"worker/0 leaves before the next step: {A} is withdrawn")
    job.says("worker/0 leaves the job: its host is withdrawn")
    job.says(f"worker/0 starts on {C}")  # which has room
    job.takes_steps(0, members=3, host=C)
    steps = [step["step"] for step in job.steps(1)]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost or repeated"
    assert job.ends() == 0, job.output
    assert job.output.count("cat hosts failed") == 1
    assert "is lost" not in job.output


@pytest.mark.slow
def test_all_hosts_are_replaced(run: Callable[..., Running], launcher: Launcher) -> None:
    """A worker that has the job's state stays until another one has it."""
    hosts(launcher.folder, f"{A}:2\n")
    job = run("--workers", "2:2", "--host-discovery-script", "cat hosts")
    job.takes_steps(0, members=2, host=A)
    hosts(launcher.folder, f"{B}:2\n")
    job.takes_steps(1, members=2, host=B)
    job.takes_steps(0, members=2, host=B)
    assert job.ends() == 0, job.output


@pytest.mark.slow
def test_a_host_that_keeps_failing_is_set_aside_for_a_while(run: Callable[..., Running], launcher: Launcher) -> None:
    bad = launcher.folder / f"bad-{B}"
    job = run("--hosts", f"{A}:1,{B}:1", "--workers", "1:2", "--blacklist-cooldown-range", "8", "10")
    agent = job.takes_steps(1, members=2, host=B)
    bad.touch()
    launcher_children = [p for p in launcher.processes() if p.ppid() == agent["agent"]]
    launcher_children[0].kill()
    job.says(f"{B} is blacklisted for 8 s: 3 of its workers failed")
    state = job.status()
    assert f"{B}  0 of 1 slots taken; blacklisted, 3 of its workers failed: next attempt in" in state, state
    assert f"{A}  1 of 1 slots taken" in state
    job.takes_steps(0, members=1)
    bad.unlink()
    job.takes_steps(1, members=2, host=B)
    assert job.ends() == 0, job.output


def test_too_few_slots_are_discovered(run: Callable[..., Running], launcher: Launcher) -> None:
    hosts(launcher.folder, f"{A}:1\n")
    job = run("--workers", "2:3", "--host-discovery-script", "cat hosts", "--start-timeout", "2")
    assert job.wait() == 66
    assert "slots were found in time, and 2 are needed" in job.output


@pytest.mark.slow
def test_a_chief_that_hangs_between_two_steps_is_evicted(run: Callable[..., Running], launcher: Launcher) -> None:
    launcher.environment["PHALANX_TIMEOUT"] = "3"
    job = run("--workers", "1:2")
    job.takes_steps(0, members=2, rank=0)
    (launcher.folder / "hang-0").touch()
    job.says("worker/0 was evicted: it made no progress while the others waited for it")
    (launcher.folder / "hang-0").unlink()
    job.takes_steps(1, rank=0)
    job.takes_steps(0, members=2)
    assert job.ends() == 0, job.output


@pytest.mark.slow
def test_members_that_the_launcher_ends_are_not_told_as_lost(run: Callable[..., Running], launcher: Launcher) -> None:
    (launcher.folder / "mute-0").touch()
    (launcher.folder / "linger-1").touch()
    job = run("--workers", "1:2")
    job.takes_steps(1, members=2)
    assert job.interrupted() == 130
    assert job.output.count("phalanx: interrupted; ending the job") == 1
    assert "is lost" not in job.output
    assert "has failed" not in job.output


@pytest.mark.slow
def test_a_straggler_is_named_once_and_when_it_is_over(run: Callable[..., Running], launcher: Launcher) -> None:
    job = run("--workers", "1:2")
    job.takes_steps(1, members=2)
    (launcher.folder / "slow-1").touch()
    job.says("worker/1 (rank 1) is slow, and the others wait for it: it computes")
    assert "slow, the others wait for it" in job.status()
    (launcher.folder / "slow-1").unlink()
    job.says("worker/1 (rank 1) recovered")
    assert job.ends() == 0, job.output
    assert job.output.count("is slow") == 1


def test_one_program_starts_again_on_the_hosts_that_are_left(launcher: Launcher) -> None:
    down = launcher.folder / "down"
    install_ssh(launcher, f"if host == {B!r} and os.path.exists({str(down)!r}): sys.exit('no route to host')")
    script = launcher.script(
        """
        workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        print("one of", len(workers))
        sys.stdout.flush()
        touch(f"said-{len(workers)}-{rank}")
        if len(workers) == 2 and rank == 1:
            wait_for("said-2-0")
            touch("down")
            os.kill(os.getppid(), 9)  # its host is gone
        if len(workers) == 2:
            hang()
        """
    )
    options = ("--hosts", f"{A}:1,{B}:1", "--workers", "1:2", "--devices-per-worker", "1")
    job = launcher.run(*options, script)
    assert job.code == 0, job.out + job.err
    said = [line.partition("] ")[2] for line in job.lines if "one of" in line]
    assert said[0] == "one of 2"  # the lost host may have taken what its worker said with it
    assert said[-1] == "one of 1"
    assert "Starting the whole job again (1 of 10)" in job.out + job.err
    assert "one program over 1 workers, of 2 at most" in job.out + job.err
    job = launcher.run(*options[:-4], "--workers", "2:2", *options[-2:], "--restarts", "0", script)
    assert "no route to host" in job.out + job.err
    assert job.code == RendezvousError.exit_code
