"""The figures of all jobs in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from phalanx.monitoring.job_view import RUNNING, JobView, MemberView

_JOB_GAUGES = {
    "steps_per_second": "Training steps per second.",
    "samples_per_second": "Samples per second, over all workers.",
    "sent_bytes_per_second": "Bytes sent in collectives per second, over all workers.",
    "workers": "Workers that train together.",
    "generation": "Generation of an elastic job.",
    "epoch": "Index of the running epoch.",
    "running": "1 while the job runs.",
}
_MEMBER_GAUGES = {
    "up": "1 while a process of this task runs.",
    "step_compute_seconds": "Seconds per step outside of collectives.",
    "step_wait_seconds": "Seconds per step that the task waited for others.",
    "memory_bytes": "Main memory of the process.",
    "straggler": "1 while the others wait for this task.",
    "gpu_utilization": "Fraction of the time that the task's GPU computes.",
    "gpu_memory_bytes": "Occupied memory of the task's GPU.",
    "server_version": "Version of a parameter server's values.",
    "server_updates_per_second": "Updates of a parameter server per second.",
}
_JOB_COUNTERS = {
    "steps": "Training steps.",
    "samples": "Samples, over all workers.",
    "sent_bytes": "Bytes sent in collectives, over all workers.",
    "restarts": "How often the launcher has started the whole job again.",
}
_MEMBER_COUNTERS = {
    "computed_seconds": "Seconds outside of collectives.",
    "waited_seconds": "Seconds that the task waited for others.",
    "starts": "Processes that were started for this task.",
}


class _Views:
    """A collector of values that are known already."""

    def __init__(self, views: Sequence[JobView]):
        self._views = views

    def collect(self) -> Iterable[Metric]:
        yield from _families(GaugeMetricFamily, _JOB_GAUGES, ["job"], self._views, _job_gauges)
        yield from _families(CounterMetricFamily, _JOB_COUNTERS, ["job"], self._views, _job_counters)
        members = [(view, member) for view in self._views for member in view.members.values()]
        labels = ["job", "task", "host"]
        yield from _families(GaugeMetricFamily, _MEMBER_GAUGES, labels, members, _member_gauges)
        yield from _families(CounterMetricFamily, _MEMBER_COUNTERS, labels, members, _member_counters)
        logs = GaugeMetricFamily("phalanx_metric", "Loss and metrics of the training.", labels=["job", "name"])
        for view in self._views:
            for name, value in view.logs.items():
                logs.add_metric([_job(view), name], float("nan") if value is None else value)
        yield logs


def expose(views: Sequence[JobView]) -> tuple[bytes, str]:
    """The answer to Prometheus, and its media type."""
    registry = CollectorRegistry()
    registry.register(_Views(views))  # type: ignore[arg-type]
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _families(kind, names, labels, subjects, values) -> Iterable[Metric]:  # type: ignore[no-untyped-def]
    """One metric for each name. `values` gives the labels of a subject and its numbers by name, None for unknown."""
    families = {name: kind(f"phalanx_{name}", text, labels=labels) for name, text in names.items()}
    for subject in subjects:
        label_values, numbers = values(subject)
        for name, number in numbers.items():
            if number is not None:
                families[name].add_metric(label_values, number)
    return families.values()


def _job(view: JobView) -> str:
    return "" if view.started is None else view.started.job


def _job_gauges(view: JobView) -> tuple[list[str], dict[str, float | None]]:
    return [_job(view)], {
        "steps_per_second": view.steps_per_s,
        "samples_per_second": view.samples_per_s,
        "sent_bytes_per_second": view.bytes_per_s,
        "workers": sum(member.is_member for member in view.workers),
        "generation": view.generation,
        "epoch": view.epoch,
        "running": view.status == RUNNING,
    }


def _job_counters(view: JobView) -> tuple[list[str], dict[str, float | None]]:
    return [_job(view)], {
        "steps": view.steps,
        "samples": view.samples,
        "sent_bytes": view.bytes_sent,
        "restarts": view.restarts,
    }


def _labels(subject: tuple[JobView, MemberView]) -> list[str]:
    view, member = subject
    return [_job(view), member.task, member.host]


def _member_gauges(subject: tuple[JobView, MemberView]) -> tuple[list[str], dict[str, float | None]]:
    member = subject[1]
    runs, gpu, server = member.is_running, member.gpu, member.server
    return _labels(subject), {
        "up": runs,
        "step_compute_seconds": member.compute_s if runs else None,
        "step_wait_seconds": member.wait_s if runs else None,
        "memory_bytes": member.memory if runs and member.memory else None,
        "straggler": member.is_slow,
        "gpu_utilization": None if gpu is None else gpu.utilization,
        "gpu_memory_bytes": None if gpu is None else gpu.memory,
        "server_version": None if server is None else server.version,
        "server_updates_per_second": None if server is None else member.updates_per_s,
    }


def _member_counters(subject: tuple[JobView, MemberView]) -> tuple[list[str], dict[str, float | None]]:
    member = subject[1]
    return _labels(subject), {
        "computed_seconds": member.computed_s,
        "waited_seconds": member.waited_s,
        "starts": member.starts,
    }
