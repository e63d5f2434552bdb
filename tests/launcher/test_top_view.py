"""What `phalanx top` draws."""

from __future__ import annotations

import io

from rich.console import Console

from phalanx.launcher.watching.top_view import render
from phalanx.monitoring import job_events as events
from phalanx.monitoring.job_view import replay
from tests.dashboard.jobs import job_view


def test_brackets_of_a_program_and_its_hosts_are_text_and_no_markup() -> None:
    program = "train.py --dirs=[/data] --layers=[red,bold]"
    view = replay(
        [
            events.JobStarted(1.0, "job", program, events.FIXED, ["worker/0"], 1, 1, "[fe80::1]", 1, "0.1.0"),
            events.TaskStarted(1.0, "worker/0", 0, "[fe80::a]", 10),
            events.TaskExited(2.0, "worker/0", 1, "exit code 1 [/usr/bin/env]"),
        ]
    )
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as captured:
        console.print(render(view, 3.0))
    for text in (program, "[fe80::a]", "[/usr/bin/env]"):
        assert text in captured.get()


def test_a_narrow_terminal_shows_what_each_task_does() -> None:
    view = job_view()
    console = Console(file=io.StringIO(), width=40)
    with console.capture() as captured:
        console.print(render(view, 111.0))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) == 40
    for task in ("worker/0", "worker/1", "ps/0"):
        assert any(line.startswith(f" {task} ") for line in lines)
