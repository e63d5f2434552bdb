"""The agent on another host: its workers live as long as it hears of the launcher."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from phalanx.launcher.host_messages import Answer, Command, KeepAlive, Output, Prepare, Start, Started, WorkerSpec
from tests.launcher.conftest import Launcher, wait_until

LEASE_S = 2.0
AGENT = f"from phalanx.launcher.hosts import launcher_channel as c, remote_agent as a; c.LEASE_S = {LEASE_S}; a.main()"
BOUND_S = 60.0


@pytest.fixture
def agent(launcher: Launcher) -> Iterator[subprocess.Popen[str]]:
    with launcher.start("-c", AGENT, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def send(agent: subprocess.Popen[str], command: Command) -> None:
    assert agent.stdin is not None
    agent.stdin.write(msgspec.json.encode(command).decode() + "\n")
    agent.stdin.flush()


def start_worker(agent: subprocess.Popen[str], launcher: Launcher, program: str = "hang()") -> psutil.Process:
    send(agent, Prepare(1, str(launcher.folder)))
    send(agent, Start([WorkerSpec(0, (launcher.script(program),), {"TF_CONFIG": "{}"})]))
    assert agent.stdout is not None
    for line in agent.stdout:
        answer = msgspec.json.decode(line, type=Answer) if line.strip() else None
        assert program != "hang()" or not isinstance(answer, Output), answer
        if isinstance(answer, Started):
            return psutil.Process(answer.pid)
    raise AssertionError("the worker was not started")


def test_workers_end_when_nothing_comes_from_the_launcher(agent: subprocess.Popen[str], launcher: Launcher) -> None:
    """Behind a network that was cut, stdin does not end."""
    worker = start_worker(agent, launcher)
    assert agent.wait(BOUND_S) == 0
    assert agent.stderr is not None
    assert "no sign of the launcher" in agent.stderr.read()
    wait_until(lambda: not worker.is_running())


def test_workers_live_while_the_launcher_shows_itself(agent: subprocess.Popen[str], launcher: Launcher) -> None:
    worker = start_worker(agent, launcher)
    until = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < until:
        send(agent, KeepAlive())
        time.sleep(LEASE_S / 10)
        assert worker.is_running()
    assert agent.poll() is None


CHATTER = """
import time
while True:
    print("x" * 10_000, flush=True)
    time.sleep(0.001)
"""


def test_workers_end_though_nothing_of_what_they_print_gets_through(
    agent: subprocess.Popen[str], launcher: Launcher
) -> None:
    """A network that was cut takes no output either, so the agent may be in the middle of a write."""
    worker = start_worker(agent, launcher, CHATTER)
    assert agent.wait(BOUND_S) == 0
    wait_until(lambda: not worker.is_running())


def test_workers_live_while_the_launcher_reads_nothing_but_shows_itself(
    agent: subprocess.Popen[str], launcher: Launcher
) -> None:
    """Its terminal is paused, with Ctrl-S."""
    worker = start_worker(agent, launcher, CHATTER)
    until = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < until:
        send(agent, KeepAlive())
        time.sleep(LEASE_S / 10)
        assert agent.poll() is None
    assert agent.stdout is not None
    answers = [msgspec.json.decode(agent.stdout.readline(), type=Answer) for _ in range(10)]
    assert any(isinstance(answer, Output) for answer in answers), "what was written meanwhile is damaged"
    assert worker.is_running()
