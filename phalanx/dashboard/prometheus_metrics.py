"""The figures of all jobs in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from phalanx.monitoring.job_endings import RUNNING
from phalanx.monitoring.job_view import JobView


class _Figure(NamedTuple):
    """A metric of each job, or of each of its members."""

    name: str
    text: str
    read: Callable[[Any], float | None]
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily


_COUNTER = CounterMetricFamily
_OF_JOBS = (
    _Figure("steps_per_second", "Training steps per second.", lambda job: job.steps_per_s),
    _Figure("samples_per_second", "Samples per second, over all workers.", lambda job: job.samples_per_s),
    _Figure(
        "sent_bytes_per_second", "Bytes sent in collectives per second, over all workers.", lambda job: job.bytes_per_s
    ),
    _Figure("workers", "Workers that train together.", lambda job: sum(each.is_member for each in job.workers)),
    _Figure("generation", "Generation of an elastic job.", lambda job: job.generation),
    _Figure("epoch", "Index of the running epoch, from 0.", lambda job: job.epoch),
    _Figure("running", "1 while the job runs.", lambda job: job.status == RUNNING),
    _Figure("steps", "Training steps.", lambda job: job.steps, _COUNTER),
    _Figure("samples", "Samples, over all workers.", lambda job: job.samples, _COUNTER),
    _Figure("sent_bytes", "Bytes sent in collectives, over all workers.", lambda job: job.bytes_sent, _COUNTER),
    _Figure("restarts", "How often the launcher has started the whole job again.", lambda job: job.restarts, _COUNTER),
)
_OF_MEMBERS = (
    _Figure("up", "1 while a process of this task runs.", lambda member: member.is_running),
    _Figure(
        "step_compute_seconds", "Seconds per step outside of collectives.", lambda member: _now(member, "compute_s")
    ),
    _Figure(
        "step_wait_seconds", "Seconds per step that the task waited for others.", lambda member: _now(member, "wait_s")
    ),
    _Figure("memory_bytes", "Main memory of the process.", lambda member: _now(member, "memory") or None),
    _Figure("straggler", "1 while the others wait for this task.", lambda member: member.is_slow),
    _Figure(
        "gpu_utilization",
        "Fraction of the time that the task's GPU computes.",
        lambda member: _part(member.gpu, "utilization"),
    ),
    _Figure("gpu_memory_bytes", "Occupied memory of the task's GPU.", lambda member: _part(member.gpu, "memory")),
    _Figure(
        "server_version", "Version of a parameter server's values.", lambda member: _part(member.server, "version")
    ),
    _Figure(
        "server_updates_per_second",
        "Updates of a parameter server per second.",
        lambda member: None if member.server is None else member.updates_per_s,
    ),
    _Figure("computed_seconds", "Seconds outside of collectives.", lambda member: member.computed_s, _COUNTER),
    _Figure("waited_seconds", "Seconds that the task waited for others.", lambda member: member.waited_s, _COUNTER),
    _Figure("starts", "Processes that were started for this task.", lambda member: member.starts, _COUNTER),
)


class _Views:
    """Implements `prometheus_client.registry.Collector`."""

    def __init__(self, views: Sequence[JobView]):
        self._views = views

    def collect(self) -> Iterable[Metric]:
        jobs = [([_job(view)], view) for view in self._views]
        yield from _families(_OF_JOBS, ["job"], jobs)
        members = [
            ([_job(view), member.task, member.host], member) for view in self._views for member in view.members.values()
        ]
        yield from _families(_OF_MEMBERS, ["job", "task", "host"], members)
        logs = GaugeMetricFamily("phalanx_metric", "Loss and metrics of the training.", labels=["job", "name"])
        for view in self._views:
            for name, value in view.logs.items():
                logs.add_metric([_job(view), name], float("nan") if value is None else value)
        yield logs


def expose(views: Sequence[JobView]) -> tuple[bytes, str]:
    """Return the content of `/metrics` and its content type."""
    registry = CollectorRegistry()
    registry.register(_Views(views))  # type: ignore[arg-type]
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _families(
    figures: Sequence[_Figure], labels: Sequence[str], subjects: Sequence[tuple[list[str], Any]]
) -> Iterable[Metric]:
    """One metric family per figure. Jobs or members without a current value are left out."""
    for name, text, read, kind in figures:
        family = kind(f"phalanx_{name}", text, labels=labels)
        for values_of_labels, subject in subjects:
            if (number := read(subject)) is not None:
                family.add_metric(values_of_labels, number)
        yield family


def _job(view: JobView) -> str:
    return "" if view.started is None else view.started.job


def _now(member: Any, name: str) -> Any:
    """A figure that only running processes have."""
    return getattr(member, name) if member.is_running else None


def _part(part: Any, name: str) -> Any:
    """A figure of a part that some tasks lack."""
    return None if part is None else getattr(part, name)
