"""The processes of a cluster with parameter servers, started by hand, without `phalanx run`."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.launcher.worker_environment import thread_settings
from tests.support import fork_server
from tests.support.commands import ROOT
from tests.support.programs import environment

BOUND_S = 240.0
"""Against hanging; a loaded machine may take a good part of it."""
CASE_S = 20.0
"""More for each further case that a job runs."""


class Tasks:
    """All tasks of a job. Their ports stay ours, so that a task can be started again at its address.

    Args:
        folder: for what they print and write.
        arguments: of the program, as after `python`.
        chief: whether there is a task `chief` besides the workers.
        cases: how many cases the program runs, one after another.
        starts_others: whether the program starts Python programs itself.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        servers: int,
        workers: int,
        backend: str,
        evaluators: int = 0,
        settings: dict[str, str] | None = None,
        chief: bool = False,
        cases: int = 1,
        starts_others: bool = False,
    ):
        self.folder = folder
        self._bound_s = BOUND_S + CASE_S * (cases - 1)
        self._arguments = arguments
        self._backend = backend
        self._starts_others = starts_others
        self._settings = {"PHALANX_SECRET": secrets.token_hex(), **(settings or {})}
        self.names = [
            *(["chief/0"] if chief else []),
            *[f"worker/{index}" for index in range(workers)],
            *[f"ps/{index}" for index in range(servers)],
            *[f"evaluator/{index}" for index in range(evaluators)],
        ]
        self.listeners = {name: socket.create_server(("127.0.0.1", 0)) for name in self.names}
        self.processes = {name: self.start(name) for name in self.names}

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for listener in self.listeners.values():
            listener.close()

    def address(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", self.listeners[name].getsockname()[1]

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a task, for the first time or again."""
        kind, _, index = name.partition("/")
        cluster: dict[str, list[str]] = {}
        for other in self.names:
            cluster.setdefault(other.partition("/")[0], []).append(f"127.0.0.1:{self.address(other)[1]}")
        listener = self.listeners[name]
        own = {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": int(index)}}),
            "PHALANX_LISTEN_FD": str(listener.fileno()),
            **thread_settings(1),
        }
        with open(self._log(name), "ab") as log:
            return fork_server.popen(
                [sys.executable, *self._arguments],
                starts_others=self._starts_others,
                env={**environment(self._backend), **self._settings, **own},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
            )

    def restart(self, name: str) -> None:
        self.processes[name] = self.start(name)

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def said(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + self._bound_s
        while not condition():
            assert time.monotonic() < until, f"not within {self._bound_s:g} s: {what}\n{self.everything()}"
            time.sleep(0.02)

    def ends(self, *names: str) -> dict[str, int]:
        """The exit codes of these tasks (all, if none is named), which must end by themselves."""
        chosen = names or tuple(self.names)
        self.wait_for(lambda: all(self.processes[name].poll() is not None for name in chosen), f"{chosen} end")
        return {name: self.processes[name].returncode for name in chosen}

    def everything(self) -> str:
        return "\n".join(f"--- {name}\n{self.said(name)[-3000:]}" for name in self.names)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '-')}.log"
