"""`phalanx doctor`: shows how this task sees its cluster and whether it can reach the other tasks.

Run it as each task, instead of the program and with the same environment. Each doctor examines the links of its task;
doctors that run at the same time answer each other. A task that is training also answers, but is not measured, because
that would disturb it.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cluster.link_benchmark import DOCTOR, LinkBenchmarkAnswer, LinkBenchmarkService, LinkMeasurement, measure
from phalanx.cluster.peer_identification import identify_task
from phalanx.cluster.resolvers import ClusterResolver
from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.cluster.software_versions import SoftwareVersions, installed_software
from phalanx.cluster.spec import EVALUATOR, ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts, TaskDescription, describe_disagreement
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.environment_variables import SECRET
from phalanx.config.job_config import JobConfig
from phalanx.errors import ConfigurationError, HandshakeError, PhalanxError, RendezvousError
from phalanx.transport import name_resolution
from phalanx.transport.address import Address
from phalanx.transport.decoding import decode_message
from phalanx.transport.dial import ATTEMPT_TIMEOUT_S, RefusedError, retry_delay_s
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import PortTakenError

DEFAULT_WAIT_S = 10.0
"""Time to keep trying to reach each task: enough to start the command in several terminals."""
CLOCK_OFFSET_NOTE_S = 1.0
"""Offset above which a note is shown. Training does not depend on clocks, but logs become hard to compare."""


@dataclass
class TaskDiagnosis:
    """The findings about one task.

    Attributes:
        task: The task.
        address: Its address in the cluster.
        addresses: The IP addresses of its host name.
        state: One line for the user: `this task`, `answers`, `is training (pid ...)`, or why it cannot be reached.
        software: Its versions, if it answered.
        link: Properties of the link to it, if it could be measured.
    """

    task: Task
    address: str
    addresses: tuple[str, ...] = ()
    state: str = ""
    software: SoftwareVersions | None = None
    link: LinkMeasurement | None = None


@dataclass
class DoctorReport:
    """The findings of a doctor. The cluster is healthy if there are no `problems`; `notes` are hints."""

    resolver: str
    cluster_spec: ClusterSpec
    task: Task | None
    software: SoftwareVersions
    host: str = ""
    rank: int | None = None
    world_size: int = 1
    secret: bool = False
    tls: bool = False
    tasks: list[TaskDiagnosis] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        return not self.problems


def run(
    resolver: ClusterResolver | None = None, *, config: JobConfig | None = None, wait_s: float = DEFAULT_WAIT_S
) -> int:
    """Examine the cluster, print the report, and return the exit code: 0 if there is no problem."""
    console = Console()
    with console.status("contacting the other tasks"):
        report = examine(resolver, config=config, wait_s=wait_s)
    show(report, console)
    return 0 if report.is_healthy else RendezvousError.exit_code


def examine(
    resolver: ClusterResolver | None = None, *, config: JobConfig | None = None, wait_s: float = DEFAULT_WAIT_S
) -> DoctorReport:
    """Examine the cluster from this task.

    Args:
        resolver: The source of the cluster; the result of `resolve` if not given.
        config: The configuration; read from the environment if not given.
        wait_s: Seconds to try to reach tasks that do not answer.

    Raises: ConfigurationError if the description of the cluster or the environment is invalid.
    """
    config = config or JobConfig.from_environment()
    resolver = resolver or resolve()
    spec, task = resolver.cluster_spec(), resolver.task()
    report = DoctorReport(
        resolver=type(resolver).__name__,
        cluster_spec=spec,
        task=task,
        software=installed_software(),
        secret=config.secret is not None,
        tls=config.tls is not None,
    )
    if not spec or task is None:
        report.notes.append(
            "There is no cluster in the environment (no TF_CONFIG, Slurm, MPI or Kubernetes): a program started "
            "like this trains alone."
        )
        return report
    spec.check_member(task)
    facts = JobFacts(keras=report.software.keras, backend=report.software.backend, seed=config.seed)
    identity = TaskIdentity(spec, task, facts, config)
    report.host = identity.description.host
    report.rank = identity.rank if identity.rank >= 0 else None
    report.world_size = len(identity.tasks)
    _check_addresses(report, config)
    _contact_others(report, identity, wait_s)
    _compare(report)
    return report


def _check_addresses(report: DoctorReport, config: JobConfig) -> None:
    spec = report.cluster_spec
    report.tasks = [TaskDiagnosis(task, str(spec.address(task))) for task in spec.tasks]
    with ThreadPoolExecutor(thread_name_prefix="phalanx-resolve") as pool:
        for entry, found in zip(report.tasks, pool.map(_resolve, (spec.address(t) for t in spec.tasks)), strict=True):
            if isinstance(found, str):
                report.problems.append(
                    f"{entry.task}: its host name in {entry.address} cannot be resolved here: {found}"
                )
            else:
                entry.addresses = found
    loopback = [task for task in spec.tasks if spec.address(task).is_loopback]
    if 0 < len(loopback) < len(spec.tasks):
        report.problems.append(
            f"{', '.join(map(str, loopback))} has a loopback address, which only its own host can reach, while other "
            f"tasks are elsewhere. Write the name or IP address of its host."
        )
    if not loopback and not config.secret:
        report.notes.append(f"{SECRET} is not set: anyone who can reach a port of the job can join or disturb it.")


def _resolve(address: Address) -> tuple[str, ...] | str:
    try:
        found = name_resolution.resolve(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
        return str(getattr(error, "strerror", None) or error)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _contact_others(report: DoctorReport, identity: TaskIdentity, wait_s: float) -> None:
    service = LinkBenchmarkService(LinkBenchmarkAnswer(identity.description, report.software), len(report.tasks))
    listener = _listen(report, identity, service)
    try:
        # Evaluators have no port.
        others = [
            entry for entry in report.tasks if entry.task not in (identity.task,) and entry.task.type != EVALUATOR
        ]
        deadline = time.monotonic() + wait_s
        with ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="phalanx-reach") as pool:
            links = list(pool.map(lambda entry: _reach(report, identity, entry, deadline), others))
        # Sequentially, so that the links do not share this end's bandwidth.
        for entry, link in zip(others, links, strict=True):
            if link is not None:
                try:
                    entry.link = measure(link)
                except PhalanxError as error:
                    report.problems.append(f"{entry.task} answered, but was lost during the measurement: {error}")
                finally:
                    link.close()
        measuring = {str(entry.task) for entry, link in zip(others, links, strict=True) if link is not None}
        measuring |= {str(entry.task) for entry in report.tasks if entry.task.type == EVALUATOR}  # no task dials them
        if listener is not None:
            service.wait_for(measuring, max(1.0, deadline - time.monotonic()))
    finally:
        if listener is not None:
            listener.close()


def _listen(report: DoctorReport, identity: TaskIdentity, service: LinkBenchmarkService) -> Listener | None:
    """Open this task's port and answer on it; if that fails, return None and add the reason to the report."""
    own = next((entry for entry in report.tasks if entry.task == identity.task), None)
    if own is None or identity.task.type == EVALUATOR:
        return None
    own.state, own.software = "this task; its port can be opened", report.software
    try:
        listener = identity.open_listener()
    except PortTakenError as error:
        owner = identify_task(identity, identity.task)
        if isinstance(owner, TaskDescription) and owner.task == str(identity.task):
            own.state = f"this task; it is running already (pid {owner.pid} on {owner.host})"
        else:
            own.state = "this task; its port is taken"
            report.problems.append(f"{identity.task}: {error} At that port: {_describe_owner(owner)}.")
        return None
    except ConfigurationError as error:
        own.state = "this task; its port cannot be opened"
        report.problems.append(f"{identity.task}: {error}")
        return None
    listener.register(DOCTOR, service)
    listener.start()
    return listener


def _reach(report: DoctorReport, identity: TaskIdentity, entry: TaskDiagnosis, deadline: float) -> Link | None:
    """Try until the task answers or the deadline passes; return a link if it can be measured."""
    started_at = time.monotonic()
    last_answer = ""  # more informative than a later lack of answers
    while True:
        now = time.monotonic()
        try:
            link, welcome = identity.dial(entry.task, DOCTOR, deadline=now + ATTEMPT_TIMEOUT_S)
            answer = decode_message(welcome.details, LinkBenchmarkAnswer)
        except RefusedError as error:
            found = identify_task(identity, entry.task)
            if isinstance(found, TaskDescription):
                entry.state = f"is training (pid {found.pid} on {found.host})"
                _check_description(report, identity, entry, found)
                return None
            failure = last_answer = str(error)
        except HandshakeError as error:
            failure = last_answer = str(error)
        except PhalanxError as error:
            failure = last_answer or str(error)
        else:
            entry.state = f"answers (pid {answer.description.pid} on {answer.description.host})"
            entry.software = answer.software
            _check_description(report, identity, entry, answer.description)
            return link
        if now + retry_delay_s(now - started_at) >= deadline:
            entry.state = "cannot be reached"
            report.problems.append(f"{entry.task} at {entry.address} cannot be reached: {failure}")
            return None
        time.sleep(retry_delay_s(now - started_at))


def _check_description(
    report: DoctorReport, identity: TaskIdentity, entry: TaskDiagnosis, description: TaskDescription
) -> None:
    if description.task != str(entry.task):
        report.problems.append(
            f"at the address of {entry.task}, {entry.address}, {description.location} answers: the tasks have "
            f"different clusters, or two hosts have swapped addresses."
        )
    # The doctor cannot compare the seed and other values that only the program sets.
    mine = identity.description.facts
    comparable = msgspec.structs.replace(
        description.facts, seed=mine.seed, extra=mine.extra, backend_policy=mine.backend_policy
    )
    if disagreement := describe_disagreement(
        identity.description, msgspec.structs.replace(description, facts=comparable)
    ):
        report.problems.append(disagreement)


def _compare(report: DoctorReport) -> None:
    for entry in report.tasks:
        if entry.link and abs(entry.link.clock_offset_s) > CLOCK_OFFSET_NOTE_S:
            report.notes.append(
                f"The clock of {entry.task} differs from this one's by {entry.link.clock_offset_s:+.1f} s. "
                f"Synchronise both with NTP, or their logs cannot be compared."
            )
        if entry.software and entry.software.python != report.software.python:
            report.notes.append(
                f"{entry.task} runs Python {entry.software.python}, this task {report.software.python}."
            )


def _describe_owner(owner: TaskDescription | PhalanxError) -> str:
    return owner.location if isinstance(owner, TaskDescription) else str(owner)


def show(report: DoctorReport, console: Console) -> None:
    """Print a report."""
    console.print(f"[bold]Cluster[/] found by {report.resolver}: {len(report.cluster_spec.tasks)} task(s)")
    if report.task is not None:
        rank = f"rank {report.rank} of {report.world_size}" if report.rank is not None else "without a rank"
        console.print(f"[bold]This task[/] is {report.task}, {rank}, on host {report.host}")
    console.print(f"[bold]Software[/] {report.software}")
    console.print(
        f"[bold]Security[/] secret {'set' if report.secret else 'not set'}, TLS {'on' if report.tls else 'off'}"
    )
    if report.tasks:
        for table in _tables(report, console.width):
            console.print(table)
    for note in report.notes:
        console.print(f"[yellow]note[/]  {escape(note)}", highlight=False)
    for problem in report.problems:
        console.print(f"[red]problem[/]  {escape(problem)}", highlight=False)
    if report.is_healthy:
        console.print("[green]No problem found.[/]")


MIN_WIDE_COLUMNS = 130
"""Minimum number of terminal columns for a table of all tasks."""


def _tables(report: DoctorReport, columns: int) -> list[Table]:
    """Return one table of all tasks, or on a narrow terminal, one table for each task."""
    rows = [_row(entry) for entry in report.tasks]
    if columns >= MIN_WIDE_COLUMNS:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*row.values())
        return [table]
    tables = []
    for row in rows:
        tables.append(Table.grid(padding=(0, 2)))
        for name, value in row.items():
            tables[-1].add_row(f"[bold]{value}[/]" if name == "task" else f"  {name}", "" if name == "task" else value)
    return tables


def _row(entry: TaskDiagnosis) -> dict[str, str]:
    link = entry.link
    return {
        "task": str(entry.task),
        "address": escape(entry.address),
        "resolves to": "\n".join(entry.addresses) or "-",
        "state": escape(entry.state) or "not contacted (has no port)",
        "round trip": f"{link.round_trip_s * 1e3:.2f} ms" if link else "-",
        "clock": f"{link.clock_offset_s * 1e3:+.1f} ms" if link else "-",
        "bandwidth": f"{link.bytes_per_s / 1e6:.3g} MB/s" if link else "-",
        "software": str(entry.software or "-"),
    }
