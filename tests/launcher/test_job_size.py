"""How many workers start if the user does not say, and the line that says so."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from phalanx.cli.main import cli
from phalanx.launcher.job_size import default_workers, describe_start


@pytest.mark.parametrize(
    ("visible", "workers", "reason"),
    [("0,1,2", 3, "one for each GPU"), ("0", 1, "this host has one GPU"), ("", 2, "this host has no GPU")],
)
def test_there_is_one_worker_for_each_gpu_and_two_without(visible: str, workers: int, reason: str) -> None:
    assert default_workers({"CUDA_VISIBLE_DEVICES": visible}) == (workers, reason)


def test_the_first_line_says_what_starts_and_where() -> None:
    tasks = ["chief/0", "worker/0", "worker/1", "ps/0", "evaluator/0"]
    assert describe_start(tasks, 1) == "starting 3 workers, 1 parameter server and 1 evaluator"
    assert describe_start(["worker/0"], 2, at_most=True) == "starting up to 1 worker on 2 hosts"
    why = "starting 2 workers (this host has no GPU; choose with --workers)"
    assert describe_start(["worker/0", "worker/1"], 1, reason="this host has no GPU") == why


def test_summaries_of_commands_are_whole_and_options_of_run_stand_in_groups() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    assert "..." not in text.partition("Commands:")[2]
    text = CliRunner().invoke(cli, ["run", "--help"]).output
    heads = [line for line in map(str.rstrip, text.splitlines()) if line.endswith(":") and not line.startswith(" ")]
    assert heads[:2] == ["Examples:", "Workers and hosts:"]
    assert heads[-1] == "Options:"
    assert text.partition("\nOptions:")[2].split() == ["-h", "--help", "Show", "this", "message", "and", "exit."]
