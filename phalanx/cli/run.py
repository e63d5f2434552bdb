"""`phalanx run`: its options and the job that they describe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from phalanx.cli import horovodrun_options
from phalanx.config.keras_backends import BACKENDS
from phalanx.errors import SIGNAL_BASE
from phalanx.launcher.elastic_hosts.host_blacklist import COOLDOWN_S
from phalanx.launcher.host_slots import MAX_WORKERS
from phalanx.launcher.restart_policy import DEFAULT_RESTARTS

if TYPE_CHECKING:
    from phalanx.config.launch_config import LaunchConfig
    from phalanx.launcher.elastic_hosts.host_pool import ElasticOptions
    from phalanx.launcher.host_slots import HostSpec
    from phalanx.launcher.job_request import DashboardOptions, JobRequest

CONTROL = "control"


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """Number of workers. A job of fixed size has `maximum` workers, and `minimum` is None."""

    minimum: int | None
    maximum: int
    initial: int | None = None


class _WorkersType(click.ParamType):  # type: ignore[type-arg]
    """Parses `4` or `2:4` as a `WorkerRange`."""

    name = "workers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> WorkerRange:
        first, colon, second = str(value).partition(":")
        try:
            maximum = int(second if colon else first)
            minimum = int(first) if colon else None
        except ValueError:
            self.fail(f"{value!r} is not a number of workers. Write --workers 4, or --workers 2:4.", param, ctx)
        if maximum < 1 or (minimum is not None and not 1 <= minimum <= maximum):
            self.fail(f"{value!r}: at least 1 worker is needed, and the minimum comes first, as in 2:4.", param, ctx)
        if maximum > MAX_WORKERS:
            self.fail(f"{value!r}: at most {MAX_WORKERS} workers can be given.", param, ctx)
        return WorkerRange(minimum, maximum)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `phalanx run` as parsed by click; see their help texts."""

    workers: WorkerRange | None
    min_np: int | None
    max_np: int | None
    hosts: str | None
    hostfile: Path | None
    host_discovery_script: str | None
    slots_per_host: int
    blacklist_cooldown_range: tuple[float, float]
    network_interfaces: str | None
    ps: int
    chief: bool
    evaluator: bool
    module: bool
    dashboard: str | None
    program: tuple[str, ...]

    @property
    def names_hosts(self) -> bool:
        return self.hosts is not None or self.hostfile is not None

    @property
    def names_workers(self) -> bool:
        return self.workers is not None or self.min_np is not None or self.max_np is not None


_COUNT = click.IntRange(1, MAX_WORKERS)
_HOSTS, _PROGRAM, _TASKS = "Workers and hosts", "Program", "Other tasks"
_ELASTIC, _FAILURES, _OUTPUT = "Elastic training", "Failures and restarts", "Output"


def _option(group: str, *flags: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*flags, panel=group, **settings)


_OPTIONS = (
    _option(
        _HOSTS,
        "-n",
        "-np",
        "--num-proc",
        "--workers",
        "workers",
        type=_WorkersType(),
        metavar="N|MIN:MAX",
        help="Number of workers. Default: one for each GPU, or 2 without GPUs. With MIN:MAX the job continues when it "
        "loses workers, as long as MIN are left.",
    ),
    _option(
        _HOSTS,
        "--devices-per-worker",
        type=_COUNT,
        metavar="N",
        help="JAX only: devices per worker, for one program over all devices. GPUs, or a divided CPU if there are "
        "none. Default: 1.",
    ),
    _option(_HOSTS, "-H", "--hosts", metavar="A:2,B:2", help="Hosts and their workers, started through ssh."),
    _option(
        _HOSTS,
        "-hostfile",
        "--hostfile",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The same in a file: a line `A slots=2` for each host.",
    ),
    _option(
        _HOSTS, "-p", "--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of ssh on the hosts."
    ),
    _option(
        _HOSTS,
        "-i",
        "--ssh-identity-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Private key for ssh.",
    ),
    _option(
        _HOSTS,
        "--network-interfaces",
        "--network-interface",
        metavar="ETH0,...",
        help="As in horovodrun, on one host only. For several, give --hosts names that resolve to that network.",
    ),
    _option(_PROGRAM, "--backend", type=click.Choice(BACKENDS), help="Sets KERAS_BACKEND for the workers."),
    _option(_PROGRAM, "-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with `python -m`."),
    _option(
        _TASKS,
        "--ps",
        type=click.IntRange(0, MAX_WORKERS),
        metavar="N",
        default=0,
        help="Number of parameter servers in addition to the workers.",
    ),
    _option(_TASKS, "--chief", is_flag=True, help="A chief in addition to the workers. Default: worker 0."),
    _option(_TASKS, "--evaluator", is_flag=True, help="An evaluator in addition to the workers."),
    _option(
        _ELASTIC,
        "--host-discovery-script",
        metavar="COMMAND",
        help="With MIN:MAX: a script that prints the hosts, a line `A:2` for each. It runs every few seconds.",
    ),
    _option(
        _ELASTIC,
        "--slots-per-host",
        type=_COUNT,
        metavar="N",
        default=1,
        show_default=True,
        help="Workers on a host that the script prints without a number.",
    ),
    _option(
        _ELASTIC,
        "--min-np",
        "--min-num-proc",
        "--num-proc-min",
        "min_np",
        type=_COUNT,
        metavar="N",
        help="As in horovodrun: -np 3 --min-np 2 --max-np 4 is --workers 2:4, but starts with 3 workers.",
    ),
    _option(
        _ELASTIC,
        "--max-np",
        "--max-num-proc",
        "--num-proc-max",
        "max_np",
        type=_COUNT,
        metavar="N",
        help="See --min-np.",
    ),
    _option(
        _ELASTIC,
        "--blacklist-cooldown-range",
        type=click.FloatRange(min=0, min_open=True),
        nargs=2,
        metavar="MIN MAX",
        default=COOLDOWN_S,
        show_default=True,
        help="With MIN:MAX: shortest and longest time for which a failing host is blacklisted, in seconds.",
    ),
    _option(
        _FAILURES,
        "--restarts",
        type=click.IntRange(min=0),
        metavar="N",
        default=DEFAULT_RESTARTS,
        show_default=True,
        help="Maximum restarts of a lost task, with --ps or --workers MIN:MAX.",
    ),
    _option(
        _FAILURES,
        "--max-restarts",
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        show_default=True,
        help="Maximum restarts of the whole job after a failure. With a Checkpoint, training resumes.",
    ),
    _option(
        _FAILURES,
        "--preemption-signal",
        metavar="NAME",
        help="A signal (such as USR1) at which, as at TERM, a job with a Checkpoint saves it and exits with code 75.",
    ),
    _option(
        _FAILURES,
        "--start-timeout",
        "--elastic-timeout",
        "start_timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        metavar="S",
        help="Seconds to wait for hosts and tasks at startup. Default: 60 for ssh hosts, 300 for tasks.",
    ),
    _option(
        _OUTPUT,
        "--log-dir",
        "--output-filename",
        "log_dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory for one log file per task, and for the failure report if the job fails.",
    ),
    _option(
        _OUTPUT,
        "-v",
        "--verbose",
        is_flag=True,
        help="Show when tasks start and exit, full tracebacks, and the startup messages of the backends.",
    ),
    _option(_OUTPUT, "--dashboard", "dashboard", flag_value="show", help="Show the job in a browser, on this machine."),
    _option(
        _OUTPUT,
        "--dashboard-control",
        "dashboard",
        flag_value=CONTROL,
        help="The same, with buttons to scale, to drain a host, to take a checkpoint and to stop.",
    ),
    horovodrun_options.add_options,
    click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."),
)


def _add_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(
    short_help="Run a script on several workers.",
    context_settings={"allow_interspersed_args": False, "max_content_width": 110},
)
@_add_options
def run(**options: Any) -> None:
    """Run SCRIPT on several workers, each as `python SCRIPT ARGS`.

    Options of `phalanx run` come before SCRIPT; everything after it is passed to the script. Each worker gets a
    TF_CONFIG, its share of the cores, and the job's secret. Ctrl-C stops all workers, and so does a worker that fails,
    unless the job is elastic (--workers MIN:MAX). With --ps, killed tasks are restarted. The exit code is that of the
    first failure.

    Examples:

    \b
        phalanx run --workers 2 train.py --epochs 5
        phalanx run --hosts a:2,b:2 --backend jax -m project.train
        phalanx run --ps 1 --workers 2 train_with_servers.py
        phalanx run -np 4 -H a:2,b:2 train_with_horovod.py
        phalanx run -np 3 --min-np 2 --max-np 4 train_with_elastic_horovod.py
        phalanx run --workers 2:8 --host-discovery-script ./hosts.sh train.py
    """
    from phalanx.config.environment import set_variables
    from phalanx.config.launch_config import LaunchConfig
    from phalanx.launcher.job_runner import run_job
    from phalanx.launcher.worker_placement import check_start_timeout

    launch_options = {name: options.pop(name) for name in LaunchConfig.__dataclass_fields__ if name in options}
    ssh_options = horovodrun_options.ssh_variables(options.pop("ssh_port"), options.pop("ssh_identity_file"))
    chosen = RunOptions(**{name: options.pop(name) for name in RunOptions.__dataclass_fields__})
    launch_options["start_timeout_s"] = check_start_timeout(launch_options["start_timeout_s"])
    job = make_request(chosen, LaunchConfig.from_environment(**launch_options))
    # After all checks, so that a rejected call leaves the environment unchanged.
    set_variables(ssh_options | horovodrun_options.variables(**options))  # workers inherit them, also on other hosts
    try:
        code = run_job(job)
    except BrokenPipeError:
        # The reader of the output has exited (`| head`). The workers have been stopped; nothing can be shown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = SIGNAL_BASE + signal.SIGPIPE
    sys.exit(code)


def make_request(options: RunOptions, config: LaunchConfig) -> JobRequest:
    """Return the job that the options describe.

    Raises: click.UsageError or ConfigurationError if options contradict each other or their values are not valid.
    """
    from phalanx.config.environment import process_environment
    from phalanx.launcher.host_slots import check_interfaces, choose_hosts
    from phalanx.launcher.job_request import JobRequest
    from phalanx.launcher.job_size import default_workers
    from phalanx.launcher.worker_placement import task_names

    _check_order(options)
    workers, size_reason = _worker_range(options), ""
    if not options.names_workers and not options.names_hosts:
        count, size_reason = default_workers(process_environment())
        workers = WorkerRange(None, count)
    elastic = None if workers.minimum is None else _elastic_options(options, workers, config)
    host_specs: list[HostSpec] = []
    others = 0 if elastic is not None else options.chief + options.ps + options.evaluator
    if options.host_discovery_script is None:
        host_specs = choose_hosts(
            None if options.names_hosts and not options.names_workers else workers.maximum,
            options.hosts,
            options.hostfile,
            all_slots=elastic is not None,
            others=others,
        )
    elif elastic is None:
        raise click.UsageError("--host-discovery-script needs --workers MIN:MAX: its hosts join and leave.")
    check_interfaces(options.network_interfaces, host_specs)
    if elastic is not None:
        tasks = task_names(workers.maximum, evaluator=options.evaluator)
    else:
        training = sum(host_spec.workers for host_spec in host_specs) - others
        tasks = task_names(training, chief=options.chief, servers=options.ps, evaluator=options.evaluator)
    arguments = _program_arguments(options)
    # A program that spans all workers cannot lose one: restart the whole job instead of the worker.
    is_single_program = config.devices_per_worker is not None
    if is_single_program and elastic is not None:
        config = replace(config, max_restarts=config.max_restarts or config.restarts)
    if not options.ps and (elastic is None or is_single_program):
        config = replace(config, restarts=0)  # a job without servers ends when it loses a worker
    return JobRequest(
        arguments,
        tasks,
        host_specs,
        config=config,
        elastic=elastic,
        is_single_program=is_single_program,
        size_reason=size_reason,
        dashboard=_dashboard_options(options),
    )


def _program_arguments(options: RunOptions) -> tuple[str, ...]:
    """The program's command line after `python`. Raises an error if the program does not exist."""
    from phalanx.launcher.worker_program import check_script

    if not options.program:
        raise click.UsageError("Name the script to run, or a module with -m.")
    if options.module:
        return ("-m", *options.program)
    check_script(options.program[0])
    return options.program


def _dashboard_options(options: RunOptions) -> DashboardOptions | None:
    """Options of the dashboard; None without one. Raises an error if a package that it needs is not installed."""
    from phalanx.launcher.dashboard_process import check_packages
    from phalanx.launcher.job_request import DashboardOptions

    if not options.dashboard:
        return None
    check_packages()
    return DashboardOptions(control=options.dashboard == CONTROL)


def _check_order(options: RunOptions) -> None:
    """Detect misplaced options: options after the script belong to it, but if none sets the number of workers, one of
    them may be meant for `phalanx run`."""
    if options.names_workers or options.names_hosts:
        return
    program = options.program
    late = [word for word in program[1:] if word.partition("=")[0] in ("--workers", "-np", "--hosts")]
    if late:
        raise click.UsageError(
            f"{late[0]} comes after {program[0]}, which gets it: options of phalanx run come before the script. If "
            f"it is an option of {program[0]}, write --workers N before the script as well."
        )


def _worker_range(options: RunOptions) -> WorkerRange:
    """Number of workers according to --workers and horovodrun's options."""
    from phalanx.launcher.host_slots import choose_hosts

    given = options.workers or WorkerRange(None, 1)
    if options.min_np is not None or options.max_np is not None:
        if given.minimum is not None:
            raise click.UsageError("--workers MIN:MAX and --min-np, --max-np say the same. Use one of them.")
        initial = given.maximum if options.workers else options.max_np or options.min_np or 1
        minimum, maximum = options.min_np or initial, options.max_np or initial
        if not minimum <= initial <= maximum:
            raise click.UsageError(
                f"--min-np {minimum}, -np {initial} and --max-np {maximum} must be in ascending order; the job starts "
                f"with -np."
            )
        given = WorkerRange(minimum, maximum, initial)
    if given.minimum is not None and options.names_hosts:
        # As in horovodrun, at most as many processes as the hosts have slots now.
        slots = sum(host_spec.workers for host_spec in choose_hosts(None, options.hosts, options.hostfile))
        given = replace(given, maximum=min(given.maximum, max(slots, given.initial or given.minimum)))
    return given


def _elastic_options(options: RunOptions, workers: WorkerRange, config: LaunchConfig) -> ElasticOptions:
    from phalanx.launcher.elastic_hosts.host_discovery import DiscoveryScript
    from phalanx.launcher.elastic_hosts.host_pool import ElasticOptions

    assert workers.minimum is not None
    if options.ps or options.chief:
        raise click.UsageError("--workers MIN:MAX is for jobs of workers only; with --ps, lost tasks return anyway.")
    script = None
    if options.host_discovery_script is not None:
        if options.names_hosts or options.evaluator:
            raise click.UsageError(
                "--host-discovery-script says which hosts there are: leave --hosts and --hostfile out, and start the "
                "--evaluator by itself."
            )
        script = DiscoveryScript(
            options.host_discovery_script,
            options.slots_per_host,
            config.discovery_interval_s,
            config.discovery_timeout_s,
        )
    cooldown_s = options.blacklist_cooldown_range
    if cooldown_s[0] > cooldown_s[1]:
        raise click.UsageError("--blacklist-cooldown-range: the shorter time comes first.")
    return ElasticOptions(workers.minimum, workers.maximum, workers.initial, script, cooldown_s)
