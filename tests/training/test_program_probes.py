"""Whose findings about a program hold, where processes join a running job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phalanx.cluster.membership_messages import EntryAlreadyFinished, EntryStarted
from phalanx.errors import DisagreementError
from phalanx.training.checks import program_probes
from phalanx.training.checks.program_probes import ChiefFindings, check_chiefs_findings
from phalanx.training.replica import Entry, EntryFinishedError

SEED = (5).to_bytes(8)


class Candidate:
    """A process that joins; the members answer its queries one after the other, the last time for good."""

    is_chief, is_candidate, world_size = False, True, 1

    def __init__(self, *answers: EntryStarted | EntryAlreadyFinished) -> None:
        self.asked: list[int] = []
        self._answers = list(answers)
        self.elastic = SimpleNamespace(node=SimpleNamespace(query_entry=self._query))
        self.present_entry = Entry(3)

    def _query(self, entry: int) -> EntryStarted | EntryAlreadyFinished:
        self.asked.append(entry)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def published(**findings: Any) -> EntryStarted:
    return EntryStarted(3, SEED + msgspec.msgpack.encode(findings), 4)


def test_a_candidate_waits_for_the_members_findings_and_uses_them() -> None:
    candidate = Candidate(EntryStarted(3, SEED, 4), published(losses=[1], outputs="batch"))
    findings = ChiefFindings(candidate)  # type: ignore[arg-type]
    assert findings.from_chief("losses", [2]) == [1]
    assert findings.from_chief("outputs", None) == "batch"
    assert findings.from_chief("metrics", "its own") == "its own", "of which the members have found out nothing"
    assert findings.by_subject == {"losses": [1], "outputs": "batch", "metrics": "its own"}
    assert (candidate.asked, candidate.present_entry.seed, findings.replicas) == ([3, 3], 5, 4)


def test_a_candidate_that_the_members_wait_for_uses_its_own_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_probes, "FINDINGS_TIMEOUT_S", 0.3)
    candidate = Candidate(EntryStarted(3, SEED, 4))
    findings = ChiefFindings(candidate)  # type: ignore[arg-type]
    assert findings.from_chief("losses", [2]) == [2]
    asked = len(candidate.asked)
    assert findings.from_chief("outputs", "rows") == "rows"
    assert len(candidate.asked) == asked > 1, "it waits once"


def test_a_candidate_learns_that_the_members_have_finished() -> None:
    findings = ChiefFindings(Candidate(EntryAlreadyFinished(3, b"result")))  # type: ignore[arg-type]
    with pytest.raises(EntryFinishedError):
        findings.from_chief("losses", [2])


@pytest.mark.parametrize(("depth", "expected"), [(0, [{"losses": [1]}]), (1, [])])
def test_members_publish_what_holds_in_the_outer_call(depth: int, expected: list[Any]) -> None:
    announced: list[Any] = []
    entry = Entry(3, depth=depth)
    member = SimpleNamespace(
        is_candidate=False,
        elastic=object(),
        present_entry=entry,
        retry=lambda action: action(),
        broadcast_from_chief=lambda found: found,
        announce_entry=lambda: announced.append(msgspec.msgpack.decode(entry.announcement[8:])),
    )
    findings = ChiefFindings(member)  # type: ignore[arg-type]
    findings.from_chief("losses", [1])
    findings.publish()
    assert announced == expected


def test_a_worker_that_has_found_out_something_else_does_not_join() -> None:
    check_chiefs_findings({"losses": [1], "metrics": 2}, {"losses": [1], "outputs": "rows"})
    with pytest.raises(DisagreementError, match=r"\(losses\)"):
        check_chiefs_findings({"losses": [1]}, {"losses": [2]})
