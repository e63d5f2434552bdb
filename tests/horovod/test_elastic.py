"""`hvd.elastic`: whole jobs of which a member is killed, and comes back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import fork_server
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import ROOT, finish
from tests.support.programs import environment

PROGRAMS = Path(__file__).parent / "elastic"
BOUND_S = 200.0
"""Against hanging."""

Event = dict[str, Any]


def run(folder: Path, program: str, backend: str, *arguments: str, own: Sequence[str] = ()) -> tuple[list[Event], str]:
    """Run an elastic job to its end: what its processes noted, life by life, and what it printed.

    Args:
        own: the program's arguments after the folder.
    """
    events = folder / "events"
    events.mkdir()
    code, output = finish(
        [sys.executable, "-m", "phalanx", "run", "-v", *arguments, str(PROGRAMS / program), str(events), *own],
        environment(backend) | {"PHALANX_TIMEOUT": "60", "PYTHONPATH": str(ROOT)},
        bound_s=BOUND_S,
        start=fork_server.popen,
    )
    found = [json.loads(line) for log in sorted(events.glob("*.log")) for line in log.read_text().splitlines()]
    story = output + "\n" + "\n".join(map(json.dumps, found))
    assert code == 0, story
    return found, story


def of_kind(events: list[Event], kind: str, life: str | None = None) -> list[Event]:
    return [event for event in events if event["event"] == kind and life in (None, event["life"])]


@pytest.mark.timeout(BOUND_S + 30)
def test_ranks_names_and_process_sets_are_formed_again(tmp_path: Path) -> None:
    events, story = run(tmp_path, "numpy_program.py", FIRST, "-np", "3", "--min-np", "2", "--max-np", "4")
    assert len(of_kind(events, "killed")) == 1, story
    ends = of_kind(events, "finished")
    assert sorted(end["rank"] for end in ends) == [0, 1, 2, 3], story
    for end in ends:
        assert (end["answer"], end["size"], end["step"]) == (7, 4, 12), story
        assert end["total"] == sum(step * 144 + sum(range(12)) for step in range(12)), story
        # Four from the third step on at the latest, three after the kill in the sixth, four again before the ninth.
        assert end["sizes"][:2] in ([3, 3], [3, 4], [4, 4]), story
        assert end["sizes"][2:5] == [4, 4, 4], story
        assert end["sizes"][5] in (3, 4), story
        assert end["sizes"][8:] == [4, 4, 4, 4], story
    # Rank 0 was lost: the next one became it, and the process that came back is the last.
    assert next(end["rank"] for end in ends if end["life"].startswith("0.")) == 3, story
    first = of_kind(events, "began", "0.2")[0]
    assert first["rank"] == 3, story
    assert first["step"] >= 5, story


@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.slow), "inside"])
@pytest.mark.timeout(BOUND_S + 30)
def test_a_member_is_lost_while_the_others_make_a_process_set(tmp_path: Path, where: str) -> None:
    members = ("-np", "4", "--min-np", "1", "--max-np", "4")
    events, story = run(tmp_path, "callback_program.py", FIRST, *members, own=[where])
    assert {event["life"] for event in of_kind(events, "killed")} == {"1.1", "3.1"}, story
    assert [(end["size"], end["step"]) for end in of_kind(events, "finished")] == [(4, 8)] * 4, story
    sizes = [event["size"] for event in of_kind(events, "reset", "0.1")]
    assert sizes[:1] == [3], story
    assert sizes[-1:] == [4], story


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="BACKENDS leaves out torch")
@pytest.mark.timeout(BOUND_S + 30)
def test_a_torch_program_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    events, story = run(tmp_path, "torch_program.py", FIRST, "-np", "3", "--min-np", "2", "--max-np", "3")
    assert set(os.listdir("/dev/shm")) <= before
    assert len(of_kind(events, "killed")) == 1, story
    # Two lives were left and went back to the last commit, of step 6; then they let the third one in.
    for life in ("0.1", "2.1"):
        first, second = of_kind(events, "reset", life)
        assert (first["size"], first["step"], first["committed"]) == (2, 6, 6), story
        assert second["size"] == 3, story
        assert [event["step"] for event in of_kind(events, "began", life)][:2] == [0, 6], story
    # The newcomer was given weights, moments, the learning rate and the step of the others.
    (joined,) = of_kind(events, "began", "1.2")
    survivor = of_kind(events, "began", "0.1")[-1]
    assert (joined["size"], joined["step"], joined["rate"]) == (3, survivor["step"], survivor["rate"]), story
    assert joined["step"] >= 11, story
    assert all(event["alike"] for event in of_kind(events, "began")), story
    ends = of_kind(events, "finished")
    assert sorted(end["rank"] for end in ends) == [0, 1, 2], story
    assert all({**end, "rank": 0, "life": ""} == {**ends[0], "rank": 0, "life": ""} for end in ends), story
    # No sample is lost; where the rest of an epoch cannot be dealt out equally, some come twice.
    counts = np.array(ends[0]["counts"])
    assert counts.min() == 1, story
    assert (counts[[0, 3]] == 1).all(), story
    assert (counts.sum(axis=1) - counts.shape[1] <= 2 + 2).all(), story
    assert ends[0]["rate"] == pytest.approx(0.05 * 0.9**4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.timeout(BOUND_S + 30)
def test_a_keras_program_goes_on_from_its_last_commit(tmp_path: Path, backend: str) -> None:
    events, story = run(tmp_path, "keras_program.py", backend, "--workers", "2:3")
    assert len(of_kind(events, "killed")) == 1, story
    for life in ("0.1", "2.1"):
        first, second = of_kind(events, "reset", life)
        # Killed in the second epoch after its third batch: the commit was after the second.
        assert (first["size"], first["epoch"], first["batch"]) == (2, 1, 2), story
        assert second["size"] == 3, story
        began = of_kind(events, "began", life)
        assert [event["iterations"] for event in began][:2] == [0, 6], story
        # The rest of the second epoch had two batches, and then the third began.
        assert of_kind(events, "epoch", life)[1]["batches"] == 2, story
    (joined,) = of_kind(events, "began", "1.2")
    survivor = of_kind(events, "began", "0.1")[-1]
    for name in ("size", "iterations", "epoch", "batch"):
        assert joined[name] == survivor[name], story
    assert joined["epoch"] == 2, story
    assert all(event["alike"] for event in of_kind(events, "began")), story
    ends = of_kind(events, "finished")
    assert sorted(end["rank"] for end in ends) == [0, 1, 2], story
    for end in ends:
        assert (end["size"], end["epoch"], end["batch"], end["iterations"]) == (3, 5, 0, 20), story
        assert end["weights"] == ends[0]["weights"], story
