"""Runs workers on this host: their ports, their shares of cores and GPUs, and their processes."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import SNAPSHOTS
from phalanx.devices.devices_per_worker import worker_device_variables
from phalanx.devices.gpu_assignment import worker_gpu_variables
from phalanx.devices.gpu_count import HIDE_GPUS, count_gpus
from phalanx.launcher.host_messages import CheckpointBeforeExit, Event, Started, WorkerSpec
from phalanx.launcher.hosts.output_streams import OutputStreams, TerminalSize
from phalanx.launcher.hosts.worker_files import open_disk_file
from phalanx.launcher.hosts.worker_process import WorkerLaunch, WorkerProcess, is_main_thread
from phalanx.launcher.orphan_reaper import reap_orphans
from phalanx.launcher.worker_environment import worker_environment
from phalanx.runtime.core_affinity import CoreShare, available_cores, host_shares
from phalanx.transport.ports import listen_at

# Interval for collecting the workers' reports and reaping orphans.
REPORT_INTERVAL_S = 0.5


class LocalHost:
    """Implements `WorkerHost` with processes on this host. Not thread-safe.

    Registers all readable descriptors with `selector`; `events` then reads them. The selector may belong to a loop that
    also watches other descriptors.

    Args:
        streams: Output streams for the workers.
        shares: The workers' shares of the cores; by default, they divide all cores of the host.

    Attributes:
        lost: Always False; see `WorkerHost`.
    """

    name = "localhost"

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        streams: OutputStreams | None = None,
        shares: Sequence[CoreShare] | None = None,
    ):
        self.lost = False
        self._selector = selector
        self._streams = streams or OutputStreams()
        self._shares = shares
        self._listeners: list[socket.socket] = []  # by slot
        self._launches: dict[int, WorkerLaunch] = {}  # of workers that may be restarted
        self._workers: dict[int, WorkerProcess] = {}
        self._saving: list[Event] = []  # workers that answered SIGTERM by saving a checkpoint
        self._slots_without_replica: set[int] = set()  # of servers and evaluators
        self._next_report = 0.0  # by the monotonic clock
        self._restores_sigchld = False

    def prepare(self, workers: int, *, address: str | None = "127.0.0.1") -> list[int]:
        """Open a port for each worker, in addition to those already open, and return the ports. A worker inherits the
        listening socket, which is never closed and bound again.

        Args:
            address: See `listen_at`.
        """
        opened = [listen_at(address) for _ in range(workers)]
        self._listeners += opened
        return [listener.getsockname()[1] for listener in opened]

    def start(self, specs: Sequence[WorkerSpec]) -> list[Event]:
        """Start workers on ports opened by `prepare`: all of them, or some whose specs name their slots.

        Raises: ConfigurationError if this host has too few GPUs for them.
        """
        if not specs:
            return []
        self._unignore_sigchld()
        specs = [replace(spec, slot=i) if spec.slot is None else spec for i, spec in enumerate(specs)]
        # Before `_divide`: tasks without a replica get no share.
        self._slots_without_replica |= {spec.slot for spec in specs if spec.slot is not None and not spec.trains}
        shares, devices = self._divide(specs[0].devices)
        events: list[Event] = []
        for spec in specs:
            assert spec.slot is not None
            share, variables = shares[spec.slot], {**devices[spec.slot], **spec.environment}
            environment = worker_environment(process_environment(), variables, share.threads, spec.directory)
            snapshots = (open_disk_file(), open_disk_file()) if spec.has_snapshots else ()
            if snapshots:
                environment[SNAPSHOTS] = ":".join(f"/dev/fd/{file.fileno()}" for file in snapshots)
            launch = WorkerLaunch(spec, self._listeners[spec.slot], share.cores, environment, snapshots)
            events.append(self._launch(launch))
            if spec.restartable:
                self._launches[spec.rank] = launch
            else:
                launch.listener.close()
        return events

    def restart(self, rank: int) -> Event:
        """Restart a worker that has exited, at the same port. Its spec must be restartable."""
        return self._launch(self._launches[rank])

    def _launch(self, launch: WorkerLaunch) -> Event:
        worker = self._workers[launch.spec.rank] = WorkerProcess(launch, self._streams, self._selector)
        return Started(worker.rank, worker.pid)

    def _divide(self, each: int | None) -> tuple[Sequence[CoreShare], Sequence[Mapping[str, str]]]:
        """Cores and devices of each slot. A task without a replica may use all cores, but only one thread and no GPU.

        Args:
            each: See `WorkerSpec.devices`.
        """
        replicas = len(self._listeners) - len(self._slots_without_replica)
        environment = process_environment()
        of_replicas = host_shares(replicas) if self._shares is None else self._shares
        gpus = count_gpus(environment)
        if each is None:
            devices = iter(worker_gpu_variables(replicas, gpus, environment))
        else:
            threads = [share.threads for share in of_replicas]
            devices = iter(worker_device_variables(threads, each, gpus, environment))
        shares = iter(of_replicas)
        other = CoreShare(tuple(available_cores()), 1)
        trains = [slot not in self._slots_without_replica for slot in range(len(self._listeners))]
        return (
            [next(shares) if replica else other for replica in trains],
            [next(devices) if replica else HIDE_GPUS for replica in trains],
        )

    @property
    def needs_polling(self) -> bool:
        return any(worker.needs_polling for worker in self._workers.values())

    def events(self) -> list[Event]:
        events, self._saving = self._saving, []
        running = [worker for worker in self._workers.values() if not worker.has_exited]
        for worker in running:
            found = list(worker.events())
            events += found
            if worker.has_exited:
                self._close_port(worker.rank, found[-1])
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL_S
            reports = [worker.files.new_report(worker.rank) for worker in running if not worker.has_exited]
            events += [report for report in reports if report is not None]
            reap_orphans()
        return events

    def _close_port(self, rank: int, exited: Event) -> None:
        """Close the port of a task that has finished for good, so that connections of other tasks are refused."""
        launch = self._launches.get(rank)
        if launch is not None and launch.spec.frees_port and getattr(exited, "returncode", None) == 0:
            launch.listener.close()

    def _running(self, rank: int) -> WorkerProcess | None:
        worker = self._workers.get(rank)
        return None if worker is None or worker.has_exited else worker

    def dump_stacks(self, rank: int) -> None:
        if worker := self._running(rank):
            worker.dump_stacks()

    def request_checkpoint(self, rank: int) -> None:
        if worker := self._running(rank):
            worker.files.request_checkpoint()

    def signal(self, rank: int, number: int) -> None:
        """See `WorkerHost.signal`. SIGTERM and SIGKILL also go to everything that the worker has started. Exception: a
        worker that answers SIGTERM by saving a checkpoint still needs its processes, so only it gets SIGTERM, and
        `CheckpointBeforeExit` is among the next events."""
        worker = self._running(rank)
        if worker is None:
            return
        saves = number == signal.SIGTERM and worker.files.saves_checkpoint
        if saves:
            self._saving.append(CheckpointBeforeExit(rank))
        worker.signal(number, alone=saves)

    def resize(self, size: TerminalSize) -> None:
        """Set the size of rank 0's terminal."""
        worker = self._running(0)
        if worker is not None and self._streams.terminal is not None:
            worker.resize(size)

    def close(self) -> None:
        # Kill all before waiting for any: a second Ctrl-C may interrupt the wait, and in a notebook this process
        # continues to run.
        for worker in self._workers.values():
            worker.kill()
        for listener in self._listeners:
            listener.close()
        for launch in self._launches.values():
            for file in launch.snapshots:
                file.close()
        for worker in self._workers.values():
            worker.close()
        if self._restores_sigchld and is_main_thread():
            self._restores_sigchld = False
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def _unignore_sigchld(self) -> None:
        """Reset SIGCHLD if it is ignored (which is inherited): the kernel would discard the workers' exit codes."""
        if is_main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._restores_sigchld = True
