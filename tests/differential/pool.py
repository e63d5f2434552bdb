"""Long-lived processes that run programs: plain Keras, and the replicas of standing jobs of one, two and three."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.differential.worker import Outcome, serve

COLLECTIVE_TIMEOUT_S = 480.0
"""Phalanx's own, whose error says more than that a program did not end. Generous: the ranks compile side by side,
perhaps beside other searches."""
TIMEOUT_S = COLLECTIVE_TIMEOUT_S + 60.0
"""Of one program. It takes a second or two on a free core."""
AFTER_FAILURE_S = 30.0
"""How long replicas may take to end with a program that plain Keras did not run."""


@dataclass
class Result:
    """What a program did in plain Keras and on each rank; None: it hung."""

    plain: Outcome | None
    ranks: list[Outcome | None]


class _Team:
    """Processes that run one program together. Forked: this process has imported the backend, and must not use it."""

    def __init__(self, folder: Path, world_size: int | None):
        self.log = folder / f"{world_size or 'plain'}.log"
        self._context = multiprocessing.get_context("fork")
        self._stack = ExitStack()
        self._cores = sorted(os.sched_getaffinity(0))
        count = world_size or 1
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        secret = secrets.token_hex()
        self._workers = []
        for rank, listener in enumerate(listeners):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            variables = {
                "TF_CONFIG": json.dumps(task),
                "PHALANX_SECRET": secret,
                "PHALANX_LISTEN_FD": str(listener.fileno()),
                "PHALANX_TIMEOUT": str(COLLECTIVE_TIMEOUT_S),
                "PHALANX_RENDEZVOUS_TIMEOUT": str(COLLECTIVE_TIMEOUT_S),
            }
            core = self._cores[rank % len(self._cores)]
            self._workers.append(self._start({core}, variables if world_size else {}))
        for listener in listeners:
            listener.close()

    def _start(self, cores: set[int], variables: dict[str, str]) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self.log, cores, variables), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def send(self, path: Path, folder: Path, noise: int | None = None) -> None:
        for _, pipe in self._workers:
            pipe.send((path, folder, noise))

    def receive(self, deadline: float) -> list[Outcome | None]:
        """What became of the program in each process; None if that is unknown at the deadline, or it died."""
        outcomes: dict[Any, Outcome | None] = {}
        pipes = [pipe for _, pipe in self._workers]
        while len(outcomes) < len(pipes) and time.monotonic() < deadline:
            for pipe in wait([pipe for pipe in pipes if pipe not in outcomes], max(0.0, deadline - time.monotonic())):
                try:
                    outcomes[pipe] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    outcomes[pipe] = None
        return [outcomes.get(pipe) for pipe in pipes]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()


class Pool:
    """Runs programs in processes that stay. `close` ends them; they are made when they are needed.

    Attributes:
        sources: the programs since `renew`, in the order in which they ran.
    """

    def __init__(self, folder: Path, *, programs_per_team: int = 150):
        self.folder = folder
        self._programs_per_team = programs_per_team
        self._teams: dict[int | None, _Team] = {}
        self._used: dict[int | None, int] = {}
        self._numbers = itertools.count()
        self.sources: list[str] = []

    def run(self, source: str, world_size: int) -> Result:
        self.sources.append(source)
        path, folder = self._write(source)
        plain, team = self._team(None), self._team(world_size)
        plain.send(path, folder / "plain")
        team.send(path, folder / "together")
        deadline = time.monotonic() + TIMEOUT_S
        alone = plain.receive(deadline)[0]
        if alone is not None and alone.error is not None:
            # As in plain Keras, one rank may have failed, in a callback of the chief; the others would wait for it.
            deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        result = Result(alone, team.receive(deadline))
        if result.plain is not None:
            shutil.rmtree(folder)
        for size, outcomes in ((None, [result.plain]), (world_size, result.ranks)):
            if any(each is None or (each.error and not each.is_refused) for each in outcomes):
                self._end(size)
        return result

    def plain_again(self, source: str, seed: int | None) -> Outcome | None:
        """What plain Keras does with rounding errors of this seed; None: as it is."""
        path, folder = self._write(source)
        plain = self._team(None)
        plain.send(path, folder / "noise", seed)
        (outcome,) = plain.receive(time.monotonic() + TIMEOUT_S)
        if outcome is None:  # it died, perhaps for want of memory, or still runs
            self._end(None)
        shutil.rmtree(folder)
        return outcome

    def renew(self) -> None:
        self.sources.clear()
        for size in list(self._teams):
            self._end(size)

    def log(self, world_size: int) -> str:
        path = self.folder / f"{world_size}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    close = renew

    def _write(self, source: str) -> tuple[Path, Path]:
        folder = self.folder / f"program-{next(self._numbers)}"
        folder.mkdir(parents=True)
        path = folder / "program.py"
        path.write_text(source)
        return path, folder

    def _team(self, size: int | None) -> _Team:
        self._used[size] = self._used.get(size, 0) + 1
        if self._used[size] > self._programs_per_team:
            self._end(size)
        if size not in self._teams:
            self._teams[size] = _Team(self.folder, size)
            self._used[size] = 1
        return self._teams[size]

    def _end(self, size: int | None) -> None:
        if team := self._teams.pop(size, None):
            team.close()
