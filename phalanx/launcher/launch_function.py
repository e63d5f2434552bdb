"""`phalanx.launch`: like `phalanx run`, but for a function, from Python or a notebook."""

from __future__ import annotations

import numbers
import selectors
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from phalanx.config.environment import allows_color
from phalanx.config.launch_config import LaunchConfig
from phalanx.errors import ConfigurationError, PeerLostError, PhalanxError
from phalanx.launcher.failures import failure_report
from phalanx.launcher.failures.root_cause import WorkerExit
from phalanx.launcher.host_slots import MAX_WORKERS, HostSpec
from phalanx.launcher.hosts.output_streams import OutputStreams
from phalanx.launcher.job_observer import JobObserver, ObserverGroup
from phalanx.launcher.job_reporter import JobReporter
from phalanx.launcher.job_size import describe_start
from phalanx.launcher.job_supervisor import JobOutcome, JobSupervisor
from phalanx.launcher.log_directory import open_logs
from phalanx.launcher.watching.job_recorder import JobRecorder
from phalanx.launcher.worker_placement import WorkerTemplate, check_start_timeout, place, task_names
from phalanx.monitoring.console import NOTEBOOK, Console
from phalanx.runtime.bootstrap import FUNCTION
from phalanx.runtime.worker_traceback import WorkerTraceback

if TYPE_CHECKING:
    from phalanx.runtime.function_call import CallRaised


def launch(
    function: Callable[..., Any],
    workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    log_dir: str | Path | None = None,
    start_timeout_s: float | None = None,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in each of several new local processes and return the results by rank.

    Each process is a worker of one job with its own cores, so `phalanx.MultiWorkerMirroredStrategy()` inside
    the function finds the others. The function may be defined in a notebook. It, its arguments and its
    results are pickled (by cloudpickle) between this process and its children. Imports belong inside the
    function, so that a worker does not import Keras before its backend is set.

    Args:
        function: Function that each worker calls.
        workers: Number of processes to start, 1 or more.
        args: Positional arguments of `function`.
        kwargs: Keyword arguments of `function`.
        backend: Value of KERAS_BACKEND for the workers.
        log_dir: Directory for one log file per task, and for the failure report if the job fails.
        start_timeout_s: Seconds that the workers wait for each other at the start; more than 0.

    All workers have exited when this function returns or raises, including on KeyboardInterrupt.

    Raises:
        Exception: the error of the worker that caused the failure, with that worker's traceback as its
            `__cause__`.
        PeerLostError: a worker died without an error.

    Examples:
        >>> def add(x, y):
        ...     return x + y
        >>> phalanx.launch(add, workers=2, args=(1, 2))
        [3, 3]
    """
    if not isinstance(workers, numbers.Integral) or not 1 <= workers <= MAX_WORKERS:
        raise ConfigurationError(f"launch got workers={workers!r}; give a number from 1 to {MAX_WORKERS}.")
    if not callable(function):
        raise ConfigurationError(f"launch got {function!r} to call; pass a function, not its result.")
    # Imported lazily here and below: cloudpickle is slow to import, and most programs never launch.
    from phalanx.runtime import function_call

    call = function_call.encode(function_call.PickledCall(function, tuple(args), dict(kwargs or {})))
    config = LaunchConfig.from_environment(
        backend=backend,
        start_timeout_s=check_start_timeout(start_timeout_s),
        log_dir=Path(log_dir) if log_dir is not None else None,
    )
    name = f"phalanx.launch({getattr(function, '__qualname__', type(function).__name__)})"
    try:
        outcome = _run(name, WorkerTemplate([FUNCTION], task_names(workers), config, function=call))
    except KeyboardInterrupt as interrupt:
        raise interrupt.with_traceback(None) from None  # the launcher's frames are of no interest
    if not outcome.root_cause.success:
        raise _error(outcome, config.log_dir)
    for exit_ in outcome.exits:
        if exit_.rank not in outcome.results:
            raise PeerLostError(
                f"{exit_.task} (rank {exit_.rank}) ended with exit code 0 but without a result: the function "
                "ended the process (os._exit, sys.exit) instead of returning.",
                rank=exit_.rank,
                task=exit_.task,
                host=exit_.host,
            )
    return [_value(exit_, outcome.results[exit_.rank]) for exit_ in outcome.exits]


def _run(name: str, template: WorkerTemplate) -> JobOutcome:
    from phalanx.launcher.job_request import JobRequest
    from phalanx.launcher.watching.watched_job import WatchedJob

    tasks, config = template.tasks, template.config
    host_specs = [HostSpec("localhost", len(tasks))]
    with open_logs(config.log_dir, tasks) as logs, selectors.DefaultSelector() as selector:
        console = _console(tasks, logs.outputs)
        with WatchedJob(JobRequest([name], tasks, host_specs, config), console.message, logs.events) as watched:
            watched.record_start()
            placements = place(host_specs, template, selector, OutputStreams(merged=True), console.message)
            observer = ObserverGroup(_observer(console, watched.recorder), watched.recorder)
            job = JobSupervisor(placements, selector, observer, config, merged=True)
            job.start()
            with watched.controlled(job):
                outcome = job.run()
            watched.record_outcome(outcome)
        return outcome


def _in_notebook() -> bool:
    """Whether the output goes to a cell of a notebook."""
    return type(sys.stdout).__module__.startswith("ipykernel.")


def _console(tasks: Sequence[str], logs: Sequence[BinaryIO]) -> Console:
    if not _in_notebook():
        return Console(tasks, sys.stdout, sys.stdout, logs=logs, quiet=True)
    console = Console(tasks, sys.stdout, sys.stdout, columns=NOTEBOOK, color=allows_color(), logs=logs, quiet=True)
    console.message(f"phalanx: {describe_start(tasks, 1)}")
    return console


def _observer(console: Console, recorder: JobRecorder) -> JobObserver:
    """The observer that shows the job: in a notebook like `phalanx run`; in a program, only its workers' output."""
    if not _in_notebook():
        return _OutputPrinter(console)
    return JobReporter(console, verbose=False, on_stragglers=recorder.stragglers_changed)


class _OutputPrinter(JobObserver):
    def __init__(self, console: Console):
        self._console = console

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        self._console.feed(rank, is_error, data)

    def task_exited(self, exit_: WorkerExit) -> None:
        self._console.finish(exit_.rank)


def _value(exit_: WorkerExit, content: bytes) -> Any:
    from phalanx.runtime import function_call

    try:
        result = function_call.decode_result(content)
    except Exception as error:
        error.add_note(
            f"The result of {exit_.task} (rank {exit_.rank}) cannot be unpickled here: this process must be able to "
            "import everything that the result is made of."
        )
        raise
    assert isinstance(result, function_call.CallReturned)
    return result.value


def _error(outcome: JobOutcome, log_dir: Path | None) -> BaseException:
    """Build the error to raise for a failed job, and write the failure report if there is a log directory."""
    root_cause, cause = outcome.root_cause, outcome.root_cause.cause
    error: BaseException
    if cause is None:
        error = PhalanxError(f"The job ended: {root_cause.reason}.")
    elif (raised := _raised(cause, outcome.results.get(cause.rank))) is not None:
        error = raised.error
        error.__cause__ = WorkerTraceback(cause.task, raised.traceback)
    else:
        error = PeerLostError(f"The job ended: {root_cause.reason}.", rank=cause.rank, task=cause.task, host=cause.host)
    if cause is not None:
        error.add_note(failure_report.render(root_cause, outcome.exits, full=False, traceback=False))
    if log_dir is not None:
        try:
            failure_report.write(log_dir, root_cause, outcome.exits)
        except OSError as problem:
            error.add_note(f"This report cannot be written to {log_dir}: {problem.strerror}.")
    return error


def _raised(cause: WorkerExit, content: bytes | None) -> CallRaised | None:
    """The error that a worker's function raised; a `RuntimeError` with its text if it cannot be unpickled here."""
    from phalanx.runtime import function_call

    if not content:
        return None
    try:
        result = function_call.decode_result(content)
    except Exception:  # any error, since unpickling runs code of the class
        report = cause.diagnostics.error
        if report is None:
            return None
        return function_call.CallRaised(function_call.replacement_error(report.kind, report.message), report.traceback)
    return result if isinstance(result, function_call.CallRaised) else None
