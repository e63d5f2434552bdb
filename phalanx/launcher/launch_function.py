"""`phalanx.launch`: the same as `phalanx run`, for a function, from Python or a notebook."""

from __future__ import annotations

import numbers
import selectors
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config.launch_config import LaunchConfig
from phalanx.errors import ConfigurationError, PeerLostError, PhalanxError
from phalanx.launcher import failure_report
from phalanx.launcher.host_slots import MAX_WORKERS, HostShare
from phalanx.launcher.hosts.output_streams import OutputStreams
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.job_supervisor import JobOutcome, JobSupervisor
from phalanx.launcher.root_cause import WorkerExit
from phalanx.launcher.worker_placement import WorkerRecipe, check_start_timeout, place, task_names
from phalanx.monitoring.console import Console
from phalanx.runtime.bootstrap import FUNCTION


class WorkerTraceback(Exception):
    """The traceback of an error in the worker that raised it: the `__cause__` of the error raised here."""

    def __init__(self, task: str, traceback: str):
        super().__init__(task, traceback)
        self.task = task
        self.traceback = traceback

    def __str__(self) -> str:
        return f"in {self.task}:\n\n{self.traceback}"


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
    """Call `function(*args, **kwargs)` in each of several new local processes; returns the results by rank.

    Each process is a worker of one job with its own cores, so `phalanx.MultiWorkerMirroredStrategy()` inside
    the function finds the others. The function may be defined in a notebook; it, its arguments and its
    results are pickled (by cloudpickle) between this process and its own children. Imports belong inside the
    function, or each worker imports what the function refers to before it knows its backend.

    Args:
        workers: processes to start, 1 or more.
        backend: sets KERAS_BACKEND for the workers.
        log_dir: keeps one file of output per task there, and the page that says why if the job fails.
        start_timeout_s: seconds that the workers wait for each other at the start; more than 0.

    Raises:
        the error of the worker that was the cause of the failure, with that worker's traceback as its
        `__cause__`; PeerLostError if a worker died without one. All workers have ended by then, as they have
        when KeyboardInterrupt leaves this function.

    Example:
        >>> def add(x, y):
        ...     return x + y
        >>> phalanx.launch(add, workers=2, args=(1, 2))
        [3, 3]
    """
    if not isinstance(workers, numbers.Integral) or not 1 <= workers <= MAX_WORKERS:
        raise ConfigurationError(f"launch got workers={workers!r}; give a number from 1 to {MAX_WORKERS}.")
    if not callable(function):
        raise ConfigurationError(f"launch got {function!r} to call; pass a function, not its result.")
    from phalanx.runtime import function_call

    pickled = function_call.encode(function_call.PickledCall(function, tuple(args), dict(kwargs or {})))
    folder = Path(log_dir) if log_dir is not None else None
    config = LaunchConfig.from_environment(backend=backend, start_timeout_s=check_start_timeout(start_timeout_s))
    tasks = task_names(workers)
    with failure_report.open_logs(folder, tasks) as logs, selectors.DefaultSelector() as selector:
        screen = Console(tasks, sys.stdout, sys.stdout, logs=logs)
        placements = place(
            [HostShare("localhost", workers)],
            WorkerRecipe([FUNCTION], tasks, config, function=pickled),
            selector,
            OutputStreams(merged=True),
            screen.message,
        )
        job = JobSupervisor(placements, selector, _OutputPrinter(screen), config, merged=True)
        job.start()
        outcome = job.run()
    if not outcome.verdict.success:
        error = _error(outcome, function_call)
        if folder is not None:
            try:
                failure_report.write(folder, outcome.verdict, outcome.ends)
            except OSError as problem:
                error.add_note(f"This page cannot be written to {folder}: {problem.strerror}.")
        raise error
    silent = next((end for end in outcome.ends if end.rank not in outcome.results), None)
    if silent is not None:
        raise PeerLostError(
            f"{silent.task} (rank {silent.rank}) ended with exit code 0 but without a result: the function "
            "ended the process (os._exit, sys.exit) instead of returning.",
            rank=silent.rank,
            task=silent.task,
            host=silent.host,
        )
    return [_value(end, outcome.results[end.rank], function_call) for end in outcome.ends]


class _OutputPrinter(JobObserver):
    def __init__(self, screen: Console):
        self._screen = screen

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        self._screen.feed(rank, is_error, data)

    def exited(self, end: WorkerExit) -> None:
        self._screen.finish(end.rank)


def _value(end: WorkerExit, content: bytes, function_call: Any) -> Any:
    try:
        return function_call.decode_result(content).value
    except Exception as error:
        error.add_note(
            f"The result of {end.task} (rank {end.rank}) cannot be unpickled here: what it is made of must be "
            "importable in this process as well."
        )
        raise


def _error(outcome: JobOutcome, function_call: Any) -> BaseException:
    """The error to raise for a job that failed."""
    verdict, cause = outcome.verdict, outcome.verdict.cause
    if cause is None:
        return PhalanxError(f"The job ended: {verdict.reason}.")
    content = outcome.results.get(cause.rank)
    raised = _raised(cause, content, function_call) if content else None
    error: BaseException
    if raised is not None:
        error = raised.error
        error.__cause__ = WorkerTraceback(cause.task, raised.traceback)
    else:
        error = PeerLostError(f"The job ended: {verdict.reason}.", rank=cause.rank, task=cause.task, host=cause.host)
    error.add_note(failure_report.render(verdict, outcome.ends, full=False, traceback=False))
    return error


def _raised(cause: WorkerExit, content: bytes, function_call: Any) -> Any:
    """What the function of a worker raised; with its words alone where its class is not to be had here."""
    words = cause.diagnostics.error
    try:
        result = function_call.decode_result(content)
    except Exception:  # of any kind, since unpickling runs code of the class
        return (
            None
            if words is None
            else function_call.CallRaised(function_call.stand_in(words.kind, words.message), words.traceback)
        )
    return result if isinstance(result, function_call.CallRaised) else None
