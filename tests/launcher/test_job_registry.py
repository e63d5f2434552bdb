"""Which jobs `phalanx status` knows of, also where several hosts share the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.config.environment_variables import JOBS_DIRECTORY
from phalanx.errors import ConfigurationError
from phalanx.launcher.watching import job_registry
from phalanx.launcher.watching.job_registry import registered, running
from phalanx.launcher.watching.status_report import scale, status


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(JOBS_DIRECTORY, str(tmp_path))
    return tmp_path


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_job_is_known_while_it_runs() -> None:
    with registered("job", ["train.py", "\udcff"]):
        (entry,) = running()
        assert (entry.job, entry.program, entry.is_local) == ("job", "train.py ?", True)
    assert running() == []


def test_a_process_may_have_any_name() -> None:
    comm = Path("/proc/self/comm")  # the kernel cuts names off, also in the middle of a character
    own = comm.read_bytes()
    comm.write_bytes("trainierungsläufe".encode()[:14])
    try:
        with registered("job", ["train.py"]):
            assert [entry.job for entry in running()] == ["job"]
    finally:
        comm.write_bytes(own)


def test_only_what_was_killed_here_is_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "job.json"
    with registered("job", ["train.py"]):
        change(path, pid=ended_pid(), processes="another-host pid:[1]", host="another-host")
        assert [entry.is_local for entry in running()] == [False]
        assert status(None) == 0
        assert "runs on another-host" in capsys.readouterr().out
        with pytest.raises(ConfigurationError, match="No job is running here"):
            scale(None, 2)
        with pytest.raises(ConfigurationError, match="runs on another-host"):
            scale("job", 2)
        change(path, processes=job_registry._processes())
        assert running() == []
        assert not path.exists()


def test_an_entry_of_a_killed_launcher_goes_even_if_its_number_is_used_again(folder: Path) -> None:
    with registered("job", ["train.py"]):
        change(folder / "job.json", started="1")  # this process has the number, and started later
        assert running() == []
        assert not (folder / "job.json").exists()


@pytest.mark.parametrize("pid", [0, -1])
def test_an_entry_whose_number_means_several_processes_goes(folder: Path, pid: int) -> None:
    with registered("job", ["train.py"]):
        change(folder / "job.json", pid=pid, started="")
        assert running() == []


def test_names_do_not_control_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with registered("job", ["\x1b]0;title\x07\x1b[31mtrain.py"]):
        assert status(None) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_no_entry_is_left_alone(folder: Path) -> None:
    with registered("job", ["train.py"]):
        change(folder / "job.json", pid="1")
        assert running() == []
        assert (folder / "job.json").exists()


def test_the_entry_of_another_job_of_the_same_id_stays(folder: Path) -> None:
    with registered("job", ["one.py"]):
        with registered("job", ["two.py"]):
            pass
        assert [entry.program for entry in running()] == ["one.py"]


@pytest.mark.timeout(60)
def test_what_others_put_into_a_shared_folder_is_not_followed(folder: Path) -> None:
    os.mkfifo(folder / "pipe.json")
    (folder / "endless.json").symlink_to("/dev/zero")
    with registered("job", ["train.py"]):
        (folder / "link.json").symlink_to(folder / "job.json")
        assert [entry.job for entry in running()] == ["job"]


def test_who_has_no_home_has_no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(JOBS_DIRECTORY)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    with registered("job", ["train.py"]):
        assert running() == []
