"""Does to a job what a schedule says. What can be undone returns how."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.job import Job, Member
from tests.chaos.schedule import ON_NETWORKS, Fault, Kind
from tests.support.network import Network

GONE_S = 30.0
"""After the death of a launcher, for all its processes to be gone."""
FILE_LIMIT_BYTES = 30_000
"""Where no small disk can be mounted, the size above which processes cannot write files: below that of a checkpoint."""
FILLER = ".filler"
NO_VICTIM_S = 120.0
"""A job that is started again as a whole has a member to meet a fault within this time."""

Undo = Callable[[], None]


def able() -> frozenset[Kind]:
    """What can be done on this machine."""
    return frozenset(Kind) - (ON_NETWORKS if Network.problem() else frozenset())


@dataclass
class Done:
    """A fault that was brought about.

    Attributes:
        at: by `time.time`, as the program's log has it.
        whom: tasks.
        undo: to be called after `fault.lasts_s`.
        violation: what did not hold already now.
    """

    fault: Fault
    at: float
    whom: str
    undo: Undo | None = None
    violation: str = ""


class Faults:
    """Brings faults over one job.

    Args:
        has_disk: whether its checkpoints have a small disk of their own.
    """

    def __init__(self, job: Job, *, has_disk: bool):
        self._job = job
        self._has_disk = has_disk

    def do(self, fault: Fault) -> Done:
        """Bring a fault about, now: as soon as there is a member to meet it."""
        until = time.monotonic() + NO_VICTIM_S
        while not (members := self._job.members()) and self._job.code is None and time.monotonic() < until:
            time.sleep(0.05)
        victim = choose(members, fault)
        now = time.time()
        if victim is None:
            gone = f"for {NO_VICTIM_S:g} s there was no victim for {fault.kind.value}"
            return Done(fault, now, "no victim", violation=gone if self._job.code is None else "")
        match fault.kind:
            case Kind.KILL:
                send(victim, signal.SIGKILL)
            case Kind.KILL_ALL:
                self._kill_all()
            case Kind.KILL_LAUNCHER:
                return Done(fault, now, "the launcher", violation=self._kill_launcher())
            case Kind.PAUSE | Kind.ZOMBIE:
                send(victim, signal.SIGSTOP)
                return Done(fault, now, victim.task, lambda: send(victim, signal.SIGCONT))
            case Kind.STOP:
                send(victim, signal.SIGSTOP)
            case Kind.DISCONNECT:
                send(victim, signal.SIGUSR1)
            case Kind.FILL_DISK:
                return Done(fault, now, "the disk", self._fill_disk(members))
            case Kind.DAMAGE:
                self._kill_all()
                return Done(fault, now, damage_newest(self._job.checkpoints, fault.choice))
            case Kind.CUT | Kind.SEVER | Kind.HALF_OPEN | Kind.SLOW:
                assert self._job.network is not None
                return Done(fault, now, victim.task, self._on_network(self._job.network, fault, victim, members))
        return Done(fault, now, victim.task)

    def _kill_all(self) -> None:
        for member in self._job.members():
            send(member, signal.SIGKILL)

    def _kill_launcher(self) -> str:
        """kill -9 of the launcher; then its processes have to be gone, and it is started again."""
        job = self._job
        with contextlib.suppress(ProcessLookupError):  # the job has just ended
            os.kill(job.launcher, signal.SIGKILL)
        until = time.monotonic() + GONE_S
        while (left := job.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        job.start()
        return f"the launcher was killed, and {GONE_S:g} s later there were {left}" if left else ""

    def _fill_disk(self, members: list[Member]) -> Undo:
        if self._has_disk:
            filler = self._job.checkpoints / FILLER
            fill(filler)
            return lambda: filler.unlink(missing_ok=True)
        limited = []
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                _, hard = resource.prlimit(member.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, hard))
                limited.append((member.pid, hard))

        def undo() -> None:
            for pid, hard in limited:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

        return undo

    @staticmethod
    def _on_network(network: Network, fault: Fault, victim: Member, members: list[Member]) -> Undo:
        host = victim.number
        others = [member for member in members if member.pid != victim.pid]
        pair = others[int(fault.choice * len(others))] if others else None
        if fault.kind is Kind.SLOW:
            network.slow(host, mbits=4, delay_ms=200)
            return lambda: network.widen(host)
        if fault.kind is Kind.CUT or pair is None:
            network.cut(host)
            return lambda: network.mend(host)
        if fault.kind is Kind.SEVER:
            network.mute(host, pair.number)
            network.mute(pair.number, host)

            def heal() -> None:
                network.unmute(host, pair.number)
                network.unmute(pair.number, host)

            return heal
        for other in others:
            network.mute(host, other.number)
        send(victim, signal.SIGKILL)

        def unmute() -> None:
            for other in others:
                network.unmute(host, other.number)

        return unmute


def choose(members: list[Member], fault: Fault) -> Member | None:
    """The victim among those who take part, by rank."""
    if not members or fault.chief:
        return members[0] if members else None
    others = members[1:] or members
    return others[int(fault.choice * len(others))]


def send(member: Member, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was quicker
        os.kill(member.pid, number)


def fill(filler: Path) -> None:
    """Take all that is left of a disk."""
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def damage_newest(directory: Path, choice: float) -> str:
    """Damage the newest checkpoint, if there is another one; its name."""
    paths = sorted(path for path in directory.glob("fit0-*.weights.h5"))
    if len(paths) < 2:
        return "no checkpoint"
    chance = random.Random(choice)
    size = paths[-1].stat().st_size
    if chance.random() < 0.5:
        os.truncate(paths[-1], chance.randrange(size))
    else:
        with paths[-1].open("r+b") as file:
            file.seek(chance.randrange(size - 64))
            block = file.read(64)
            file.seek(-len(block), os.SEEK_CUR)
            file.write(bytes(byte ^ 0xFF for byte in block))
    return paths[-1].name
