"""`phalanx status` and `phalanx scale`: elastic jobs that run on this host."""

from __future__ import annotations

import sys

import click


@click.command(short_help="Show the elastic jobs that run here.")
@click.option("--job", help="Only this job.")
def status(job: str | None) -> None:
    """Show the elastic jobs (--workers MIN:MAX) that run here: members, generation, step, speed."""
    from phalanx.launcher import status_report

    sys.exit(status_report.status(job))


@click.command(short_help="Change the number of workers of an elastic job.")
@click.option("--job", help="Which job, as `phalanx status` names it; needed if several run.")
@click.option("-n", "--workers", type=click.IntRange(min=1), required=True, help="The new number of workers.")
def scale(job: str | None, workers: int) -> None:
    """Change the number of workers of an elastic job, between its MIN and MAX."""
    from phalanx.launcher import status_report

    sys.exit(status_report.scale(job, workers))
