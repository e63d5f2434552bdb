"""`phalanx dashboard` and `phalanx report`: jobs in a browser."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import rich_click as click


@click.command(short_help="Show running jobs in a browser.")
@click.option("--job", metavar="JOB", help="Only this job, as `phalanx status` names it.")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", help="Port on loopback; by default 8787, or a free one."
)
@click.option("--control", is_flag=True, help="Buttons to scale, drain a host, take a checkpoint, and stop.")
@click.option("--listen-fd", type=int, hidden=True)  # the listening socket, opened by the launcher of the job to show
def dashboard(job: str | None, port: int | None, control: bool, listen_fd: int | None) -> None:
    """Show running jobs in a browser: loss, speed, members, events.

    The page is served on loopback. To see it from another machine, use an ssh tunnel:
    ssh -L 8787:localhost:8787 HOST
    """
    from phalanx.launcher.dashboard_process import DashboardLink, check_packages, open_link
    from phalanx.launcher.watching.status_report import choose_job

    check_packages()
    from phalanx.config.environment import process_environment
    from phalanx.config.environment_variables import DASHBOARD_TOKEN
    from phalanx.dashboard.dashboard_server import serve, wait_for_launcher

    if listen_fd is not None:
        link = DashboardLink(socket.socket(fileno=listen_fd), process_environment()[DASHBOARD_TOKEN])
        serve(link.listener, link.token, job=job, control=control, until=wait_for_launcher)
        return
    if job is not None:
        choose_job(job)
    link = open_link(port)
    click.echo(f"Dashboard: {link}   (Ctrl-C ends it; jobs continue)")
    serve(link.listener, link.token, job=job, control=control)


@click.command(short_help="Create an HTML report of a job that ran with --log-dir.")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: DIR/report.html.")
def report(directory: Path, output: Path | None) -> None:
    """Create an HTML report of a job that ran with --log-dir DIR: curves, timeline, why it failed."""
    from phalanx.dashboard.report import write
    from phalanx.monitoring.console import write_whole

    path = write(directory, output)
    write_whole(sys.stdout, f"{path}\n")
