"""The jobs of this user, as the threads of a dashboard follow them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phalanx.dashboard import job_hub
from phalanx.dashboard.job_hub import JobHub
from phalanx.launcher.watching import job_follower
from phalanx.launcher.watching.job_connection import ControlAnswer, ControlRequest
from phalanx.monitoring.job_view import JobView

MEETING_S = 0.5


def _entry(job: str) -> Any:
    return SimpleNamespace(is_local=True, job=job, program="train.py", socket_path=None)


def test_a_job_is_asked_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, met = threading.Barrier(2), []

    class Follower:
        is_gone = False

        def __init__(self, path: object) -> None:
            pass

        def update(self) -> None:
            try:
                meeting.wait(MEETING_S)
            except threading.BrokenBarrierError:
                return
            met.append(threading.get_ident())

    monkeypatch.setattr(job_hub, "running", lambda: [_entry("j0b")])
    monkeypatch.setattr(job_hub, "JobFollower", Follower)
    hub = JobHub()
    threads = [threading.Thread(target=hub.update) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met, "both would have got the same events, and counted them twice"


def test_who_goes_through_the_jobs_is_not_disturbed_by_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Any] = [_entry("first"), _entry("second")]
    monkeypatch.setattr(job_hub, "running", lambda: known)
    monkeypatch.setattr(
        job_hub, "JobFollower", lambda path: SimpleNamespace(update=lambda: None, is_gone=False, view=None)
    )
    hub = JobHub()
    hub.update()

    def names_meanwhile(jobs: Iterable[str]) -> Iterable[str]:
        for name in jobs:
            yield name
            known.append(_entry(f"after {name}"))
            hub.update()

    assert list(names_meanwhile(hub.jobs)) == ["first", "second"]
    assert list(hub.jobs) == ["first", "second", "after first", "after second"]


def test_an_event_of_another_version_is_followed_by_the_whole_view(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = JobView(wanted=3)
    answers = {
        -1: ControlAnswer(number=7, view=JobView()),
        7: ControlAnswer(number=8, events=[msgspec.Raw(b'{"type":"of_the_future"}')]),
    }
    asked = []

    def send(path: Path, request: ControlRequest, **_: float) -> ControlAnswer:
        asked.append(request.after)
        return answers[request.after]

    monkeypatch.setattr(job_follower, "send_request", send)
    follower = job_follower.JobFollower(Path("launcher.sock"))
    follower.update()
    answers[-1] = ControlAnswer(number=8, view=newer)
    assert follower.update() == []
    assert (asked, follower.view, follower.is_gone) == ([-1, 7, -1], newer, False)
