"""Ports that stay ours, and tasks that meet in threads of this process or in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster import ClusterSpec, JobFacts, Node, Task, join
from phalanx.config.job_config import JobConfig

SECRET = b"a secret for tests only"
BOUND_S = 60.0
"""Against hanging."""


def wait_until(condition: Callable[[], object], seconds: float = BOUND_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come about"
        time.sleep(0.01)


class Ports:
    """Reserved ports: bound here without listening, so that dialling them is refused."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def new(self, host: str = "127.0.0.1") -> str:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        # A task sets this too, and so may bind the same port as long as this one does not listen.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        self._sockets.append(sock)
        port = sock.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def workers(self, count: int, host: str = "127.0.0.1") -> ClusterSpec:
        return ClusterSpec({"worker": [self.new(host) for _ in range(count)]})

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def ports() -> Iterator[Ports]:
    ports = Ports()
    yield ports
    ports.close()


class Meeting:
    """Tasks that call `join` in threads of this process. A context manager: closes what they got."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.results: dict[str, Node | BaseException] = {}

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(BOUND_S)
        for result in self.results.values():
            if isinstance(result, Node):
                result.close()
        assert not any(thread.is_alive() for thread in self._threads)

    def start(
        self,
        spec: ClusterSpec,
        task: Task,
        *,
        name: str = "",
        facts: JobFacts | None = None,
        timeout_s: float = BOUND_S,
        **config: Any,
    ) -> None:
        """Let a task join; its result will be under `name`, or the task's name."""
        name = name or str(task)
        config = {"secret": SECRET, **config}

        def body() -> None:
            try:
                self.results[name] = join(
                    spec, task, facts=facts or JobFacts(seed=1), config=JobConfig(**config), timeout_s=timeout_s
                )
            except BaseException as error:
                self.results[name] = error

        thread = threading.Thread(target=body, name=f"test-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> dict[str, Node | BaseException]:
        for thread in self._threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), f"{thread.name} did not end"
        return self.results

    def nodes(self) -> list[Node]:
        """All results, which must be nodes."""
        for name, result in self.wait().items():
            assert isinstance(result, Node), f"{name}: {result!r}"
        return [result for result in self.results.values() if isinstance(result, Node)]


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with Meeting() as meeting:
        yield meeting


def exchange(nodes: list[Node]) -> None:
    """Each sends its rank to each over their link, and all arrive."""
    deadline = time.monotonic() + BOUND_S
    for node in nodes:
        for link in node.membership.links.values():
            link.send(str(node.membership.rank).encode(), deadline=deadline)
    for node in nodes:
        for rank, link in node.membership.links.items():
            assert link.receive(deadline=deadline)[0] == str(rank).encode()


class Process:
    """A task in a process of its own: `python -m tests.cluster.member`. What it reports comes as events."""

    def __init__(self, spec: ClusterSpec, task: Task, *, prefix: list[str] | None = None, **variables: str):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
        environment |= {
            "TF_CONFIG": json.dumps({"cluster": spec.as_dict(), "task": {"type": task.type, "index": task.index}}),
            "PHALANX_SECRET": SECRET.decode(),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **variables,
        }
        self.task = task
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.log = ""
        self.process = subprocess.Popen(
            [*(prefix or []), sys.executable, "-m", "tests.cluster.member"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def event(self) -> dict[str, Any]:
        try:
            return self._events.get(timeout=BOUND_S)
        except queue.Empty:
            raise AssertionError(f"{self.task} reported nothing:\n{self.log}") from None

    def write(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def tell(self, command: str) -> dict[str, Any]:
        """Send a command; the event that answers it."""
        self.write(command)
        return self.event()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Let it close its node and end; its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait(BOUND_S)
        for reader in self._readers:
            reader.join(BOUND_S)
        return code

    def destroy(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Processes:
    """Makes processes, and leaves none."""

    def __init__(self) -> None:
        self._all: list[Process] = []

    def start(self, spec: ClusterSpec, task: Task, **arguments: Any) -> Process:
        process = Process(spec, task, **arguments)
        self._all.append(process)
        return process

    def close(self) -> None:
        for process in self._all:
            process.destroy()


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()
