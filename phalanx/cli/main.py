"""The command line: `phalanx run`, `phalanx doctor`.

Imports no Keras and no NumPy: the launcher's own start is part of a job's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click

from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.launcher.host_blacklist import COOLDOWN_S
from phalanx.launcher.host_slots import MAX_WORKERS
from phalanx.launcher.restart_policy import DEFAULT as RESTARTS
from phalanx.monitoring.console import write_whole
from phalanx.runtime.exit_codes import SIGNAL_BASE
from phalanx.version import __version__

BACKENDS = ("jax", "tensorflow", "torch")


class _WorkersType(click.ParamType):  # type: ignore[type-arg]
    """`4`, or `2:4`; as (None, 4) or (2, 4)."""

    name = "workers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int]:
        first, colon, second = str(value).partition(":")
        try:
            maximum = int(second if colon else first)
            minimum = int(first) if colon else None
        except ValueError:
            self.fail(f"{value!r} is no number of workers. Write --workers 4, or --workers 2:4.", param, ctx)
        if maximum < 1 or (minimum is not None and not 1 <= minimum <= maximum):
            self.fail(f"{value!r}: at least 1 worker is needed, and the minimum comes first, as in 2:4.", param, ctx)
        if maximum > MAX_WORKERS:
            self.fail(f"{value!r}: at most {MAX_WORKERS} workers can be given.", param, ctx)
        return minimum, maximum


def _options_of_horovodrun(function: Callable[..., None]) -> Callable[..., None]:
    """Options of `phalanx run` that only set variables for the workers; see `launcher.horovod_options`."""
    file = click.Path(dir_okay=False, path_type=Path)
    options = (
        click.option("--timeline-filename", type=file, help="Record what each rank does when, for Perfetto."),
        click.option("--timeline-mark-cycles", is_flag=True, help="Rounds of hvd's negotiation as well."),
        click.option(
            "--fusion-threshold-mb",
            type=click.IntRange(min=0),
            metavar="MB",
            help="hvd: tensors that are ready together travel as one up to this size.",
        ),
        click.option(
            "--cycle-time-ms",
            type=click.FloatRange(min=0),
            metavar="MS",
            help="hvd: time between two rounds while ranks wait for each other.",
        ),
        click.option(
            "--cache-capacity",
            type=click.IntRange(min=0),
            metavar="N",
            help="hvd: how many named operations are remembered.",
        ),
        click.option(
            "--autotune/--no-autotune",
            default=None,
            help="Find out in the first steps how collectives are fastest here.",
        ),
        click.option("--autotune-log-file", type=file, help="What was tried and chosen."),
        click.option("--no-stall-check", is_flag=True, help="Do not warn of ranks that do not come."),
        click.option(
            "--stall-check-warning-time-seconds",
            type=click.FloatRange(min=0),
            metavar="S",
            help="After which ranks are named that have not come to a collective (60).",
        ),
        click.option(
            "--stall-check-shutdown-time-seconds",
            type=click.FloatRange(min=0),
            metavar="S",
            help="After which the job ends because of them (600, or PHALANX_TIMEOUT).",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        # Until a job heeds them: processes that were started on the way to it (ssh) are to be ended.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _end)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before a job, or between two lives of it
            sys.exit(SIGNAL_BASE + signal.SIGINT)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(SIGNAL_BASE + number)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="phalanx")
def cli() -> None:
    """Distributed training for Keras 3 on any backend."""


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "-np",
    "--num-proc",
    "--workers",
    "workers",
    type=_WorkersType(),
    metavar="N|MIN:MAX",
    help="Number of workers. With MIN:MAX the job goes on when workers are lost, as long as MIN are left.",
)
@click.option(
    "--min-np",
    "--min-num-proc",
    "--num-proc-min",
    "min_np",
    type=click.IntRange(1, MAX_WORKERS),
    metavar="N",
    help="As horovodrun has it: -np 3 --min-np 2 --max-np 4 is --workers 2:4 that begins when 3 have come.",
)
@click.option(
    "--max-np", "--max-num-proc", "--num-proc-max", "max_np", type=click.IntRange(1, MAX_WORKERS), metavar="N"
)
@click.option("-H", "--hosts", metavar="A:2,B:2", help="Hosts and their numbers of workers, started through ssh.")
@click.option(
    "-hostfile",
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The same in a file: a line `A slots=2` for each host.",
)
@click.option(
    "--host-discovery-script",
    metavar="COMMAND",
    help="With MIN:MAX: a script that prints the hosts, a line `A:2` for each, and is asked again every few seconds.",
)
@click.option(
    "--slots-per-host",
    type=click.IntRange(1, MAX_WORKERS),
    default=1,
    show_default=True,
    help="Workers on a host that the script prints without a number.",
)
@click.option(
    "--blacklist-cooldown-range",
    type=click.FloatRange(min=0, min_open=True),
    nargs=2,
    metavar="MIN MAX",
    default=COOLDOWN_S,
    show_default=True,
    help="With MIN:MAX: seconds for which a host that keeps failing is set aside, at first and at most.",
)
@click.option(
    "--network-interfaces",
    "--network-interface",
    metavar="ETH0,...",
    help="As horovodrun has it; only for jobs on one host. With several, name the hosts as that network does.",
)
@click.option(
    "--ps", type=click.IntRange(0, MAX_WORKERS), default=0, help="Number of parameter servers beside the workers."
)
@click.option("--chief", is_flag=True, help="A chief beside the workers; else worker 0 is the chief.")
@click.option("--evaluator", is_flag=True, help="An evaluator beside the workers.")
@click.option("--backend", type=click.Choice(BACKENDS), help="Sets KERAS_BACKEND for the workers.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keeps one file of output per task there, and a page that says why if the job fails.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds that hosts and tasks wait for each other at the start.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=RESTARTS,
    show_default=True,
    help="How often a task that was lost is started again, with parameter servers or --workers MIN:MAX.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often the whole job is started again when it has died; with a Checkpoint it goes on where it was.",
)
@click.option(
    "--preemption-signal",
    metavar="NAME",
    help="A signal, such as USR1, that like TERM tells a job with a Checkpoint to save and end with exit code 75.",
)
@_options_of_horovodrun
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with `python -m`.")
@click.option("-v", "--verbose", is_flag=True, help="Say when which task starts and ends.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    workers: tuple[int | None, int] | None,
    min_np: int | None,
    max_np: int | None,
    hosts: str | None,
    hostfile: Path | None,
    host_discovery_script: str | None,
    slots_per_host: int,
    blacklist_cooldown_range: tuple[float, float],
    network_interfaces: str | None,
    ps: int,
    chief: bool,
    evaluator: bool,
    backend: str | None,
    log_dir: Path | None,
    start_timeout: float | None,
    restarts: int,
    max_restarts: int,
    preemption_signal: str | None,
    module: bool,
    verbose: bool,
    program: tuple[str, ...],
    **horovodrun: Any,
) -> None:
    """Run SCRIPT on several workers at once, as `python SCRIPT ARGS` each.

    Each worker gets its TF_CONFIG, its share of the cores and a secret of the job. Ctrl-C or a failing worker
    ends all of them; in a job with parameter servers, one that was killed is started again. The exit code is
    that of the worker that was the cause; docs/failures.md lists them.

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
    from phalanx.launcher import horovodrun_options, run_command
    from phalanx.launcher.host_pool import DiscoveryScript, Members
    from phalanx.launcher.host_slots import HostShare, check_interfaces, choose_hosts
    from phalanx.launcher.program import check_script
    from phalanx.launcher.worker_placement import task_names

    if workers is None and hosts is None and hostfile is None and min_np is None and max_np is None:
        late = [word for word in program[1:] if word.partition("=")[0] in ("--workers", "-n", "-np", "--hosts", "-H")]
        if late:
            raise click.UsageError(
                f"{late[0]} stands behind {program[0]}, which gets it: options of phalanx run stand before the script."
            )
        raise click.UsageError("Say how many: either --workers N, or --hosts a:2,b:2.")
    minimum, number = workers or (None, 1)
    begin: int | None = None
    if min_np is not None or max_np is not None:
        minimum, begin, number = _range(workers, min_np, max_np)
        workers = (minimum, number)
    if minimum is not None and (hosts is not None or hostfile is not None):
        # No more processes than there are places now, as with horovodrun.
        places = sum(share.workers for share in choose_hosts(None, hosts, hostfile))
        number = min(number, max(places, begin or minimum))
    if minimum is not None and (ps or chief):
        raise click.UsageError("--workers MIN:MAX is for jobs of workers only; with --ps, lost tasks return anyhow.")
    members = script = None
    shares: list[HostShare] = []
    if host_discovery_script is not None:
        if minimum is None:
            raise click.UsageError("--host-discovery-script needs --workers MIN:MAX: its hosts come and go.")
        if hosts is not None or hostfile is not None or evaluator:
            raise click.UsageError(
                "--host-discovery-script says which hosts there are: leave --hosts and --hostfile out, and start the "
                "--evaluator by itself."
            )
        launch = LaunchConfig.from_environment()
        script = DiscoveryScript(
            host_discovery_script, slots_per_host, launch.discovery_interval_s, launch.discovery_timeout_s
        )
    else:
        beside = chief + ps + evaluator if minimum is None else 0
        shares = choose_hosts(
            None if workers is None else number, hosts, hostfile, every_place=minimum is not None, others=beside
        )
    check_interfaces(network_interfaces, shares)
    if minimum is not None:
        if blacklist_cooldown_range[0] > blacklist_cooldown_range[1]:
            raise click.UsageError("--blacklist-cooldown-range: the shorter time comes first.")
        members = Members(minimum, number, begin, script, blacklist_cooldown_range)
        tasks = task_names(number, evaluator=evaluator)
    else:
        trainers = sum(share.workers for share in shares) - beside
        tasks = task_names(trainers, chief=chief, servers=ps, evaluator=evaluator)
    if not program:
        raise click.UsageError("Name the script to run, or a module with -m.")
    if module:
        arguments = ("-m", *program)
    else:
        check_script(program[0])
        arguments = program
    set_variables(horovodrun_options.variables(**horovodrun))  # workers inherit them, on other hosts too
    try:
        code = run_command.run(
            shares,
            arguments,
            tasks=tasks,
            backend=backend,
            log_dir=log_dir,
            start_timeout_s=start_timeout,
            restarts=restarts if ps or minimum is not None else 0,
            members=members,
            max_restarts=max_restarts,
            preemption_signal=preemption_signal,
            verbose=verbose,
        )
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`). The workers are ended by now; nothing can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = SIGNAL_BASE + signal.SIGPIPE
    sys.exit(code)


def _range(workers: tuple[int | None, int] | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
    """Fewest workers, those with which the job begins, and most, from horovodrun's options."""
    first, number = workers or (None, max_np or min_np or 1)
    if first is not None:
        raise click.UsageError("--workers MIN:MAX and --min-np, --max-np say the same. Use one of them.")
    minimum, maximum = min_np or number, max_np or number
    if not minimum <= number <= maximum:
        raise click.UsageError(
            f"--min-np {minimum}, -np {number} and --max-np {maximum} must not descend; the job begins with -np."
        )
    return minimum, number, maximum


@cli.command()
@click.option("--job", help="Only this one.")
def status(job: str | None) -> None:
    """Show the elastic jobs (--workers MIN:MAX) that run here: members, generation, step, speed."""
    from phalanx.launcher import job_status

    sys.exit(job_status.status(job))


@cli.command()
@click.option("--job", help="Which one, as `phalanx status` names it; needed where several run.")
@click.option("-n", "--workers", type=click.IntRange(min=1), required=True, help="How many there shall be.")
def scale(job: str | None, workers: int) -> None:
    """Let an elastic job go on with another number of workers, between its MIN and MAX."""
    from phalanx.launcher import job_status

    sys.exit(job_status.scale(job, workers))


@cli.command()
def doctor() -> None:
    """Show what this task knows of its cluster, and check that the others can be reached."""
    from phalanx.cluster import doctor as cluster_doctor

    sys.exit(cluster_doctor.run())


def _open_closed_streams() -> None:
    """Where the caller has closed stdin, stdout or stderr, as daemons do: let no other file get its number."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8", closefd=False))


def main() -> None:
    """The `phalanx` command. An error of Phalanx is shown without traceback and ends with its exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # What workers print must not fail on a launcher whose locale knows fewer characters.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        cli(prog_name="phalanx")
    except ConfigurationError as error:
        write_whole(sys.stderr, f"phalanx: {error}\n")
        sys.exit(error.exit_code)
    except PhalanxError as error:
        write_whole(sys.stderr, f"phalanx: {type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
