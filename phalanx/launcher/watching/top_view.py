"""`phalanx top`: one job, live in a terminal."""

from __future__ import annotations

import time

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from phalanx.launcher.watching.job_follower import JobFollower
from phalanx.launcher.watching.status_report import choose_job, show_number
from phalanx.monitoring.job_endings import FAILED, SUCCEEDED, describe_ending
from phalanx.monitoring.job_view import BAD, GOOD, WARNING, JobView, MemberView
from phalanx.monitoring.job_wording import doing, position

REFRESH_S = 0.5
FEED_LINES = 8
BAR_COLUMNS = 20
WIDE_COLUMNS = 70
"""A narrower terminal shows fewer columns for each member."""
_COLORS = {GOOD: "green", WARNING: "yellow", BAD: "red"}
_ENDINGS = {SUCCEEDED: "green", FAILED: "red"}


def show(job: str | None) -> int:
    """Show a job until it ends, or until Ctrl-C, and return the exit code.

    Args:
        job: Id of the job; None for the only one.

    Raises: ConfigurationError as `choose_job`.
    """
    entry = choose_job(job)
    follower = JobFollower(entry.socket_path)
    try:
        with Live(console=RichConsole(), auto_refresh=False) as live:
            while not follower.is_gone:
                follower.update()
                live.update(render(follower.view, time.time(), follower.problem), refresh=True)
                time.sleep(0.0 if follower.is_gone else REFRESH_S)
    except KeyboardInterrupt:
        return 0
    return 0


def render(view: JobView, now: float, problem: str = "") -> RenderableType:
    """Render the whole display.

    Args:
        view: View of the job.
        now: Current time, in seconds since 1970.
        problem: Reason that the view is outdated; empty if it is current.
    """
    # `Text` throughout: in plain strings, rich parses brackets, such as those of a program's arguments, as markup.
    title = Text(_title(view))
    return Group(Panel(_head(view, now, problem), title=title, title_align="left"), _Members(view, now), _feed(view))


def _title(view: JobView) -> str:
    started = view.started
    return "starting" if started is None else f"{started.job}  {started.program}"


def _head(view: JobView, now: float, problem: str) -> Text:
    until = view.ended_at or now
    parts = [
        f"{_duration(until - view.began_at)}" if view.began_at else "",
        position(view),
        f"{view.steps:,} steps",
        f"{view.steps_per_s:.4g} steps/s",
        f"{view.samples_per_s:,.0f} samples/s" if view.samples_per_s else "",
        f"{decimal(int(view.bytes_per_s))}/s sent",
        f"generation {view.generation}" if view.generation else "",
    ]
    text = Text("   ".join(part for part in parts if part))
    for name, value in view.logs.items():
        text.append(f"\n{name:>16} {show_number(value)}", style="bold")
    if view.end is not None:
        text.append(f"\n{describe_ending(view.end)}", style=_ENDINGS.get(view.status, ""))
    if problem:
        text.append(f"\n{problem}", style="red")
    return text


class _Members:
    """A row for each started task, as wide as the terminal currently is."""

    def __init__(self, view: JobView, now: float):
        self._view, self._now = view, now

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        names = ["task", "host", "computes / waits", "per step", "memory", "does"]
        if options.max_width < WIDE_COLUMNS:
            names = ["task", "per step", "does"]
        table = Table(expand=True, box=None, header_style="dim")
        for name in names:
            table.add_column(name, overflow="ellipsis", no_wrap=name != "does")
        for member in self._view.members.values():
            if member.starts:
                style = "dim" if not member.is_running else "yellow" if member.is_slow else ""
                cells = _cells(member, self._now)
                table.add_row(*(cells[name] for name in names), style=style)
        yield table


def _cells(member: MemberView, now: float) -> dict[str, RenderableType]:
    return {
        "task": Text(member.task),
        "host": Text(f"{member.host} {member.pid}"),
        "computes / waits": _bar(member),
        "per step": _per_step(member),
        "memory": decimal(member.memory) if member.memory else "",
        "does": Text(doing(member, now)),
    }


def _bar(member: MemberView) -> Text:
    if not member.is_running or not member.reported_at or member.is_preparing:
        return Text("")
    waits = round(BAR_COLUMNS * member.wait_fraction)
    return Text("█" * (BAR_COLUMNS - waits), style="cyan").append("░" * waits, style="dim")


def _per_step(member: MemberView) -> str:
    if member.server is not None:
        return f"version {member.server.version}, {member.updates_per_s:.3g}/s"
    if member.compute_s is None or member.wait_s is None:
        return ""
    return f"{member.compute_s * 1000:.3g} + {member.wait_s * 1000:.3g} ms"


def _feed(view: JobView) -> Table:
    table = Table(expand=True, box=None, show_header=False)
    table.add_column(width=8)
    table.add_column(ratio=1)
    for item in view.feed[-FEED_LINES:]:
        at = time.strftime("%H:%M:%S", time.localtime(item.at))
        table.add_row(Text(at, style="dim"), Text(item.text, style=_COLORS.get(item.level, "")))
    return table


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
