"""`phalanx doctor` and `phalanx env`: the environment that is available for training."""

from __future__ import annotations

import sys

import rich_click as click


@click.command(short_help="Check this machine, other hosts, or the cluster of a task.")
@click.option("-H", "--hosts", metavar="A:2,B:2", help="Check these hosts as well, as `phalanx run` would use them.")
def doctor(hosts: str | None) -> None:
    """Check what a job needs.

    In a task of a cluster (TF_CONFIG, Slurm, MPI, Kubernetes): whether the other tasks can be reached. Run it as each
    task. Otherwise: the backends, GPUs, cores, memory, /dev/shm, ports and limits of this machine.
    """
    from phalanx.cluster.resolvers.auto_resolver import resolve
    from phalanx.launcher import machine_check
    from phalanx.launcher.host_slots import parse_hosts

    if hosts is None and resolve().cluster_spec():
        from phalanx.cluster import doctor as cluster_doctor

        sys.exit(cluster_doctor.run())
    sys.exit(machine_check.run(parse_hosts(hosts) if hosts is not None else ()))


@click.command(short_help="Print versions and the machine, for a bug report.")
def env() -> None:
    """Print what a bug report needs: versions, backend, machine, GPUs, and variables, with secrets hidden."""
    from phalanx.config.environment import process_environment
    from phalanx.launcher import environment_report
    from phalanx.launcher.machine import describe_machine

    environment = process_environment()
    click.echo(environment_report.render(describe_machine(environment), environment), nl=False)
