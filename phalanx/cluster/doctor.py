"""`phalanx doctor`: what this task knows of its cluster, and whether the others can be reached.

Run it in place of the program, as each task, with the same environment. Each run looks at its own pairs; those
that run at the same time answer each other. A task that trains at the moment answers as well, without the
measurement, which would disturb it.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cluster.compatibility import JobFacts, TaskDescription, describe_disagreement
from phalanx.cluster.link_benchmark import EXAMINE, LinkBenchmarkAnswer, LinkBenchmarkService, LinkMeasurement, measure
from phalanx.cluster.peer_dialing import identify_task
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.cluster.resolvers import ClusterResolver
from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.cluster.software_versions import SoftwareVersions, installed_software
from phalanx.cluster.spec import EVALUATOR, ClusterSpec, Task
from phalanx.config.job_config import JobConfig
from phalanx.config.variables import SECRET
from phalanx.errors import ConfigurationError, HandshakeError, PhalanxError, RendezvousError
from phalanx.transport.address import Address
from phalanx.transport.dial import RefusedError, retry_delay_s
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import PortTakenError

DEFAULT_WAIT_S = 10.0
"""How long to try to reach each task: enough to start the command in a few terminals one after the other."""
ATTEMPT_TIMEOUT_S = 5.0
CLOCK_OFFSET_WORTH_A_WORD_S = 1.0
"""Training does not depend on clocks, but logs of hosts that are further apart cannot be read side by side."""


@dataclass
class TaskDiagnosis:
    """What was found out about one task.

    Attributes:
        addresses: the IP addresses of its host name.
        state: one line for people: `this task`, `answers`, `trains (pid ...)`, or why it cannot be reached.
        line: the line from here to it, if it could be measured.
    """

    task: Task
    address: str
    addresses: tuple[str, ...] = ()
    state: str = ""
    software: SoftwareVersions | None = None
    line: LinkMeasurement | None = None


@dataclass
class DoctorReport:
    """What the doctor found. Healthy if there are no `problems`; `remarks` are worth a word."""

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
    remarks: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.problems


def run(
    resolver: ClusterResolver | None = None, *, config: JobConfig | None = None, wait_s: float = DEFAULT_WAIT_S
) -> int:
    """Examine, print, and return the exit code: 0 if all is well."""
    console = Console()
    with console.status("asking the other tasks"):
        report = examine(resolver, config=config, wait_s=wait_s)
    show(report, console)
    return 0 if report.healthy else RendezvousError.exit_code


def examine(
    resolver: ClusterResolver | None = None, *, config: JobConfig | None = None, wait_s: float = DEFAULT_WAIT_S
) -> DoctorReport:
    """Find out what can be known about the cluster from here.

    Args:
        resolver: where the cluster comes from; what `resolve` picks, if not given.
        wait_s: how long to try to reach tasks that do not answer.

    Raises: ConfigurationError if the cluster or the environment is described wrongly.
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
        report.remarks.append(
            "There is no cluster in the environment (no TF_CONFIG, Slurm, MPI or Kubernetes): a program started "
            "like this trains alone."
        )
        return report
    spec.check_member(task)
    facts = JobFacts(keras=report.software.keras, backend=report.software.backend, seed=config.seed)
    me = TaskIdentity(spec, task, facts, config)
    report.host = me.description.host
    report.rank = me.rank if me.rank >= 0 else None
    report.world_size = len(me.tasks)
    _check_addresses(report, config)
    _meet_the_others(report, me, wait_s)
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
            f"tasks have others. Write the name or IP address of its host."
        )
    if not loopback and not config.secret:
        report.remarks.append(f"{SECRET} is not set: whoever reaches a port of the job can join or disturb it.")


def _resolve(address: Address) -> tuple[str, ...] | str:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
        return str(getattr(error, "strerror", None) or error)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _meet_the_others(report: DoctorReport, me: TaskIdentity, wait_s: float) -> None:
    service = LinkBenchmarkService(LinkBenchmarkAnswer(me.description, report.software), len(report.tasks))
    listener = _listen(report, me, service)
    try:
        # An evaluator listens nowhere.
        others = [entry for entry in report.tasks if entry.task not in (me.task,) and entry.task.type != EVALUATOR]
        deadline = time.monotonic() + wait_s
        with ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="phalanx-reach") as pool:
            links = list(pool.map(lambda entry: _reach(report, me, entry, deadline), others))
        # One after the other, so that the lines do not share this end's bandwidth.
        for entry, link in zip(others, links, strict=True):
            if link is not None:
                try:
                    entry.line = measure(link)
                except PhalanxError as error:
                    report.problems.append(f"{entry.task} answered, and was lost while measuring: {error}")
                finally:
                    link.close()
        measuring = {str(entry.task) for entry, link in zip(others, links, strict=True) if link is not None}
        measuring |= {str(entry.task) for entry in report.tasks if entry.task.type == EVALUATOR}  # whom nobody dials
        if listener is not None:
            service.wait_for(measuring, max(1.0, deadline - time.monotonic()))
    finally:
        if listener is not None:
            listener.close()


def _listen(report: DoctorReport, me: TaskIdentity, service: LinkBenchmarkService) -> Listener | None:
    """Open this task's port and answer on it; None, with the reason in the report, if that cannot be."""
    own = next((entry for entry in report.tasks if entry.task == me.task), None)
    if own is None or me.task.type == EVALUATOR:
        return None
    own.state, own.software = "this task; its port can be opened", report.software
    try:
        listener = me.open_listener()
    except PortTakenError as error:
        owner = identify_task(me, me.task)
        if isinstance(owner, TaskDescription) and owner.task == str(me.task):
            own.state = f"this task; it runs already (pid {owner.pid} on {owner.host})"
        else:
            own.state = "this task; its port is taken"
            report.problems.append(f"{me.task}: {error} Who answers there: {_name(owner)}.")
        return None
    except ConfigurationError as error:
        own.state = "this task; its port cannot be opened"
        report.problems.append(f"{me.task}: {error}")
        return None
    listener.register(EXAMINE, service)
    listener.start()
    return listener


def _reach(report: DoctorReport, me: TaskIdentity, entry: TaskDiagnosis, deadline: float) -> Link | None:
    """Try until it answers or the time is up. A link if the line can be measured."""
    started_at = time.monotonic()
    telling = ""  # what somebody there has answered: that it does not answer any more says less
    while True:
        now = time.monotonic()
        try:
            link, welcome = me.dial(entry.task, EXAMINE, deadline=now + ATTEMPT_TIMEOUT_S)
            answer = msgspec.msgpack.decode(welcome.details, type=LinkBenchmarkAnswer)
        except RefusedError as error:
            found = identify_task(me, entry.task)
            if isinstance(found, TaskDescription):
                entry.state = f"trains (pid {found.pid} on {found.host})"
                _check_description(report, me, entry, found)
                return None
            failure = telling = str(error)
        except HandshakeError as error:
            failure = telling = str(error)
        except (PhalanxError, msgspec.MsgspecError) as error:
            failure = telling or str(error)
        else:
            entry.state = f"answers (pid {answer.description.pid} on {answer.description.host})"
            entry.software = answer.software
            _check_description(report, me, entry, answer.description)
            return link
        if now + retry_delay_s(now - started_at) >= deadline:
            entry.state = "cannot be reached"
            report.problems.append(f"{entry.task} at {entry.address} cannot be reached: {failure}")
            return None
        time.sleep(retry_delay_s(now - started_at))


def _check_description(
    report: DoctorReport, me: TaskIdentity, entry: TaskDiagnosis, description: TaskDescription
) -> None:
    if description.task != str(entry.task):
        report.problems.append(
            f"at the address of {entry.task}, {entry.address}, {description.whereabouts} answers: the tasks have "
            f"different clusters, or two hosts have exchanged their addresses."
        )
    # A program sets more than the doctor can know of: its seed, and what else it compares.
    mine = me.description.facts
    comparable = msgspec.structs.replace(
        description.facts, seed=mine.seed, others=mine.others, backend_policy=mine.backend_policy
    )
    if disagreement := describe_disagreement(me.description, msgspec.structs.replace(description, facts=comparable)):
        report.problems.append(disagreement)


def _compare(report: DoctorReport) -> None:
    for entry in report.tasks:
        if entry.line and abs(entry.line.clock_offset_s) > CLOCK_OFFSET_WORTH_A_WORD_S:
            report.remarks.append(
                f"The clock of {entry.task} is {entry.line.clock_offset_s:+.1f} s off ours; set both by NTP, or their "
                f"logs cannot be compared."
            )
        if entry.software and entry.software.python != report.software.python:
            report.remarks.append(
                f"{entry.task} runs Python {entry.software.python}, this task {report.software.python}."
            )


def _name(owner: TaskDescription | str) -> str:
    return owner.whereabouts if isinstance(owner, TaskDescription) else owner


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
    for remark in report.remarks:
        console.print(f"[yellow]note[/]  {escape(remark)}", highlight=False)
    for problem in report.problems:
        console.print(f"[red]problem[/]  {escape(problem)}", highlight=False)
    if report.healthy:
        console.print("[green]No problem found.[/]")


WIDE = 130
"""Columns of a terminal on which a table of all tasks can be read."""


def _tables(report: DoctorReport, columns: int) -> list[Table]:
    """One of all tasks; or, on a narrow terminal, one for each."""
    rows = [_row(entry) for entry in report.tasks]
    if columns >= WIDE:
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
    line = entry.line
    return {
        "task": str(entry.task),
        "address": escape(entry.address),
        "resolves to": "\n".join(entry.addresses) or "-",
        "state": escape(entry.state) or "not asked (listens nowhere)",
        "round trip": f"{line.round_trip_s * 1e3:.2f} ms" if line else "-",
        "clock": f"{line.clock_offset_s * 1e3:+.1f} ms" if line else "-",
        "bandwidth": f"{line.bytes_per_s / 1e6:.3g} MB/s" if line else "-",
        "software": str(entry.software or "-"),
    }
