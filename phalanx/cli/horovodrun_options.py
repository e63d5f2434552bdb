"""Two tables of `horovodrun` options: those that only set variables of the workers, and those that are not needed."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import rich_click as click

from phalanx.config import environment_variables as names
from phalanx.config.environment import process_environment
from phalanx.errors import ConfigurationError
from phalanx.version import __version__

GROUP = "Timeline, tuning and stalls, as in horovodrun"


class _Option(NamedTuple):
    """One row: a command-line option, the variable that it sets, and the function that formats its value."""

    flags: str
    variable: str
    text: Callable[[Any], str]
    type: Any
    metavar: str | None
    help: str

    @property
    def name(self) -> str:
        return self.flags.partition("/")[0].removeprefix("--").replace("-", "_")


def _flag(value: bool) -> str:
    return str(int(value))


def _path(value: Path) -> str:
    return str(value.absolute())  # a program may change its working directory before it joins the job


def _mebibytes(value: int) -> str:
    return str(value * 2**20)


_number = "{:g}".format
_FILE = click.Path(dir_okay=False, path_type=Path)
_COUNT, _TIME = click.IntRange(min=0), click.FloatRange(min=0)
_WARNING, _SHUTDOWN = "--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"
_OPTIONS = tuple(
    _Option(*row)
    for row in (
        ("--timeline-filename", names.TIMELINE, _path, _FILE, None, "Record what each rank does when, for Perfetto."),
        ("--timeline-mark-cycles", names.MARK_CYCLES, _flag, None, None, "Record negotiation rounds of hvd as well."),
        (
            "--fusion-threshold-mb",
            names.FUSION_THRESHOLD,
            _mebibytes,
            _COUNT,
            "MB",
            "hvd: fuse tensors up to this size.",
        ),
        ("--cycle-time-ms", names.CYCLE_TIME, _number, _TIME, "MS", "hvd: time between two negotiation rounds."),
        ("--cache-capacity", names.CACHE_CAPACITY, str, _COUNT, "N", "hvd: how many named operations are cached."),
        ("--autotune/--no-autotune", names.AUTOTUNE, _flag, None, None, "Find the fastest collectives at the start."),
        ("--autotune-log-file", names.AUTOTUNE_LOG, _path, _FILE, None, "Log the trials and the choice of --autotune."),
        ("--no-stall-check", names.STALL_CHECK_DISABLE, _flag, None, None, "Disable warnings about stalled ranks."),
        (_WARNING, names.STALL_CHECK_TIME, _number, _TIME, "S", "Time until missing ranks are named (60)."),
        (_SHUTDOWN, names.STALL_SHUTDOWN_TIME, _number, _TIME, "S", "Time until missing ranks end the job (600)."),
    )
)


_TRANSPORT = "collectives are Phalanx's own, in shared memory within a host and on sockets between hosts"
_TRIALS = "--autotune chooses its trials itself"
_LOGGING = "-v shows more of the job, and --log-dir keeps all output"
_NOT_NEEDED = {
    "--autotune-warmup-samples": (str, _TRIALS),
    "--autotune-steps-per-sample": (str, _TRIALS),
    "--autotune-bayes-opt-max-samples": (str, _TRIALS),
    "--autotune-gaussian-process-noise": (str, _TRIALS),
    "--binding-args": (str, "each worker gets its share of the cores"),
    "--disable-cache": (None, "nothing is cached between two jobs"),
    "--gloo/--use-gloo": (None, _TRANSPORT),
    "--gloo-timeout-seconds": (str, "PHALANX_TIMEOUT says how long ranks wait for each other"),
    "--hierarchical-allreduce/--no-hierarchical-allreduce": (None, _TRANSPORT),
    "--hierarchical-allgather/--no-hierarchical-allgather": (None, _TRANSPORT),
    "--jsrun/--use-jsrun": (None, "under jsrun, start the program itself; MPIClusterResolver finds its job"),
    "--log-level": (str, _LOGGING),
    "--log-with-timestamp/--log-without-timestamp": (None, _LOGGING),
    "--log-hide-timestamp": (None, _LOGGING),
    "--mpi/--use-mpi": (None, _TRANSPORT),
    "--mpi-args": (str, _TRANSPORT),
    "--mpi-threads-disable/--no-mpi-threads-disable": (None, _TRANSPORT),
    "--num-nccl-streams": (str, _TRANSPORT),
    "--prefix-output-with-timestamp": (None, _LOGGING),
    "--reset-limit": (str, "--restarts limits how often a lost worker is restarted"),
    "--tcp": (None, _TRANSPORT),
    "--thread-affinity": (str, "each worker gets its share of the cores"),
}
"""Options that are accepted with a note that they are unnecessary: type of the value (None for flags), and reason."""


def _say_not_needed(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None and not context.resilient_parsing:
        flag = (*option.opts, *option.secondary_opts)[0]
        _, reason = next(row for flags, row in _NOT_NEEDED.items() if flag in flags.split("/"))
        click.echo(f"phalanx run: {flag} is not needed: {reason}.", err=True)


def _refuse_config_file(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None:
        raise click.UsageError("--config-file: write the options of the file on the command line of `phalanx run`.")


def _check_build(context: click.Context, option: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    frameworks = {"Keras": "keras", "TensorFlow": "tensorflow", "PyTorch": "torch", "JAX": "jax"}
    click.echo(f"Phalanx v{__version__}:\n\nAvailable frameworks:")
    for name, module in frameworks.items():
        click.echo(f"    [{'X' if importlib.util.find_spec(module) else ' '}] {name}")
    click.echo("\nAvailable controllers and tensor operations:\n    [X] Phalanx's own: shared memory and sockets")
    context.exit()


def _original_options() -> list[Callable[..., Any]]:
    quiet: dict[str, Any] = {"hidden": True, "expose_value": False, "default": None}
    options = [
        click.option(*_flags(flags), type=kind, is_flag=kind is None or None, callback=_say_not_needed, **quiet)
        for flags, (kind, _) in _NOT_NEEDED.items()
    ]
    return [
        *options,
        click.option("--config-file", callback=_refuse_config_file, **quiet),
        click.option("-cb", "--check-build", is_flag=True, is_eager=True, callback=_check_build, **quiet),
    ]


def _flags(flags: str) -> tuple[str, ...]:
    """Flags in click's syntax: `--a/--no-a` is an on/off flag, `--a/--use-a` is one option with two names."""
    return (flags,) if "/--no-" in flags or "/--log-without" in flags else tuple(flags.split("/"))


def add_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds these options to a command."""
    for original in _original_options():
        command = original(command)
    for row in reversed(_OPTIONS):
        is_flag = True if row.type is None else None
        option = click.option(
            row.flags,
            panel=GROUP,
            type=row.type,
            metavar=row.metavar,
            is_flag=is_flag,
            default=None,
            help=row.help,
        )
        command = option(command)
    return command


def ssh_variables(port: int | None, identity_file: Path | None) -> dict[str, str]:
    """PHALANX_SSH with the given port and private key; empty if neither is given."""
    added = [] if port is None else ["-p", str(port)]
    added += [] if identity_file is None else ["-i", str(identity_file.absolute())]
    command = process_environment().get(names.SSH) or names.DEFAULT_SSH
    return {names.SSH: f"{command} {shlex.join(added)}"} if added else {}


def variables(**values: Any) -> dict[str, str]:
    """Return the environment variables that options set. Omitted options leave the environment unchanged.

    Args:
        values: Values of the options by name, such as `cycle_time_ms`; None or False for omitted options.

    Raises: ConfigurationError if the job would end before the warning.
    """
    warn_s, end_s = values.get("stall_check_warning_time_seconds"), values.get("stall_check_shutdown_time_seconds")
    if warn_s is None and not values.get("no_stall_check"):
        warn_s = names.DEFAULT_STALL_WARNING_S
    if warn_s and end_s and end_s < warn_s:
        raise ConfigurationError(
            f"--stall-check-shutdown-time-seconds {end_s:g} is less than --stall-check-warning-time-seconds "
            f"{warn_s:g}: the job would end before it warns."
        )
    # Only an on/off flag can be given as False. For other flags, False means that they were not given.
    given = {row: values.get(row.name) for row in _OPTIONS}
    return {
        row.variable: row.text(value)
        for row, value in given.items()
        if value is not None and (value is not False or "/--no-" in row.flags)
    }
