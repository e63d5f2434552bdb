"""The description of a job to run, which `phalanx run` builds from its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.config.launch_config import LaunchConfig
from phalanx.launcher.elastic_hosts.host_pool import ElasticOptions
from phalanx.launcher.host_slots import HostSpec


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """Options of a job's dashboard. `control`: whether its buttons are enabled."""

    control: bool = False


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to run.

    Attributes:
        arguments: The program's command line, as after `python`.
        tasks: Names of all tasks, in rank order; see `task_names`.
        host_specs: The hosts, with as many slots as there are tasks; in an elastic job, with all their slots.
        config: See `LaunchConfig`.
        elastic: Options of an elastic job; None for a job of fixed size, which ends when it loses a worker.
        is_single_program: Whether one program spans the devices of all workers. The size of such a job changes only at
            restarts: if it is elastic and loses a worker, all of it restarts with the remaining slots.
        size_reason: Reason for its number of workers; empty if the user chose it.
        dashboard: Options of the dashboard; None for no dashboard.
    """

    arguments: Sequence[str]
    tasks: Sequence[str]
    host_specs: Sequence[HostSpec]
    config: LaunchConfig
    elastic: ElasticOptions | None = None
    is_single_program: bool = False
    size_reason: str = ""
    dashboard: DashboardOptions | None = None
