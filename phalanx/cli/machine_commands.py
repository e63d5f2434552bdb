"""`phalanx doctor` and `phalanx env`: what there is to train with."""

from __future__ import annotations

import sys

import click


@click.command(short_help="Check this machine, other hosts, or the cluster of a task.")
@click.option("-H", "--hosts", metavar="A:2,B:2", help="Check these hosts as well, as `phalanx run` would use them.")
def doctor(hosts: str | None) -> None:
    """Check what a job needs.

    In a task of a cluster (TF_CONFIG, Slurm, MPI, Kubernetes): whether the other tasks can be reached. Run it as each
    task. Otherwise: the backends, GPUs, cores, memory, /dev/shm, ports and limits of this machine.
    """
    from rich.console import Console
    from rich.markup import escape

    from phalanx.cluster.resolvers.auto_resolver import resolve
    from phalanx.launcher import machine_check
    from phalanx.launcher.host_slots import parse_hosts

    if hosts is None and resolve().cluster_spec():
        from phalanx.cluster import doctor as cluster_doctor

        sys.exit(cluster_doctor.run())
    shares = parse_hosts(hosts) if hosts is not None else []
    code = machine_check.run(shares)
    console = Console()
    for share in shares:
        if share.is_here:  # each of the others has a line from the agent there
            text = escape(f"{share.name}: this machine, checked above; it needs no ssh")
            console.print(f"[green]{'ok':<8}[/] {text}", highlight=False, soft_wrap=True)
    sys.exit(code)


@click.command(short_help="Print versions and the machine, for a bug report.")
def env() -> None:
    """Print what a bug report needs: versions, backend, machine, GPUs, and variables, with secrets hidden."""
    from phalanx.cli.tensorflow_variables import without_others
    from phalanx.config.environment import process_environment
    from phalanx.launcher import environment_report
    from phalanx.launcher.machine import describe_machine

    environment = without_others(process_environment())
    click.echo(environment_report.render(describe_machine(environment), environment), nl=False)
