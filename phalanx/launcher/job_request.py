"""What a job runs, where, and how: the value that `phalanx run` makes of its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.config.launch_config import LaunchConfig
from phalanx.launcher.elastic_hosts.host_pool import ElasticOptions
from phalanx.launcher.host_slots import HostShare


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """How a job is shown in a browser; `control`: whether the buttons there act."""

    control: bool = False


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to run.

    Attributes:
        arguments: the program's command line, as after `python`.
        tasks: names of all tasks, in rank order; see `task_names`.
        shares: the hosts, with as many slots as there are tasks; in an elastic job, with all their slots.
        config: see `LaunchConfig`.
        elastic: None for a job of fixed size, which ends when it loses a worker.
        spans_workers: whether one program spans the devices of all workers. Such a job has a fixed size from start to
            start: where it is elastic and loses a worker, all of it starts again, with the slots that are left.
        size_reason: why it has so many workers; empty if the user has chosen the number.
        dashboard: None to show the job nowhere but here.
    """

    arguments: Sequence[str]
    tasks: Sequence[str]
    shares: Sequence[HostShare]
    config: LaunchConfig
    elastic: ElasticOptions | None = None
    spans_workers: bool = False
    size_reason: str = ""
    dashboard: DashboardOptions | None = None
