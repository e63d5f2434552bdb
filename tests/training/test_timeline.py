"""The timeline of a `fit`: one file with all ranks, and what each did in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.backends import FIRST, slow_after_the_first
from tests.support.programs import run_python
from tests.support.traces import ROUNDING_US, Events, named, names_of_processes, names_of_tracks, read

STEPS = 16
"""4 epochs of 4."""


def run(folder: Path, backend: str, *arguments: str) -> tuple[Events, int | None]:
    """The events of a job, and its exit code."""
    path = folder / "t.json"
    command = ["-m", "phalanx", "run", "--workers", "2", "--timeline-filename", str(path)]
    code, output = run_python(*command, "-m", "tests.training.timeline_program", *arguments, backend=backend)
    assert path.exists(), output
    return read(path), code


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_all_ranks_are_in_one_file_with_the_parts_of_each_step(backend: str, tmp_path: Path) -> None:
    events, code = run(tmp_path, backend)
    assert code == 0
    assert {rank: name.split()[0] for rank, name in names_of_processes(events).items()} == {
        0: "worker/0",
        1: "worker/1",
    }
    tracks = names_of_tracks(events)
    for rank in range(2):
        steps = named(events, "forward/backward", rank)
        assert [(step["args"]["epoch"], step["args"]["step"]) for step in steps] == [
            divmod(number, 4) for number in range(STEPS)
        ]
        for name in ("data", "merge", "apply"):
            parts = named(events, name, rank)
            assert len(parts) >= STEPS, name
            assert {tracks[rank, part["tid"]] for part in parts} == {"training"}
        assert named(events, "forward", rank), "the validation"
        merges = [merge["ts"] for merge in named(events, "merge", rank)]
        for step in steps:
            assert any(abs(step["ts"] + step["dur"] - moment) < ROUNDING_US for moment in merges)
    # The merge of a step is one all-reduce, which all ranks are in at the same time: that is, on one clock.
    reduces = [named(events, "all_reduce", rank) for rank in range(2)]
    assert len(reduces[0]) == len(reduces[1]) >= STEPS
    uncertain_us = max(event["args"]["uncertain_by_ms"] for event in named(events, "begins")) * 1e3
    for first, second in zip(*reduces, strict=True):
        assert first["args"]["bytes"] == second["args"]["bytes"] > 0
        assert first["args"]["algorithm"] in ("direct", "ring")
        assert first["ts"] < second["ts"] + second["dur"] + uncertain_us
        assert second["ts"] < first["ts"] + first["dur"] + uncertain_us
    assert named(events, "wait")


@pytest.mark.slow
def test_of_a_rank_that_was_killed_all_is_there_until_then(tmp_path: Path) -> None:
    events, code = run(tmp_path, FIRST, "kill")
    assert code == 128 + 9
    assert len(named(events, "forward/backward", 1)) == 12
    assert len(named(events, "forward/backward", 0)) >= 12
