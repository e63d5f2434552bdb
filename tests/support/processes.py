"""Runs a function in several processes that are the members of a job, without a cluster or a rendezvous.

The links are socket pairs that are created before the processes are forked, so no process has to find another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from phalanx.cluster.membership import Member, Membership
from phalanx.transport.link import Link

BOUND_S = 60.0
"""Limit for hanging processes. Functions here take a fraction of it."""


@dataclass
class Outcome:
    """Outcome of one rank.

    Attributes:
        value: Return value of the function.
        error: Error that it raised, pickled in between: class and text are preserved.
        text: Traceback of the error.
        exit_code: Exit code of the process; the negative signal number if a signal ended it.
        ended: Time at which it ended, by `time.monotonic()`.
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exit_code: int | None = None
    ended: float = 0.0


def hosts_of(world_size: int) -> list[str]:
    """Return the hosts of ranks that all run on one host."""
    return ["host-a"] * world_size


def socket_mesh(world_size: int, family: str = "unix") -> dict[tuple[int, int], socket.socket]:
    """Create a connected pair for every two ranks. `[a, b]` is the end that rank a uses to communicate with b."""
    ends: dict[tuple[int, int], socket.socket] = {}
    for low in range(world_size):
        for high in range(low + 1, world_size):
            ends[low, high], ends[high, low] = _pair(family)
    return ends


def membership_of(
    rank: int, hosts: Sequence[str], pids: Sequence[int], ends: dict[tuple[int, int], socket.socket]
) -> Membership:
    members = tuple(
        Member(index, f"worker/{index}", host, f"127.0.0.1:{20000 + index}", pid)
        for index, (host, pid) in enumerate(zip(hosts, pids, strict=True))
    )
    links = {peer: Link(sock, f"worker/{peer}") for (owner, peer), sock in sorted(ends.items()) if owner == rank}
    return Membership(1, rank, members, links)


class Job:
    """Forked processes, one per rank. A context manager that leaves nothing behind.

    Args:
        function: Function to call as `function(membership)` in each process; its result must be picklable.
        hosts: Host of each rank.
        family: Family of the sockets between the ranks, `unix` or `tcp`.
    """

    def __init__(self, function: Callable[[Membership], Any], hosts: Sequence[str], family: str = "unix"):
        context = multiprocessing.get_context("fork")
        ends = socket_mesh(len(hosts), family)
        self.processes = []
        self._pipes: list[Connection] = []
        pids = context.Array("l", len(hosts))
        started = context.Event()
        for rank in range(len(hosts)):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(function, rank, hosts, ends, pids, started, writer), daemon=True
            )
            process.start()
            writer.close()
            pids[rank] = process.pid
            self.processes.append(process)
            self._pipes.append(reader)
        for sock in ends.values():
            sock.close()
        started.set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def outcomes(self, bound_s: float = BOUND_S, without: Sequence[int] = ()) -> list[Outcome]:
        """Return the outcome of each rank, without waiting for those in `without`. TimeoutError if one takes too
        long."""
        outcomes = [Outcome() for _ in self.processes]
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in without}
        until = time.monotonic() + bound_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not end within {bound_s} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                with contextlib.suppress(EOFError):
                    outcomes[rank] = pipe.recv()
                self.processes[rank].join()
                outcomes[rank].exit_code = self.processes[rank].exitcode
                outcomes[rank].ended = time.monotonic()
        return outcomes


def run_ranks(
    function: Callable[[Membership], Any],
    world_size: int = 2,
    *,
    hosts: Sequence[str] | None = None,
    family: str = "unix",
    bound_s: float = BOUND_S,
) -> list[Outcome]:
    """Run `function(membership)` in `world_size` processes, and return the outcomes in rank order."""
    with Job(function, hosts or hosts_of(world_size), family) as job:
        return job.outcomes(bound_s)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the values of all ranks. AssertionError with the traceback of a rank that failed."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.text}"
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]


def run_threads(
    function: Callable[[Membership], Any],
    world_size: int = 2,
    *,
    hosts: Sequence[str] | None = None,
    bound_s: float = BOUND_S,
) -> list[Any]:
    """Like `run_ranks`, but in threads of this process, for tests that need no real processes. Return the results."""
    ends = socket_mesh(world_size)
    pids = [os.getpid()] * world_size
    memberships = [membership_of(rank, hosts or hosts_of(world_size), pids, ends) for rank in range(world_size)]
    results: list[Any] = [None] * world_size

    def body(rank: int) -> None:
        try:
            results[rank] = function(memberships[rank])
        except BaseException as error:
            results[rank] = error
        finally:
            memberships[rank].close()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + bound_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        assert not thread.is_alive(), f"a rank did not end within {bound_s} s"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _pair(family: str) -> tuple[socket.socket, socket.socket]:
    if family == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def _child(
    function: Callable[[Membership], Any],
    rank: int,
    hosts: Sequence[str],
    ends: dict[tuple[int, int], socket.socket],
    pids: Any,
    started: Any,
    pipe: Connection,
) -> None:
    # The ends of other ranks must close with them, not with this process.
    for (owner, _), sock in ends.items():
        if owner != rank:
            sock.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    started.wait()
    outcome = Outcome()
    try:
        outcome.value = function(membership_of(rank, hosts, list(pids), ends))
    except BaseException as error:
        outcome.error, outcome.text = error, traceback.format_exc()
    try:
        pipe.send(outcome)
    except Exception:
        outcome.value, outcome.error = None, RuntimeError(outcome.text or "the result cannot be pickled")
        pipe.send(outcome)
    pipe.close()
