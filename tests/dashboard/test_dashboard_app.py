"""Who may see a job in a browser, and who may act on it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from phalanx.cli.dashboard_commands import dashboard
from phalanx.config.environment_variables import JOBS_DIRECTORY
from phalanx.dashboard import access
from phalanx.dashboard.dashboard_app import Dashboard
from phalanx.dashboard.job_hub import JobHub
from phalanx.errors import ConfigurationError
from phalanx.launcher.dashboard_process import DashboardLink
from phalanx.launcher.watching.job_control import JobControl
from phalanx.launcher.watching.job_recorder import JobRecorder
from phalanx.launcher.watching.job_registry import registered, socket_path
from phalanx.monitoring import job_events as events
from tests.dashboard.jobs import job_events
from tests.launcher.test_watched_job import Job

TOKEN = "a-token-that-no-one-guesses"
PORT = 8787
HOME = f"http://localhost:{PORT}"
OURS = {"Origin": HOME}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[JobRecorder, Job]]:
    """A job of this process, which others can find and ask."""
    monkeypatch.setenv(JOBS_DIRECTORY, str(tmp_path))
    recorder, job = JobRecorder(), Job()
    for event in job_events():
        recorder.record(event)
    with registered("j0b", ["train.py"]), JobControl(socket_path("j0b"), recorder) as control:
        control.job = job.running
        yield recorder, job


@pytest.fixture
def hub(running: tuple[JobRecorder, Job]) -> JobHub:
    hub = JobHub("j0b")
    hub.update()
    return hub


def client(hub: JobHub, *, control: bool = False, token: str | None = TOKEN, base_url: str = HOME) -> TestClient:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    app = Dashboard(hub, token=TOKEN, port=PORT, control=control).app()
    return TestClient(app, base_url=base_url, headers=headers)


PATHS = ("/", "/events", "/output?task=worker/0", "/metrics")


@pytest.mark.parametrize("token", [None, "", "a-token-that-someone-guessed"])
def test_without_the_token_nothing_is_shown(hub: JobHub, token: str | None) -> None:
    stranger = client(hub, token=token, control=True)
    for path in PATHS:
        answer = stranger.get(path)
        assert (answer.status_code, "train.py" in answer.text) == (403, False)
        assert "token" in answer.text
    assert stranger.post("/act", json={"action": "stop"}, headers=OURS).status_code == 403


def test_the_link_sets_a_cookie_that_opens_the_rest(hub: JobHub) -> None:
    browser = client(hub, token=None)
    answer = browser.get("/", params={"token": TOKEN})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert TOKEN not in answer.text
    assert browser.get("/metrics").status_code == 200
    browser.cookies.set(access.cookie_name(PORT), "wrong")
    browser.cookies.delete(access.cookie_name(PORT), domain="localhost.local")
    browser.cookies.set(access.cookie_name(PORT + 1), TOKEN)
    assert browser.get("/metrics").status_code == 403


@pytest.mark.parametrize("token", [TOKEN, "any text; with = and % & # 'quotes\""])
def test_cookies_of_other_programs_do_not_hide_that_of_the_link(hub: JobHub, token: str) -> None:
    """Browsers send the cookies of a host to all of its ports."""
    browser = TestClient(Dashboard(hub, token=token, port=PORT).app(), base_url=HOME)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        query = str(DashboardLink(listener, token)).partition("?")[2]
    ours = browser.get(f"/?{query}").headers["set-cookie"].partition(";")[0]
    browser.cookies.clear()
    for others in ('a={"x": 1}; b=two words; c[1]=2; d; =', "", ours.replace("=", "x=")):
        assert browser.get("/metrics", headers={"Cookie": f"{others}; {ours}; {others}"}).status_code == 200
        assert browser.get("/metrics", headers={"Cookie": others}).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8787", "localhost.evil.example", "10.0.0.1", ""])
def test_another_name_for_this_server_is_refused(hub: JobHub, host: str) -> None:
    """A site whose name was made to mean this machine (DNS rebinding)."""
    assert client(hub).get("/metrics", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:8787", "[::1]:8787", "LOCALHOST"])
def test_a_tunnel_may_lead_here_from_any_port(hub: JobHub, host: str) -> None:
    assert client(hub).get("/metrics", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:9999"},
        {"Origin": f"https://localhost:{PORT}"},
        {**OURS, "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_only_the_page_itself_may_act(hub: JobHub, running: tuple[JobRecorder, Job], headers: dict[str, str]) -> None:
    answer = client(hub, control=True).post("/act", json={"action": "stop"}, headers=headers)
    assert (answer.status_code, running[1].done) == (403, [])


def test_a_dashboard_only_shows_unless_it_was_told_otherwise(hub: JobHub, running: tuple[JobRecorder, Job]) -> None:
    answer = client(hub).post("/act", json={"action": "stop"}, headers=OURS)
    assert (answer.status_code, running[1].done) == (403, [])
    for way in ("read-only", "`phalanx dashboard --control`", "`phalanx run --dashboard-control`"):
        assert way in answer.json()["refusal"]


def test_the_buttons_do_what_they_say_or_say_why_not(hub: JobHub, running: tuple[JobRecorder, Job]) -> None:
    recorder, job = running
    browser = client(hub, control=True)

    def act(**body: Any) -> tuple[int, dict[str, str]]:
        answer = browser.post("/act", json=body, headers=OURS)
        return answer.status_code, answer.json()

    assert act(action="scale", workers=2, job="j0b")[0] == 200
    assert act(action="checkpoint")[0] == 200
    assert act(action="stop")[0] == 200
    assert job.done[:2] == [2, "checkpoint"]
    assert len(job.done) == 3
    status, answer = act(action="drain", host="here")
    assert (status, answer["refusal"]) == (409, "The job has no other host.")
    assert act(action="output", task="worker/0")[0] == 400
    assert act(action=5)[0] == 400
    assert act(action="stop", host="x" * 10_000)[0] == 413
    assert act(action="stop", job="another")[0] == 404
    recorder.record(events.JobEnded(120.0, 0, "over"))
    hub.update()
    assert act(action="stop") == (410, {"refusal": "The job has ended."})
    assert len(job.done) == 3


def test_the_end_of_the_output_is_shown_as_a_terminal_would(hub: JobHub, running: tuple[JobRecorder, Job]) -> None:
    recorder, _ = running
    recorder.output(0, False, b" 1/3\r 2/3")
    recorder.output(0, True, b"\r 3/3\n\x1b[31mred\x1b[0m <b>\n")
    answer = client(hub).get("/output", params={"job": "j0b", "task": "worker/0"})
    assert (answer.text, answer.headers["content-type"]) == (" 3/3\nred <b>\n", "text/plain; charset=utf-8")
    assert client(hub).get("/output", params={"task": "../../etc/passwd"}).text == ""
    recorder.output(1, False, b"x" * 100_000)
    assert len(client(hub).get("/output", params={"task": "worker/1"}).text) < 40_000


def test_the_stream_says_what_changes_until_the_job_is_over(hub: JobHub, running: tuple[JobRecorder, Job]) -> None:
    recorder, _ = running

    async def read() -> list[tuple[str, Any]]:
        dashboard = Dashboard(hub, token=TOKEN, port=PORT)
        stream = dashboard.events("")
        found = [_parse(await anext(stream)) for _ in range(2)]
        recorder.message("news")
        await dashboard.refresh()
        found.append(_parse(await anext(stream)))
        recorder.record(events.JobEnded(120.0, 1, "worker/1 failed", page="why"))
        await dashboard.refresh()
        found += [_parse(event) async for event in stream]
        return found

    (listed, jobs), (_, first), (_, news), (_, end), (over, _) = asyncio.run(asyncio.wait_for(read(), 60))
    assert (listed, jobs) == ("jobs", {"jobs": [{"job": "j0b", "program": "train.py"}], "job": "j0b"})
    assert len(first["points"]) == 5
    assert news["feed"][-1][2] == "news"
    assert "points" not in news
    assert (end["head"]["status"], end["head"]["page"], over) == ("failed", "why", "over")


def test_the_page_lists_jobs_that_begin_after_the_one_that_it_shows(running: tuple[JobRecorder, Job]) -> None:
    recorder, _ = running
    hub = JobHub()
    hub.update()

    async def read() -> list[tuple[str, Any]]:
        dashboard = Dashboard(hub, token=TOKEN, port=PORT)
        stream = dashboard.events("")
        found = [_parse(await anext(stream)) for _ in range(2)]
        recorder.record(events.JobEnded(120.0, 0, "over"))
        await dashboard.refresh()
        found.append(_parse(await anext(stream)))
        with registered("next", ["train.py"]):
            await dashboard.refresh()
        found.append(_parse(await anext(stream)))
        dashboard.close()
        return found + [_parse(event) async for event in stream]

    _, _, (_, end), (listed, jobs) = asyncio.run(asyncio.wait_for(read(), 60))
    assert (end["head"]["status"], listed) == ("succeeded", "jobs")
    assert ([each["job"] for each in jobs["jobs"]], jobs["job"]) == (["j0b", "next"], "j0b")


def test_the_page_says_that_a_launcher_is_silent_or_gone(running: object, hub: JobHub) -> None:
    (job,) = hub.jobs.values()

    async def read() -> list[tuple[str, Any]]:
        dashboard = Dashboard(hub, token=TOKEN, port=PORT, control=True)
        stream = dashboard.events("")
        found = [_parse(await anext(stream)) for _ in range(2)]
        for silent, gone in ((True, False), (False, False), (False, True)):
            job.follower.is_silent, job.follower.is_gone = silent, gone
            await dashboard.refresh()
            found.append(_parse(await anext(stream)))
        return found + [_parse(event) async for event in stream]

    job.follower.update = list  # type: ignore[method-assign]
    assert "j0b" in client(hub).get("/metrics").text
    job.follower.is_gone = True
    assert "j0b" not in client(hub).get("/metrics").text
    job.follower.is_gone = False
    _, *messages, over = asyncio.run(asyncio.wait_for(read(), 60))
    heads = [message["head"] for _, message in messages]
    assert [head["problem"] for head in heads] == ["", "launcher does not answer", "", "launcher gone"]
    assert [head["live"] for head in heads] == [True, False, True, False]
    assert over == ("over", {})


@pytest.mark.timeout(60)
def test_a_job_that_does_not_run_has_no_dashboard(running: object) -> None:
    with pytest.raises(ConfigurationError, match="No job nope is running here; running: j0b"):
        dashboard.main(["--job", "nope", "--port", "0"], standalone_mode=False)


def test_without_a_job_the_page_waits_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOBS_DIRECTORY, str(tmp_path))
    hub = JobHub()
    hub.update()

    async def first() -> str:
        stream = Dashboard(hub, token=TOKEN, port=PORT).events("")
        return await anext(stream)

    assert _parse(asyncio.run(first())) == ("jobs", {"jobs": [], "job": None})
    assert client(hub, control=True).post("/act", json={"action": "stop"}, headers=OURS).status_code == 404
    assert client(hub).get("/metrics").status_code == 200


def _parse(event: str) -> tuple[str, Any]:
    kind, data = event.strip().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))
