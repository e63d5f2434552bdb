"""The dashboard in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.config.environment_variables import DASHBOARD_TOKEN, JOBS_DIRECTORY
from phalanx.dashboard import report
from phalanx.launcher.watching.job_control import JobControl
from phalanx.launcher.watching.job_recorder import JobRecorder
from phalanx.launcher.watching.job_registry import registered, socket_path
from phalanx.monitoring import job_events as events
from phalanx.monitoring.job_events import JobEvent
from phalanx.monitoring.worker_figures import TaskReport, WorkerFigures
from tests.dashboard.jobs import job_events, measured
from tests.launcher.test_watched_job import Job
from tests.support.backends import FIRST

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-that-no-one-guesses"
BOUND_S = 120.0
BOUND_MS = 1000 * BOUND_S
NUMBER = re.compile(r"^\d")

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `test`)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv(JOBS_DIRECTORY, str(tmp_path / "jobs"))
    return {**os.environ, "PYTHONPATH": str(ROOT), DASHBOARD_TOKEN: TOKEN, "PHALANX_GRACE": "1", "KERAS_BACKEND": FIRST}


def link_of(process: subprocess.Popen[str]) -> str:
    """The link that a command prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return "http://" + line.split("http://")[1].split()[0]
    raise AssertionError(f"no link was printed, and the command ended with {process.wait()}")


@pytest.fixture
def job(environment: dict[str, str]) -> Iterator[tuple[JobRecorder, Job]]:
    recorder, job = JobRecorder(clock=lambda: 200.0), Job()
    for event in job_events(program="train.py <img src=x onerror=alert(1)>"):
        recorder.record(event)
    with registered("j0b", ["train.py"]), JobControl(socket_path("j0b"), recorder) as control:
        control.job = job.running
        yield recorder, job


@pytest.fixture
def link(environment: dict[str, str], job: object) -> Iterator[str]:
    command = [sys.executable, "-m", "phalanx", "dashboard", "--port", "0", "--control"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield link_of(process)
        finally:
            process.send_signal(signal.SIGINT)


def test_a_job_in_a_browser(chromium: Any, link: str, job: tuple[JobRecorder, Job]) -> None:
    """Loss, members and events are shown, changes too; buttons act; nothing without the token; no error anywhere."""
    recorder, controlled = job
    context = chromium.new_context(color_scheme="dark", viewport={"width": 390, "height": 800})
    stranger = context.new_page()  # a page of its own: the browser reports the refusal some time later
    answer = stranger.goto(link.partition("?")[0])
    assert answer.status == 403
    assert "train.py" not in stranger.content()
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: dialog.accept())

    page.goto(link)
    shows = sync_api.expect
    shows(page.locator("#status")).to_have_text("running", timeout=BOUND_MS)
    shows(page.locator("#program")).to_have_text("train.py <img src=x onerror=alert(1)>")
    assert TOKEN not in page.url
    shows(page.locator(".chart", has_text="loss").locator("path").first).to_be_attached()
    shows(page.locator('.member[data-task="worker/1"]')).to_have_attribute("data-state", "starting")
    recorder.record(events.GenerationFormed(111.0, 3, ["worker/0", "worker/1"]))
    recorder.record(measured(112.0, 60))
    shows(page.locator('.member[data-task="worker/1"]')).to_have_attribute("data-state", "running", timeout=BOUND_MS)
    shows(page.locator("#feed")).to_contain_text("worker/1 joined")
    shows(page.locator('.tile[data-name="Steps"]')).to_contain_text("180")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width == 390, "the page is as wide as the phone"

    page.locator("#less").click()
    page.locator("#checkpoint").click()
    shows(page.locator("#toast")).to_contain_text("checkpoint", timeout=BOUND_MS)
    page.locator("#stop").click()
    shows(page.locator("#toast")).to_contain_text("asked to stop", timeout=BOUND_MS)
    assert controlled.done == [1, "checkpoint", signal.SIGTERM]
    shows(page.get_by_role("button", name="Drain")).to_be_disabled()

    recorder.record(events.JobEnded(113.0, 1, "worker/1 failed", "worker/1", "ValueError: why it failed"))
    shows(page.locator("#status")).to_have_text("failed", timeout=BOUND_MS)
    shows(page.locator("#failure")).to_contain_text("ValueError: why it failed")
    shows(page.locator("#stop")).to_have_count(0)
    assert problems == []
    context.close()


RULE = "-" * 78
FOLDED = f"{RULE}\nValueError\n  ... 11 frames of phalanx and keras\n{RULE}\n"


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the report of a job with these events."""
    context = chromium.new_context(viewport={"width": 390, "height": 800})

    def open_report(stream: list[JobEvent]) -> Any:
        with open(tmp_path / events.EVENTS_FILE, "wb", 0) as file:
            recorder = JobRecorder(file)
            for event in stream:
                recorder.record(event)
        page = context.new_page()
        page.goto(report.write(tmp_path).as_uri())
        return page

    yield open_report
    context.close()


def test_the_report_of_a_job_that_was_stopped_is_neutral(opened: Callable[..., Any]) -> None:
    page = opened([*job_events(), events.JobEnded(111.0, 75, "asked to stop", page="of an earlier version")])
    shows = sync_api.expect
    shows(page.locator("#status")).to_have_text("stopped")
    shows(page.locator("#ending")).to_have_text("Saved a checkpoint and stopped; start it again to continue.")
    shows(page.locator("#failure")).to_be_hidden()
    shows(page.locator("#feed .bad", has_text="the job ended")).to_have_count(0)


def test_the_report_of_a_failure_is_folded_first_and_has_no_rules(opened: Callable[..., Any]) -> None:
    whole = FOLDED.replace("  ... 11 frames", "  File 1\n  ... 11 frames")
    page = opened([*job_events(), events.JobEnded(111.0, 1, "worker/1 failed", "worker/1", whole, FOLDED)])
    shows = sync_api.expect
    first, all_frames = (page.locator("#failure pre").nth(index) for index in range(2))
    shows(first).to_have_text("ValueError\n  ... 11 frames of phalanx and keras\n")
    shows(all_frames).to_be_hidden()
    page.get_by_text("All frames").click()
    shows(all_frames).to_contain_text("File 1")
    assert RULE not in page.locator("#failure").inner_text()


def test_the_report_of_a_short_job_shows_what_is_known(opened: Callable[..., Any]) -> None:
    """Nothing that is still to come, nothing empty, and no label twice."""
    figures = WorkerFigures(computed_s=0.5, steps=4, samples=64)
    reports = {"worker/0": TaskReport("update", 0, 3, 0.0, figures=figures)}
    page = opened([*job_events()[:5], events.Measured(103.0, reports), events.JobEnded(104.0, 1, "why", "worker/0")])
    shows = sync_api.expect
    shows(page.locator('.tile[data-name="Steps"]')).to_contain_text("epoch 1, step 4")
    shows(page.locator('.tile[data-name="Samples/s"]')).to_contain_text("128")
    shows(page.locator('.tile[data-name="Loss"]')).to_have_count(0)
    shows(page.locator(".chart", has_text="Samples/s")).to_be_attached()
    shows(page.locator(".chart", has_text="Bytes")).to_have_count(0)
    shows(page.locator(".member.head > div")).to_have_text(["task", "host", "time", "end"])
    shows(page.locator("#hosts")).to_have_text("here 3 tasks")
    shows(page.locator("#time")).to_contain_text("computing 0.5 s, waiting 0 s, starting")
    assert " yet" not in page.locator("body").inner_text()


def test_axes_have_at_least_two_labels_and_none_twice(opened: Callable[..., Any]) -> None:
    page = opened(job_events(ended=0))
    for seconds, columns in ((270, 2), (1, 2), (59, 3), (3601, 2), (86_400 * 3, 2)):
        at = page.evaluate(f"timeTicks({seconds}, {columns})")
        assert len(at) >= 2
        assert at[-1] <= seconds
    assert page.evaluate("ticks(0, 1.06, 4, 1).map(show.bytes)") == ["0 B", "1 B"]
    assert page.evaluate("ticks(4, 5, 3, 1)") == [4, 5]


def test_a_process_that_compiles_computes_nothing_yet(opened: Callable[..., Any]) -> None:
    figures = WorkerFigures(computed_s=9.0, steps=1)
    reports = {"worker/0": TaskReport("gradients", 0, 0, 0.0, figures=figures)}
    page = opened([*job_events()[:5], events.Measured(112.0, reports)])
    row = page.locator('.member[data-task="worker/0"]')
    shows = sync_api.expect
    shows(row).to_have_attribute("data-state", "starting")
    shows(row.locator(".does")).to_contain_text("first step (JAX and TensorFlow compile the model)")
    shows(row.locator(".split i")).to_have_count(0)


def test_each_job_has_its_own_output_also_one_that_has_ended(
    chromium: Any, link: str, job: tuple[JobRecorder, Job]
) -> None:
    job[0].output(0, False, b"of the first job\n")
    page = chromium.new_context().new_page()
    shows = sync_api.expect
    recorder = JobRecorder(clock=lambda: 300.0)
    for event in job_events(program="other.py"):
        recorder.record(msgspec.structs.replace(event, job="0ther") if isinstance(event, events.JobStarted) else event)
    recorder.output(0, False, b"of the other job\n")
    with registered("0ther", ["other.py"]), JobControl(socket_path("0ther"), recorder):
        page.goto(link)
        shows(page.locator("#jobs option")).to_have_count(2, timeout=BOUND_MS)
        page.locator("#jobs").select_option("0ther")
        shows(page.locator("#output")).to_have_text("of the other job\n", timeout=BOUND_MS)
        page.locator("#jobs").select_option("j0b")
        shows(page.locator("#output")).to_have_text("of the first job\n", timeout=BOUND_MS)
        recorder.record(events.JobEnded(113.0, 0, "over"))
    page.locator("#jobs").select_option("0ther")
    shows(page.locator("#status")).to_have_text("succeeded", timeout=BOUND_MS)
    shows(page.locator("#output")).to_contain_text("The job has ended.", timeout=BOUND_MS)
    page.locator("#jobs").select_option("j0b")
    shows(page.locator("#output")).to_have_text("of the first job\n", timeout=BOUND_MS)
    job[0].record(events.JobEnded(113.0, 0, "over"))
    shows(page.locator("#status")).to_have_text("succeeded", timeout=BOUND_MS)
    page.locator("#output-task").select_option("worker/1")
    shows(page.locator("#output")).not_to_contain_text("of the first job", timeout=BOUND_MS)
    page.locator("#output-task").select_option("worker/0")
    shows(page.locator("#output")).to_have_text("of the first job\n", timeout=BOUND_MS)
    page.context.close()


PROGRAM = """
import sys, time, keras, numpy as np, phalanx
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
x = np.random.default_rng(0).normal(size=(512, 4)).astype("float32")
saved = phalanx.callbacks.Checkpoint(sys.argv[1], every_steps=10**9)
model.fit(x, x.sum(1), batch_size=32, epochs=10_000, verbose=0, callbacks=[Slow(), saved])
"""


@pytest.mark.slow
def test_a_killed_worker_is_replaced_before_the_eyes_of_the_user(
    chromium: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    """A real job of three workers: what the page shows is what happens, and its buttons do what they say."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = ["run", "--workers", "1:3", "--dashboard-control", "--log-dir", str(tmp_path / "log"), str(program)]
    with subprocess.Popen(
        [sys.executable, "-m", "phalanx", *command, str(tmp_path / "saved")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        page = chromium.new_context().new_page()
        page.on("dialog", lambda dialog: dialog.accept())
        shows = sync_api.expect
        try:
            page.goto(link_of(process))
            tile = page.locator('.tile[data-name="Loss"]').locator(".value")
            shows(tile).to_have_text(NUMBER, timeout=BOUND_MS)
            shows(page.locator('.tile[data-name="Workers"]')).to_contain_text("generation 1", timeout=BOUND_MS)
            row = page.locator('.member[data-task="worker/1"]')
            os.kill(int(row.locator(".dim").first.inner_text()), signal.SIGKILL)
            shows(page.locator("#feed")).to_contain_text("worker/1 was killed by SIGKILL", timeout=BOUND_MS)
            shows(page.locator("#feed")).to_contain_text("worker/1 joined", timeout=BOUND_MS)
            shows(row).to_contain_text("started 2 times")
            shows(tile).to_have_text(NUMBER)
            page.locator("#checkpoint").click()
            shows(page.locator("#feed")).to_contain_text("checkpoint after", timeout=BOUND_MS)
            page.locator("#less").click()
            shows(page.locator('.tile[data-name="Workers"]').locator(".value")).to_have_text("2", timeout=BOUND_MS)
            page.locator("#stop").click()
            shows(page.locator("#status")).to_have_text("stopped", timeout=BOUND_MS)
            shows(page.locator("#ending")).to_contain_text("Saved a checkpoint and stopped", timeout=BOUND_MS)
            shows(page.locator("#failure")).to_be_hidden()
            assert process.wait(BOUND_S) == 75
        finally:
            process.kill()
    assert list((tmp_path / "jobs").iterdir()) == []
    assert list((tmp_path / "saved").iterdir())
