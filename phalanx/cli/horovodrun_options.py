"""The options of `horovodrun` that only set variables of the workers: one table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from phalanx.cli.option_groups import GroupedOption
from phalanx.config import environment_variables as names
from phalanx.errors import ConfigurationError

GROUP = "Timeline, tuning and stalls, as in horovodrun"


class _Option(NamedTuple):
    """One row: a command line option, the variable that it sets, and the text of the variable for a value."""

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
    return str(value.absolute())  # a program may change its directory before it joins the job


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


def add_options(command: Callable[..., None]) -> Callable[..., None]:
    """A decorator: the command takes these options."""
    for row in reversed(_OPTIONS):
        is_flag = True if row.type is None else None
        option = click.option(
            row.flags,
            cls=GroupedOption,
            group=GROUP,
            type=row.type,
            metavar=row.metavar,
            is_flag=is_flag,
            default=None,
            help=row.help,
        )
        command = option(command)
    return command


def variables(**values: Any) -> dict[str, str]:
    """The variables that options set. Options that are not given leave the environment as it is.

    Args:
        values: of the options by name, such as `cycle_time_ms`; None or False if an option is not given.

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
    given = {row: values.get(row.name) for row in _OPTIONS}
    return {
        row.variable: row.text(value)
        for row, value in given.items()
        if value is not None and (value is not False or "/--no-" in row.flags)
    }
