"""The command line: `phalanx run`, `phalanx doctor`.

Imports no Keras and no NumPy: the launcher's own start is part of a job's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.launcher.exit_codes import SIGNAL_BASE
from phalanx.launcher.restarts import DEFAULT as RESTARTS
from phalanx.version import __version__

BACKENDS = ("jax", "tensorflow", "torch")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="phalanx")
def cli() -> None:
    """Distributed training for Keras 3 on any backend."""


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--workers", type=click.IntRange(min=1), help="Number of workers on this host.")
@click.option("--hosts", metavar="A:2,B:2", help="Hosts and their numbers of workers, started through ssh.")
@click.option("--ps", type=click.IntRange(min=0), default=0, help="Number of parameter servers beside the workers.")
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
    help="How often a task that was killed is started again, in a job with parameter servers.",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does, instead of a script.")
@click.option("-v", "--verbose", is_flag=True, help="Say when which task starts and ends.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    workers: int | None,
    hosts: str | None,
    ps: int,
    chief: bool,
    evaluator: bool,
    backend: str | None,
    log_dir: Path | None,
    start_timeout: float | None,
    restarts: int,
    module: str | None,
    verbose: bool,
    program: tuple[str, ...],
) -> None:
    """Run SCRIPT on several workers at once, as `python SCRIPT ARGS` each.

    Each worker gets its TF_CONFIG, its share of the cores and a secret of the job. Ctrl-C or a failing worker
    ends all of them; in a job with parameter servers, one that was killed is started again. The exit code is
    that of the worker that was the cause; docs/failures.md lists them.

    \b
        phalanx run --workers 2 train.py --epochs 5
        phalanx run --hosts a:2,b:2 --backend jax -m project.train
        phalanx run --ps 1 --workers 2 train_with_servers.py
    """
    from phalanx.launcher import command
    from phalanx.launcher.hosts import HostShare, add_tasks, parse_hosts
    from phalanx.launcher.placement import task_names
    from phalanx.launcher.program import check_script

    if (workers is None) == (hosts is None):
        raise click.UsageError("Say how many: either --workers N, or --hosts a:2,b:2.")
    shares = parse_hosts(hosts) if hosts is not None else [HostShare("localhost", workers or 1)]
    tasks = task_names(sum(share.workers for share in shares), chief=chief, servers=ps, evaluator=evaluator)
    shares = add_tasks(shares, chief + ps + evaluator)
    if module is not None:
        arguments = ("-m", module, *program)
    elif program:
        check_script(program[0])
        arguments = program
    else:
        raise click.UsageError("Name the script to run, or a module with -m.")
    try:
        code = command.run(
            shares,
            arguments,
            tasks=tasks,
            backend=backend,
            log_dir=log_dir,
            start_timeout_s=start_timeout,
            restarts=restarts if ps else 0,
            verbose=verbose,
        )
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`). The workers are ended by now; nothing can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = SIGNAL_BASE + signal.SIGPIPE
    sys.exit(code)


@cli.command()
def doctor() -> None:
    """Show what this task knows of its cluster, and check that the others can be reached."""
    from phalanx.cluster import doctor as cluster_doctor

    sys.exit(cluster_doctor.run())


def main() -> None:
    """The `phalanx` command. An error of Phalanx is shown without traceback and ends with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # What workers print must not fail on a launcher whose locale knows fewer characters.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        cli(prog_name="phalanx")
    except ConfigurationError as error:
        click.echo(f"phalanx: {error}", err=True)
        sys.exit(error.exit_code)
    except PhalanxError as error:
        click.echo(f"phalanx: {type(error).__name__}: {error}", err=True)
        sys.exit(error.exit_code)
