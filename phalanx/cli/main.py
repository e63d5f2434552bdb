"""The command line: `phalanx` with its commands.

Does not import Keras or NumPy, because the launcher's startup time adds to that of each job.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

import rich_click as click

from phalanx.cli.dashboard_commands import dashboard, report
from phalanx.cli.job_commands import scale, status, top
from phalanx.cli.machine_commands import doctor, env
from phalanx.cli.plan import plan
from phalanx.cli.run import run
from phalanx.errors import SIGNAL_BASE, ConfigurationError, PhalanxError
from phalanx.monitoring.console import write_whole
from phalanx.version import __version__

_STYLE = {
    "theme": "default-slim",
    "text_paragraph_linebreaks": "\n\n",
    "max_width": 110,
    "style_errors_panel_box": "HORIZONTALS_TOP",  # no borders beside the text, so that it can be searched
}


class _Commands(click.RichGroup):
    def invoke(self, ctx: click.Context) -> Any:
        # Handle signals until a job does: processes started before it (ssh) must be ended.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # signals that nohup ignores stay ignored
                signal.signal(number, _exit)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before a job, or between two runs of it
            write_whole(sys.stderr, "phalanx: interrupted\n")
            sys.exit(SIGNAL_BASE + signal.SIGINT)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(SIGNAL_BASE + number)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="phalanx")
@click.rich_config(_STYLE)
def cli() -> None:
    """Distributed training for Keras 3 on any backend."""


for command in (run, plan, status, top, dashboard, report, scale, doctor, env):
    # Click caches a command's help option on first use, whether within its group or not.
    command.context_settings.update(cli.context_settings)
    cli.add_command(command)


def _open_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that the caller has closed, as daemons do. Otherwise, another
    file would get its number."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `fd`
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8", closefd=False))


def main() -> None:
    """Run the `phalanx` command. Show an error of Phalanx without a traceback, and exit with its exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Output of workers must not fail if the locale of the launcher lacks characters.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        cli(prog_name="phalanx")
    except ConfigurationError as error:
        write_whole(sys.stderr, f"phalanx: {error}\n")
        sys.exit(error.exit_code)
    except PhalanxError as error:
        kind = "" if type(error) is PhalanxError else f"{type(error).__name__}: "
        write_whole(sys.stderr, f"phalanx: {kind}{error}\n")
        sys.exit(error.exit_code)
