"""What the page, the report and Prometheus are told of a job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.dashboard import browser_view, page, report
from phalanx.dashboard.prometheus_metrics import expose
from phalanx.errors import ConfigurationError
from phalanx.launcher.watching.job_recorder import JobRecorder
from phalanx.monitoring.job_events import EVENTS_FILE
from phalanx.monitoring.job_view import JobView, advance, replay
from tests.dashboard.jobs import job_events, job_view, measured


def test_the_page_is_told_of_everything_once_and_then_of_what_has_changed() -> None:
    view = replay(job_events()[:8])
    first = browser_view.message(view)
    assert [len(first[part]) for part in ("points", "spans", "generations", "epochs")] == [3, 3, 1, 0]
    assert "more" not in first
    later = advance(view, measured(106.5, 40))
    change = browser_view.message(later, view)
    assert set(change) == {"head", "points", "more"}
    assert [point[1] for point in change["points"]] == [later.steps]
    assert set(browser_view.message(job_view(), later)) >= {"head", "points", "spans", "epochs", "checkpoints", "feed"}


def test_members_have_one_word_for_what_they_are() -> None:
    members = {member["task"]: member for member in browser_view.head(job_view())["members"]}
    assert {task: member["state"] for task, member in members.items()} == {
        "worker/0": "running",
        "worker/1": "starting",
        "ps/0": "running",
    }
    assert (members["ps/0"]["version"], members["ps/0"]["updates_per_s"]) == (150, 30.0)
    assert members["worker/0"]["gpu"]["name"] == "H100"
    assert members["worker/1"]["rest_s"] == pytest.approx(8.5 - 5.0)


def test_what_a_job_has_written_is_no_markup() -> None:
    """Names of programs, tasks and metrics, errors and output are the job's; the page runs nothing of them."""
    hostile = '</script><script>alert("x")</script>{style}{script}\u2028'
    view = job_view(program=hostile, ended=1, page=hostile)
    document = page.render(browser_view.message(view, live=False), nonce="n0nce")
    assert "<script>alert" not in document
    (data,) = re.findall(r'<script nonce="n0nce" type="application/json" id="data">(.*?)</script>', document, re.S)
    assert json.loads(data)["head"]["program"] == hostile
    assert document.count("</script>") == 2


@pytest.mark.parametrize("ended", [0, 1])
def test_a_report_is_one_file_with_curves_output_and_cause(tmp_path: Path, ended: int) -> None:
    with open(tmp_path / EVENTS_FILE, "wb") as file:
        recorder = JobRecorder(file)
        for event in job_events(ended=ended, page="the failure page" if ended else ""):
            recorder.record(event)
    (tmp_path / "worker-0.log").write_bytes(b"\x1b[31mred\x1b[0m\n 1/3\r 3/3\n\x00")
    path = report.write(tmp_path)
    document = path.read_text()
    assert path == tmp_path / "report.html"
    assert not re.search(r"(src|href)=\"?https?:|@import|url\(", document)
    (data,) = re.findall(r'id="data">(.*?)</script>', document, re.S)
    told = json.loads(data)
    assert told["outputs"] == {"worker/0": "red\n 3/3\n", "worker/1": "", "ps/0": ""}
    assert (told["head"]["live"], told["head"]["status"]) == (False, "failed" if ended else "succeeded")
    assert told["head"]["page"] == ("the failure page" if ended else "")
    assert len(document) < 150_000


def test_a_report_needs_the_log_directory_of_a_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--log-dir"):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / EVENTS_FILE).write_bytes(b'{"type":"job_sta')
    with pytest.raises(ConfigurationError, match="empty or damaged"):
        report.write(tmp_path)


def test_a_report_needs_a_file_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not the name of a file"):
        report.write(tmp_path, Path(""))


def test_prometheus_gets_each_figure_with_its_job_and_task() -> None:
    content, kind = expose([job_view(), JobView()])
    lines = content.decode().splitlines()
    assert kind.startswith("text/plain")
    for line in (
        'phalanx_steps_total{job="j0b"} 150.0',
        'phalanx_up{host="here",job="j0b",task="worker/1"} 1.0',
        'phalanx_server_version{host="here",job="j0b",task="ps/0"} 150.0',
        'phalanx_gpu_utilization{host="here",job="j0b",task="worker/0"} 0.5',
        'phalanx_metric{job="j0b",name="accuracy"} NaN',
        'phalanx_running{job="j0b"} 1.0',
    ):
        assert line in lines


def test_the_board_for_grafana_asks_for_figures_that_exist() -> None:
    content, _ = expose([job_view()])
    known = set(re.findall(r"^(phalanx_\w+)", content.decode(), re.M))
    board = json.loads((Path(__file__).parents[2] / "examples" / "grafana_dashboard.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for each in panel["targets"]
        for name in re.findall(r"phalanx_\w+", each["expr"])
    }
    assert asked
    assert asked <= known
