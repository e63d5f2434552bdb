"""The options of `horovodrun` that only set variables of the workers: one table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from phalanx.config import variables as names
from phalanx.errors import ConfigurationError


class _Option(NamedTuple):
    """One row: a command line option, the variable that it sets, and the text of the variable for a value."""

    flags: str
    variable: str
    text: Callable[[Any], str]
    help: str
    type: Any = None
    metavar: str | None = None

    @property
    def name(self) -> str:
        return self.flags.partition("/")[0].removeprefix("--").replace("-", "_")


_FILE = click.Path(dir_okay=False, path_type=Path)
_SECONDS = click.FloatRange(min=0)
_OPTIONS = (
    # Files are absolute, since a program may change its directory before it joins the job.
    _Option(
        "--timeline-filename",
        names.TIMELINE,
        lambda path: str(path.absolute()),
        "Record what each rank does when, for Perfetto.",
        _FILE,
    ),
    _Option("--timeline-mark-cycles", names.MARK_CYCLES, lambda _: "1", "Record negotiation rounds of hvd as well."),
    _Option(
        "--fusion-threshold-mb",
        names.FUSION_THRESHOLD,
        lambda megabytes: str(megabytes * 2**20),
        "hvd: tensors that are ready together are reduced as one up to this size.",
        click.IntRange(min=0),
        "MB",
    ),
    _Option(
        "--cycle-time-ms",
        names.CYCLE_TIME,
        "{:g}".format,
        "hvd: time between two negotiation rounds while ranks wait for each other.",
        _SECONDS,
        "MS",
    ),
    _Option(
        "--cache-capacity",
        names.CACHE_CAPACITY,
        str,
        "hvd: how many named operations are cached.",
        click.IntRange(min=0),
        "N",
    ),
    _Option(
        "--autotune/--no-autotune",
        names.AUTOTUNE,
        lambda on: str(int(on)),
        "Find the fastest collectives during the first steps.",
    ),
    _Option(
        "--autotune-log-file",
        names.AUTOTUNE_LOG,
        lambda path: str(path.absolute()),
        "Log the trials and the choice of --autotune.",
        _FILE,
    ),
    _Option("--no-stall-check", names.STALL_CHECK_DISABLE, lambda _: "1", "Disable warnings about stalled ranks."),
    _Option(
        "--stall-check-warning-time-seconds",
        names.STALL_CHECK_TIME,
        "{:g}".format,
        "Time until a warning names the ranks missing from a collective (60).",
        _SECONDS,
        "S",
    ),
    _Option(
        "--stall-check-shutdown-time-seconds",
        names.STALL_SHUTDOWN_TIME,
        "{:g}".format,
        "Time until missing ranks end the job (600, or PHALANX_TIMEOUT).",
        _SECONDS,
        "S",
    ),
)


def add_options(command: Callable[..., None]) -> Callable[..., None]:
    """A decorator: the command takes these options."""
    for row in reversed(_OPTIONS):
        is_switch = row.type is None
        command = click.option(
            row.flags,
            type=row.type,
            metavar=row.metavar,
            is_flag=is_switch or None,
            default=None,
            help=row.help,
        )(command)
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
