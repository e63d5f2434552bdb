"""Local replicas of a program started without the launcher: `python train.py` with a MirroredStrategy.

The process that the user started runs the same program again for each other rank and becomes rank 0 of the job, with
its own TF_CONFIG, port and share of the cores. In the processes that it starts, the same call only returns their rank,
so the program needs no `if`.

A notebook cannot be run again. For it, `start_serving_replicas` starts processes that execute what rank 0 sends.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from phalanx.cluster.resolvers import TFConfigClusterResolver
from phalanx.config.environment import allows_color, process_environment, set_variables
from phalanx.config.environment_variables import JOB_ID, LISTEN_FD, LOCAL_REPLICAS, TF_CONFIG
from phalanx.config.launch_config import LaunchConfig
from phalanx.devices.gpu_assignment import device_variables
from phalanx.errors import ConfigurationError, PeerLostError, PhalanxError
from phalanx.launcher.failures import failure_report
from phalanx.launcher.failures.root_cause import WorkerExit, find_root_cause
from phalanx.launcher.host_messages import WorkerSpec
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.hosts.local_host import LocalHost
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.job_supervisor import JobOutcome, JobSupervisor
from phalanx.launcher.worker_environment import job_settings, thread_settings
from phalanx.launcher.worker_placement import new_identity, task_names
from phalanx.launcher.worker_program import Program, parse_command, runs_tests, starting_folder
from phalanx.monitoring.console import Console
from phalanx.runtime import core_affinity, exit_codes, process_exit, undistributed_fit
from phalanx.runtime.core_affinity import host_shares
from phalanx.transport.address import LOOPBACK
from phalanx.transport.ports import listen_at

# Replicas run the same program as rank 0 and exit at about the same time.
JOIN_S = 30.0
# Rank 0 usually detects the loss itself within this time. Its own error should be printed before the report.
NOTICE_S = 0.5

logger = logging.getLogger(__name__)


class LocalReplicas:
    """The replicas of this program, as seen by one of them.

    Attributes:
        count: Number of replicas, including this one.
        rank: Rank of this process.
    """

    def __init__(self, count: int, rank: int, supervisor: _ReplicaSupervisor | None = None):
        self.count = count
        self.rank = rank
        self._supervisor = supervisor

    @property
    def failure(self) -> str:
        """On rank 0: why the other replicas exited early; empty if they did not."""
        outcome = None if self._supervisor is None else self._supervisor.failure
        return "" if outcome is None else outcome.root_cause.reason

    def kill(self) -> None:
        """On rank 0: kill the other replicas immediately. Safe to call twice."""
        if self._supervisor is not None:
            self._supervisor.close(0.0)

    def close(self) -> None:
        """On rank 0: wait up to JOIN_S for the other replicas to exit. Safe to call twice.

        Called automatically at the end of the program.

        Raises: PeerLostError naming the replica that failed, if one did.
        """
        if self._supervisor is not None:
            self._supervisor.close(JOIN_S)
            self._supervisor.raise_failure()


_current: LocalReplicas | None = None


def start_local_replicas(devices: Sequence[str]) -> LocalReplicas:
    """Run this program as one replica per device on this host, and describe the replicas in TF_CONFIG.

    Every replica must call this from the same line of the program, before any computation. Another call with the same
    number of devices returns the same replicas.

    Args:
        devices: Device names such as `cpu:0` or `/gpu:1`. A replica sees no GPU but its own.

    Raises: ConfigurationError if there is no program to run again (a notebook, an interactive session), or if
        this process is already part of another job.
    """
    global _current
    if _current is None:
        _current = _join() or _start(devices)
    if _current.count != len(devices):
        raise ConfigurationError(
            f"This program runs as {_current.count} local replicas and now asks for {len(devices)}. A program has "
            "one set of local replicas: use the same number everywhere, or one program for each number."
        )
    return _current


def _join() -> LocalReplicas | None:
    """The replicas that this process belongs to; None if it was not started as one."""
    count = process_environment().get(LOCAL_REPLICAS)
    if count is None:
        return None
    return LocalReplicas(int(count), int(json.loads(process_environment()[TF_CONFIG])["task"]["index"]))


def start_serving_replicas(devices: Sequence[str], module: str, variables: Mapping[str, str]) -> LocalReplicas:
    """Start a process that runs `module` for each device but the first, which this process uses as rank 0. Describe the
    replicas in TF_CONFIG. The caller kills the processes.

    Args:
        variables: Their environment variables, in addition to those of this process.
    """
    return _start_others(devices, Program(("-m", module)), None, variables)


def is_program() -> bool:
    """Whether this process runs a program that can be run again for the other replicas. Not a notebook, an interactive
    session, a program from stdin, or a test run (which would repeat all other tests)."""
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules
    program = None if interactive else parse_command(sys.orig_argv)
    return program is not None and not runs_tests(program)


def _start(devices: Sequence[str]) -> LocalReplicas:
    if len(devices) == 1:
        return LocalReplicas(1, 0)
    program = _own_program()
    undistributed_fit.watch_fit()
    return _start_others(devices, program, starting_folder(program))


def _start_others(
    devices: Sequence[str], program: Program, folder: str | None, variables: Mapping[str, str] | None = None
) -> LocalReplicas:
    """Start a rank for each device but the first, which this process uses as rank 0.

    Args:
        folder: Working directory of the program; None: the current one.
        variables: Environment of processes that serve rank 0, which survives their loss; None: they run the program.
    """
    count = len(devices)
    reserved = ReservedReplicas(count, LOOPBACK, program, folder)
    addresses = [f"{LOOPBACK}:{port}" for port in reserved.ports]
    tasks, identity = task_names(count), new_identity()
    settings = [
        {
            **job_settings(tasks, addresses, rank, identity, LaunchConfig()),
            **device_variables(devices[rank], process_environment()),
            LOCAL_REPLICAS: str(count),
            **(variables or {}),
        }
        for rank in range(count)
    ]
    return reserved.start(tasks, 0, settings, ends_program=variables is None)


def reserve_task_replicas(count: int, address: str) -> ReservedReplicas:
    """Reserve ports for this process and `count` - 1 more replicas of its task, which run the same program.

    Args:
        address: Address that this task listens at; see `listen_at`.
    """
    program = parse_command(sys.orig_argv)
    assert program is not None, "asked only where `is_program`"
    return ReservedReplicas(count, address, program, starting_folder(program))


class ReservedReplicas:
    """Ports of replicas on this host, which start once the addresses of the whole job are known.

    Attributes:
        ports: Ports of the replicas, this process's first.
    """

    def __init__(self, count: int, address: str, program: Program, folder: str | None) -> None:
        self._program = program
        self._folder = folder
        self._shares = host_shares(count)
        self._selector = selectors.DefaultSelector()
        self._host = LocalHost(self._selector, shares=self._shares[1:])
        self._listener = listen_at(address)
        self.ports = [self._listener.getsockname()[1], *self._host.prepare(count - 1, address=address)]

    def start(
        self, tasks: Sequence[str], first: int, settings: Sequence[Mapping[str, str]], *, ends_program: bool
    ) -> LocalReplicas:
        """Start the other replicas, and make this process the first.

        Args:
            tasks: Names of all tasks of the job, by rank.
            first: Rank of this process; the ranks of the others follow.
            settings: Environment variables of each replica, this process's first.
            ends_program: Whether the failure of a replica ends this process.
        """
        count = len(self.ports)
        placements = [
            WorkerPlacement(
                WorkerSpec(
                    first + number,
                    self._program.arguments,
                    dict(settings[number]),
                    self._program.interpreter,
                    directory=self._folder,
                    prints_errors=False,
                ),
                tasks[first + number],
                self._host,
            )
            for number in range(1, count)
        ]
        supervisor = _ReplicaSupervisor(placements, self._selector, tasks, ends_program=ends_program)
        supervisor.start()
        set_variables(thread_settings(self._shares[0].threads), overwrite=False)
        # Like an inherited descriptor, it stays open as long as the process lives.
        set_variables({**settings[0], LISTEN_FD: str(self._listener.detach())})
        core_affinity.bind(self._shares[0].cores)
        _limit_running_libraries(self._shares[0].threads)
        return LocalReplicas(count, first, supervisor)


def _own_program() -> Program:
    """The program that this process runs. Raises: ConfigurationError if it cannot be run again."""
    if TFConfigClusterResolver().cluster_spec() or process_environment().get(JOB_ID):
        raise ConfigurationError(
            "This process is already a task of a job (TF_CONFIG is set), and cannot start local replicas of "
            "its own. Use MultiWorkerMirroredStrategy here, or start the program without a cluster: python train.py."
        )
    if multiprocessing.parent_process() is not None:
        raise ConfigurationError(
            "This process was started by multiprocessing, so there is no program to run again for the other "
            "replicas. Create the strategy in the main process, or pass a function to phalanx.launch."
        )
    program = parse_command(sys.orig_argv) if is_program() else None
    if program is None:
        raise ConfigurationError(
            "A strategy of local replicas runs the same program again for the others, which is impossible in a "
            "notebook or an interactive session. Put the training into a function and call "
            "phalanx.launch(function, workers=N) with MultiWorkerMirroredStrategy inside it."
        )
    return program


def _limit_running_libraries(threads: int) -> None:
    # PyTorch reads OMP_NUM_THREADS on import, and rank 0 may have imported it already. JAX and TensorFlow create their
    # pools at the first computation.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


class _ReplicaSupervisor(JobObserver):
    """Supervises the other replicas on rank 0 with a thread that runs their job and reports its outcome.

    Args:
        ends_program: Whether the failure of a replica ends this process.
    """

    def __init__(
        self,
        placements: Sequence[WorkerPlacement],
        selector: selectors.BaseSelector,
        tasks: Sequence[str],
        *,
        ends_program: bool,
    ):
        self._selector = selector
        self._ends_program = ends_program
        self._console = Console(tasks, sys.stderr, sys.stderr, quiet=not ends_program)
        config = LaunchConfig.from_environment()
        self._grace_s = config.grace_s
        self._job = JobSupervisor(placements, selector, self, config)
        self._thread = threading.Thread(target=self._run, name="phalanx-replicas", daemon=True)
        self._outcome: JobOutcome | None = None
        self._has_crashed = False  # whether the supervision itself failed
        self._pid = os.getpid()
        self._reported = False
        self._closing = threading.Event()  # set once rank 0 is exiting
        self._ended = threading.Event()  # set once all replicas have exited

    def start(self) -> None:
        self._job.start()  # not in the thread: only the main thread can reset SIGCHLD, and the caller gets the error
        self._thread.start()
        if self._ends_program:
            atexit.register(self._at_exit)

    # ---- reports of the job

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        # Their stdout repeats rank 0's. When this process fails on its own, their errors about its loss add nothing and
        # would interrupt its own error.
        if is_error and not (process_exit.has_failed() and _failed_by_itself()):
            self._console.feed(rank, is_error, data)

    def task_started(self, placement: WorkerPlacement, pid: int) -> None:
        logger.debug("%s started, pid %d", placement.task, pid)

    def task_exited(self, exit_: WorkerExit) -> None:
        self._console.finish(exit_.rank)

    # ---- the end of the job

    def close(self, wait_s: float) -> None:
        """Wait `wait_s` for the replicas to exit, then end those that still run."""
        self._closing.set()
        if not self._ended.wait(wait_s):
            if wait_s > 0:
                self._console.message(f"phalanx: replicas still run {wait_s:g} s after rank 0 exited; ending them")
            self._job.stop(signal.SIGTERM)
            self._job.stop(signal.SIGINT)  # no grace period
            self._ended.wait(self._grace_s)

    def _look_for_cause(self) -> None:
        """Find the replica that raised the error whose effect rank 0 met, among those ended for exiting too slowly."""
        if self._outcome is not None and self.failure is None:
            # The job considers itself stopped from outside, which does not explain what delayed them.
            exits = [
                replace(exit_, is_hung=exit_.is_hung or exit_.was_ended_by_launcher) for exit_ in self._outcome.exits
            ]
            self._outcome = replace(self._outcome, root_cause=find_root_cause(exits), exits=exits)

    @property
    def failure(self) -> JobOutcome | None:
        outcome = self._outcome
        return outcome if outcome is not None and outcome.root_cause.cause is not None else None

    def raise_failure(self) -> None:
        if self._has_crashed:
            raise PhalanxError("The supervisor of the local replicas failed and stopped them; see the log.")
        failure = self.failure
        if failure is not None and failure.root_cause.cause is not None:
            cause = failure.root_cause.cause
            raise PeerLostError(
                f"A local replica failed: {failure.root_cause.reason}.",
                rank=cause.rank,
                task=cause.task,
                host=socket.gethostname(),
            )

    def _run(self) -> None:
        try:
            self._outcome = self._job.run()
        except Exception:  # the replicas are killed
            self._has_crashed = True
            logger.exception("The supervision of the local replicas failed.")
        finally:
            self._ended.set()
            self._selector.close()
        if self._code == 0 or not self._ends_program:
            return
        if self._closing.wait(NOTICE_S):
            return  # `_at_exit` or the caller of `close` reports it, after rank 0's own error
        self._report()
        # Rank 0 detects the loss at its next collective. If it reaches none within the grace period, it is ended.
        if not self._closing.wait(self._grace_s):
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            _end_process(self._code)

    @property
    def _code(self) -> int:
        """Exit code of this process due to the other replicas; 0 if none failed."""
        if self._has_crashed:
            return PhalanxError.exit_code
        return 0 if self.failure is None else self.failure.root_cause.code

    def _report(self) -> None:
        self._reported = True
        if self.failure is not None:
            color = sys.stderr.isatty() and allows_color()
            page = failure_report.render(self.failure.root_cause, self.failure.exits, full=False, color=color)
            self._console.message(page)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # a fork of rank 0 is exiting
            return
        # If an exception ended the program, the interpreter sets `sys.last_value` before exit handlers run.
        own_error = _failed_by_itself()
        if getattr(sys, "last_value", None) is None:
            self.close(JOIN_S)
        elif own_error:
            self.close(0.0)  # the replicas only wait for a rank that will not arrive
        else:
            self.close(self._grace_s)  # a replica was the cause: give it time to print why
            self._look_for_cause()
        if self._code != 0 and not own_error:
            if not self._reported:
                self._report()
            _end_process(self._code)  # an exit handler cannot change the exit code otherwise


def _failed_by_itself() -> bool:
    """Whether this process exits because of an error that is not a consequence of a replica's error."""
    error = getattr(sys, "last_value", None)
    return error is not None and exit_codes.code_for_error(error) not in exit_codes.CONSEQUENCE_CERTAINTY


def _end_process(code: int) -> NoReturn:
    logging.shutdown()
    process_exit.end_process(code)
