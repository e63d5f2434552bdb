"""`phalanx status`, `phalanx top` and `phalanx scale`: the jobs of this user that run on this host."""

from __future__ import annotations

import sys

import rich_click as click

_JOB = click.option("--job", metavar="JOB", help="Which job, as `phalanx status` names it; needed if several run.")


@click.command(short_help="Show running jobs.")
@click.option("--job", help="Only this job.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option("--watch", is_flag=True, help="Print again every second, until no job is running.")
def status(job: str | None, as_json: bool, watch: bool) -> None:
    """Show running jobs: members, step, speed, loss, and who waits for whom."""
    from phalanx.launcher.watching import status_report

    sys.exit(status_report.status(job, as_json=as_json, watch=watch))


@click.command()
@_JOB
def top(job: str | None) -> None:
    """Watch a job in this terminal."""
    from phalanx.launcher.watching import top_view

    sys.exit(top_view.show(job))


@click.command(short_help="Change the number of workers of an elastic job.")
@_JOB
@click.option(
    "-n", "--workers", type=click.IntRange(min=1), metavar="N", required=True, help="The new number of workers."
)
def scale(job: str | None, workers: int) -> None:
    """Change the number of workers of an elastic job, between its MIN and MAX."""
    from phalanx.launcher.watching import status_report

    sys.exit(status_report.scale(job, workers))
