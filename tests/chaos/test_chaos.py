"""Chaos over real jobs, a short schedule of it; `make chaos` goes on for as long as it is told."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.chaos import faults, partitions
from tests.chaos.faults import choose, damage_newest
from tests.chaos.invariants import Result, same_model
from tests.chaos.job import Member, Shape
from tests.chaos.schedule import FIRST_STEP, ON_NETWORKS, Fault, Kind, Plan, kills, plan
from tests.chaos.trial import Verdict, pauses_s, trial, undisturbed
from tests.support.backends import BACKENDS, FIRST
from tests.support.network import Network

TIMEOUT_S = 5.0
PAUSE_BOUND_S = 120.0
"""Against hanging; what was measured is printed."""
ON_ONE_HOST = frozenset(Kind) - ON_NETWORKS


# The schedule.


def test_a_plan_follows_from_its_seed():
    def made(seed: int) -> Plan:
        return plan(seed, steps=100, faults=5, able=frozenset(Kind), timeout_s=TIMEOUT_S)

    assert [made(seed) for seed in range(20)] == [made(seed) for seed in range(20)]
    assert len({made(seed).faults for seed in range(20)}) == 20


def test_faults_come_in_order_while_the_job_trains_and_only_those_that_can_be_done():
    seen: Counter[Kind] = Counter()
    for seed in range(200):
        able = frozenset(Kind) if seed % 2 else ON_ONE_HOST
        made = plan(seed, steps=60, faults=4, able=able, timeout_s=TIMEOUT_S)
        steps = [fault.step for fault in made.faults]
        assert steps == sorted(steps)
        assert steps[0] >= FIRST_STEP
        assert steps[-1] < 60
        assert made.networked or not {fault.kind for fault in made.faults} & ON_NETWORKS
        assert not made.networked or seed % 2
        seen.update(fault.kind for fault in made.faults)
    assert set(seen) == set(Kind)


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.CUT])
@pytest.mark.parametrize("seed", range(4))
def test_a_short_plan_of_one_kind(kind, seed):
    made = plan(seed, steps=4, faults=2, able={kind}, timeout_s=TIMEOUT_S)
    assert [fault.kind for fault in made.faults] == [kind] * 2
    assert made.networked == (kind in ON_NETWORKS)


def test_the_victim_is_the_chief_or_another_one():
    members = [Member(10 + rank, f"worker/{rank}", rank) for rank in range(3)]
    assert choose(members, Fault(1, Kind.KILL, chief=True)) is members[0]
    assert choose(members, Fault(1, Kind.KILL, choice=0.2)) is members[1]
    assert choose(members, Fault(1, Kind.KILL, choice=0.99)) is members[2]
    assert choose(members[:1], Fault(1, Kind.KILL, choice=0.99)) is members[0]
    assert choose([], Fault(1, Kind.KILL)) is None


# The checks find what they are for.


def test_another_model_another_loss_and_a_lost_sample_are_found():
    good = Result(np.zeros(4), {"loss": [2.0, 1.0]}, {"0": [1], "1": [1]})
    assert same_model(good, good) == []
    assert same_model(None, good) == ["there is no result"]
    assert "weights differ by up to 0.1" in same_model(replace(good, weights=np.full(4, 0.1)), good)
    assert "5" in same_model(replace(good, weights=np.zeros(5)), good)[0]
    assert "loss is" in same_model(replace(good, losses={"loss": [2.0, 1.1]}), good)[0]
    assert "loss is" in same_model(replace(good, losses={"loss": [2.0]}), good)[0]
    assert "samples were used" in same_model(replace(good, ledger={"0": [1], "1": [1, 2]}), good)[0]
    assert "samples were used" in same_model(replace(good, ledger={"0": [1]}), good)[0]


@pytest.mark.parametrize("choice", [0.1, 0.2, 0.3, 0.4])
def test_only_the_newest_checkpoint_is_damaged_and_only_if_there_is_another(tmp_path, choice):
    content = bytes(1000)
    (tmp_path / "fit0-000000005.weights.h5").write_bytes(content)
    assert damage_newest(tmp_path, choice) == "no checkpoint"
    (tmp_path / "fit0-000000010.weights.h5").write_bytes(content)
    assert damage_newest(tmp_path, choice) == "fit0-000000010.weights.h5"
    assert (tmp_path / "fit0-000000005.weights.h5").read_bytes() == content
    assert (tmp_path / "fit0-000000010.weights.h5").read_bytes() != content


def test_the_longest_pause_after_a_fault_counts_also_where_a_step_was_on_its_way():
    steps = [(time, "step") for time in (9.0, 10.5, 11.0, 16.0, 16.5, 22.0, 22.5)]
    assert pauses_s([10.0, 20.0, 30.0], steps) == [5.5, 2.0, None]
    assert pauses_s([10.0], [(10.5, "step"), (13.5, "held"), (14.0, "step")]) == [0.5]
    assert pauses_s([], steps) == []


# Real jobs.

_references: dict[Shape, Result] = {}


def reference(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> Result:
    if shape not in _references:
        _references[shape] = undisturbed(tmp_path_factory.mktemp("undisturbed") / shape.backend, shape)
    return _references[shape]


def bring_about(folder: Path, shape: Shape, chosen: Plan, expected: Result) -> tuple[Verdict, str]:
    """Run a trial; its verdict, and what the launcher said."""
    verdict = trial(folder, shape, chosen, expected)
    said = (folder / "output.log").read_text(errors="replace")
    print(verdict)
    assert not verdict.violations, f"{verdict}\n{said}"
    assert len(verdict.done) == len(chosen.faults), f"the job ended before all faults came: {verdict}"
    for seconds in verdict.pauses_s:
        assert seconds is None or seconds < PAUSE_BOUND_S
    return verdict, said


@pytest.mark.slow  # tests/elastic kills the chief of a job, and breaks a connection between members
@pytest.mark.timeout(600)
def test_a_short_schedule(tmp_path, tmp_path_factory):
    """The chief is killed, and then a connection breaks; no member waits for the lost one to return."""
    shape = Shape(FIRST, epochs=2, hold_s=0.0, timeout_s=TIMEOUT_S)
    chosen = Plan(0, (Fault(8, Kind.KILL, chief=True), Fault(12, Kind.DISCONNECT)), False, TIMEOUT_S)
    bring_about(tmp_path / "job", shape, chosen, reference(tmp_path_factory, shape))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("backend", BACKENDS)
def test_five_kills_at_random_moments(tmp_path, tmp_path_factory, backend, seed):
    """The chief among the victims. A member that has the state of the job is never the last one that is killed."""
    shape = Shape(backend, timeout_s=TIMEOUT_S)
    chosen = kills(seed, steps=shape.steps, count=5, timeout_s=TIMEOUT_S)
    bring_about(tmp_path / "job", shape, chosen, reference(tmp_path_factory, shape))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2, 45])
def test_a_schedule_on_one_host(tmp_path, tmp_path_factory, seed):
    shape = Shape(FIRST, epochs=3, timeout_s=TIMEOUT_S)
    able = frozenset({Kind.KILL, Kind.KILL_LAUNCHER, Kind.DISCONNECT, Kind.DAMAGE, Kind.PAUSE, Kind.FILL_DISK})
    chosen = plan(seed, steps=shape.steps, faults=3, able=able, timeout_s=shape.timeout_s)
    bring_about(tmp_path / "job", shape, chosen, reference(tmp_path_factory, shape))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_schedule(tmp_path, tmp_path_factory, backend, seed):
    shape = Shape(backend, epochs=5, timeout_s=TIMEOUT_S)
    chosen = plan(seed, steps=shape.steps, faults=6, able=faults.able(), timeout_s=shape.timeout_s)
    bring_about(tmp_path / "job", shape, chosen, reference(tmp_path_factory, shape))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chief", [False, True], ids=["a worker", "the chief"])
@pytest.mark.parametrize("kind", [Kind.STOP, Kind.CUT, Kind.SEVER, Kind.HALF_OPEN])
def test_silence_ends_in_eviction(tmp_path, tmp_path_factory, kind, chief):
    """Within the timeout and 2 s."""
    networked = kind in ON_NETWORKS
    if networked and (problem := Network.problem()):
        pytest.skip(problem)
    shape = Shape(FIRST, epochs=4, timeout_s=TIMEOUT_S)
    fault = Fault(10, kind, chief=chief, lasts_s=3 * TIMEOUT_S if networked else 0.0)
    chosen = Plan(0, (fault,), networked, TIMEOUT_S)
    verdict, said = bring_about(tmp_path / "job", shape, chosen, reference(tmp_path_factory, shape))
    assert "was evicted" in said or kind is Kind.HALF_OPEN
    (pause_s,) = verdict.pauses_s
    assert pause_s is not None
    assert pause_s <= TIMEOUT_S + 2.0
    assert "; starting it again" in said


# Partitions.


def saves(*lines: tuple[str, int, list[int], int]) -> list[dict[str, object]]:
    return [{"what": what, "step": step, "token": token, "pid": pid, "time": 0.0} for what, step, token, pid in lines]


def test_two_writers_a_late_one_and_a_lost_step_are_found():
    good = saves(("begin", 1, [0, 1], 5), ("end", 1, [0, 1], 5), ("begin", 2, [1, 1], 6), ("end", 2, [1, 1], 6))
    assert partitions.violations(good) == []
    me = os.getpid()
    mixed = saves(("begin", 1, [0, 1], me), ("begin", 1, [0, 2], 6), ("end", 1, [0, 1], me), ("end", 1, [0, 2], 6))
    assert any("two writers" in each for each in partitions.violations(mixed))
    assert any("after a later one" in each for each in partitions.violations([*good, *good[:2]]))
    lost = saves(("begin", 2, [0, 1], 5), ("end", 2, [0, 1], 5), ("begin", 1, [1, 1], 6), ("end", 1, [1, 1], 6))
    assert any("is lost" in each for each in partitions.violations(lost))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", partitions.Kind)
def test_a_partition_leaves_one_writer(tmp_path, kind, seed):
    assert partitions.trial(tmp_path, partitions.Plan.of(seed, kind)) == []
