from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.launcher.failures import failure_report
from phalanx.launcher.failures.root_cause import WorkerExit, find_root_cause
from phalanx.launcher.host_messages import WorkerDiagnostics
from phalanx.runtime.crash_report import CrashReport

LOST, TIMEOUT = 71, 69


def end(rank: int, code: int | None, order: int, **more: object) -> WorkerExit:
    return WorkerExit(rank, f"worker/{rank}", "host", 100 + rank, code, order, **more)  # type: ignore[arg-type]


def lost(task: str) -> WorkerDiagnostics:
    return WorkerDiagnostics(error=CrashReport("PeerLostError", f"lost {task}", "Traceback ...", task, LOST))


def test_codes_of_phalanx_that_the_program_chose_itself_are_ends_of_its_own() -> None:
    root_cause = find_root_cause([end(0, LOST, 0, diagnostics=lost("worker/1")), end(1, LOST, 1)])
    assert root_cause.cause is not None
    assert root_cause.cause.rank == 1
    root_cause = find_root_cause([end(0, LOST, 0, diagnostics=lost("worker/1")), end(1, 75, 1)])
    assert (root_cause.code, root_cause.cause and root_cause.cause.rank) == (75, 1)
    told = WorkerDiagnostics(error=CrashReport("PreemptedError", "told to end", "Traceback ...", code=75))
    assert (
        find_root_cause([end(0, LOST, 0, diagnostics=lost("worker/1")), end(1, 75, 1, diagnostics=told)]).cause is None
    )


def test_who_is_aborted_by_jax_because_rank_0_is_gone_is_no_cause() -> None:
    aborted = WorkerDiagnostics(output="    @     0x7f4cdad040ee  xla::CoordinationServiceAgent::SetError()")
    for code in (1, -signal.SIGKILL):
        root_cause = find_root_cause([end(0, code, 1), end(1, -signal.SIGABRT, 0, diagnostics=aborted)])
        assert root_cause.cause is not None
        assert root_cause.cause.rank == 0


def test_who_catches_the_loss_of_another_is_no_cause() -> None:
    caught = WorkerDiagnostics(error=CrashReport("RuntimeError", "wrapped", "Traceback ...", "worker/1", code=LOST))
    root_cause = find_root_cause([end(0, 1, 0, diagnostics=caught), end(1, 1, 1)])
    assert root_cause.cause is not None
    assert root_cause.cause.rank == 1


def test_who_does_not_go_down_after_its_own_error_is_the_cause() -> None:
    own = WorkerDiagnostics(error=CrashReport("ValueError", "boom", "Traceback ...", code=1))
    ends = [
        end(0, LOST, 0, diagnostics=lost("worker/1")),
        end(1, -signal.SIGKILL, 1, was_ended_by_launcher=True, is_hung=True, diagnostics=own),
    ]
    root_cause = find_root_cause(ends)
    assert (root_cause.code, root_cause.cause and root_cause.cause.rank) == (1, 1)
    assert "failed with ValueError: boom" in root_cause.reason
    interrupted = WorkerDiagnostics(error=CrashReport("RuntimeError", "wrapped", "Traceback ...", interrupted=True))
    for words in (WorkerDiagnostics(), interrupted):
        root_cause = find_root_cause(
            [ends[0], end(1, -signal.SIGKILL, 1, was_ended_by_launcher=True, is_hung=True, diagnostics=words)]
        )
        assert (root_cause.code, root_cause.cause and root_cause.cause.rank) == (LOST, 1)
        assert "left the job and did not end" in root_cause.reason
    evicted = WorkerDiagnostics(error=CrashReport("EvictedError", "left out", "Traceback ...", code=73))
    assert find_root_cause([end(0, 0, 0), end(1, 73, 1, was_ended_by_launcher=True, diagnostics=evicted)]).success


def test_a_job_without_failure_succeeds() -> None:
    root_cause = find_root_cause([end(0, 0, 0), end(1, 0, 1)])
    assert (root_cause.success, root_cause.reason) == (True, "all tasks ended without error")


def test_an_error_of_its_own_is_the_cause_even_if_it_was_seen_last() -> None:
    root_cause = find_root_cause([end(0, LOST, 0), end(1, TIMEOUT, 1), end(2, 3, 2)])
    assert (root_cause.code, root_cause.cause and root_cause.cause.rank) == (3, 2)


def test_of_several_errors_the_first_is_the_cause() -> None:
    root_cause = find_root_cause([end(0, 1, 1), end(1, 5, 0)])
    assert root_cause.cause is not None
    assert root_cause.cause.rank == 1


def test_a_signal_gives_the_code_that_a_shell_would_give() -> None:
    root_cause = find_root_cause([end(0, LOST, 0), end(1, -signal.SIGKILL, 1)])
    assert root_cause.code == 137
    assert "worker/1" in root_cause.reason
    assert "SIGKILL" in root_cause.reason


def test_who_was_ended_by_the_launcher_is_no_cause() -> None:
    root_cause = find_root_cause([end(0, -signal.SIGTERM, 1, was_ended_by_launcher=True), end(1, 4, 0)])
    assert root_cause.code == 4


def test_leaving_early_without_error_is_the_cause_when_others_missed_that_task() -> None:
    root_cause = find_root_cause([end(0, LOST, 1, diagnostics=lost("worker/1")), end(1, 0, 0), end(2, 0, 2)])
    assert root_cause.code == LOST
    assert root_cause.cause is not None
    assert root_cause.cause.rank == 1
    assert "exit code 0 while" in root_cause.reason


def test_an_early_end_that_nobody_missed_is_none() -> None:
    root_cause = find_root_cause([end(0, 3, 1), end(1, 0, 0)])
    assert root_cause.cause is not None
    assert root_cause.cause.rank == 0


def test_who_hangs_is_named_when_the_others_only_timed_out() -> None:
    ends = [end(0, TIMEOUT, 0), end(1, -9, 1, was_ended_by_launcher=True, is_hung=True)]
    root_cause = find_root_cause(ends)
    assert root_cause.code == TIMEOUT
    assert "worker/1 hung" in root_cause.reason
    assert "worker/1" in failure_report.as_json(root_cause, ends)["check"]


def test_told_to_end_the_job_ends_with_that_signals_code() -> None:
    ends = [end(0, -signal.SIGINT, 0, was_ended_by_launcher=True), end(1, 1, 1, was_ended_by_launcher=True)]
    root_cause = find_root_cause(ends, interrupted_by=signal.SIGINT)
    assert (root_cause.code, root_cause.cause) == (130, None)
    assert "Ctrl-C" in root_cause.reason


def test_the_page_says_who_where_and_what_to_check() -> None:
    words = WorkerDiagnostics(
        phase="all_reduce",
        epoch=1,
        step=37,
        age_s=0.5,
        error=CrashReport(
            "ValueError",
            "boom",
            "Traceback ...\nall frames\nValueError: boom\n",
            folded="Traceback ...\nown frames\nValueError: boom\n",
            origin="/me/train.py:19, in check: raise ValueError()",
        ),
    )
    ends = [
        end(1, 1, 0, diagnostics=words),
        end(
            0,
            -15,
            1,
            was_ended_by_launcher=True,
            is_hung=True,
            diagnostics=WorkerDiagnostics(phase="evaluate", state="S", stacks='File "x.py"'),
        ),
    ]
    text = failure_report.render(find_root_cause(ends), ends, log_dir=Path("/logs"))
    assert "worker/1 (rank 1, pid 101 on host) failed with ValueError: boom" in text
    assert "it was in: all_reduce, epoch 2, step 38" in text
    assert "last in evaluate" in text
    assert 'File "x.py"' in text
    assert "Check: " in text
    assert "/logs" in text
    assert "all frames" in text
    short = failure_report.render(find_root_cause(ends), ends, full=False, color=True, hint="More").splitlines()
    assert short[1].startswith("\x1b[1;31mThe job ended: worker/1")
    assert "/me/train.py:19, in check" in short[2]
    assert short.count("own frames") == 1
    assert "all frames" not in short
    assert short[-2] == "More"
    folded = failure_report.render(find_root_cause(ends), ends, log_dir=Path("/logs"), fold=True)
    assert folded == text.replace("all frames", "own frames")
    ends[0] = end(1, 1, 0, diagnostics=WorkerDiagnostics(error=CrashReport("ValueError", "boom", "of an old version")))
    assert "of an old version" in failure_report.render(find_root_cause(ends), ends, fold=True)


def test_the_page_on_a_terminal_is_short_however_long_the_error_and_however_many_the_tasks() -> None:
    long = "".join(f"line {i}\n" for i in range(500))
    own = WorkerDiagnostics(error=CrashReport("ValueError", "boom", long, folded=long))
    ends = [end(rank, LOST, rank, diagnostics=lost("worker/70")) for rank in range(100)]
    ends[70] = end(70, 1, 200, diagnostics=own)
    root_cause = find_root_cause(ends)
    short = failure_report.render(root_cause, ends, full=False).splitlines()
    assert len(short) <= 36
    assert "line 0" in short
    assert "line 499" in short
    assert "  ... 485 lines" in short
    assert "  ... and 94 more tasks" in short
    assert any(line.startswith("  worker/70") for line in short)
    full = failure_report.render(root_cause, ends)
    assert "line 250" in full
    assert full.count(" said:\n") == 99


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("boom\nmore", "boom"),
        ("in user code:\n\n  File x\n\n  ValueError: shapes\n", "ValueError: shapes"),
        ("Exception encountered when calling Bad.call().\n\nbad shapes\n\nArguments", "calling Bad.call(). bad shapes"),
        ("", ""),
    ],
)
def test_the_reason_is_the_line_of_a_message_that_says_something(message: str, line: str) -> None:
    words = WorkerDiagnostics(error=CrashReport("ValueError", message, "Traceback ..."))
    assert find_root_cause([end(1, 1, 0, diagnostics=words)]).reason.endswith(line or "failed with ValueError")


def test_where_the_lost_task_lived_the_network_is_to_be_looked_at() -> None:
    ends = [end(0, LOST, 0, diagnostics=lost("ps/0")), end(1, 0, 1), end(2, -15, 2, was_ended_by_launcher=True)]
    ends[2] = replace(ends[2], task="ps/0", trains=False)
    assert "Check: the network between worker/0 and ps/0, which was still there" in failure_report.render(
        find_root_cause(ends), ends
    )
    ends[2] = replace(ends[2], is_hung=True)  # as servers do, until they are told to end
    assert "Check: the network between" in failure_report.render(find_root_cause(ends), ends)
    ends[2] = replace(ends[2], diagnostics=WorkerDiagnostics(state="T"))
    assert "ps/0 left the job and did not end" in find_root_cause(ends).reason


def test_a_worker_lost_with_its_host_is_the_cause_of_what_others_lost() -> None:
    root_cause = find_root_cause([end(0, LOST, 0, diagnostics=lost("worker/1")), end(1, None, 1)])
    assert root_cause.cause is not None
    assert root_cause.cause.rank == 1


def test_a_missing_backend_is_named_with_the_option_that_chooses_an_installed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_report, "installed_backends", lambda: ["jax", "torch"])
    missing = WorkerDiagnostics(error=CrashReport("ModuleNotFoundError", "No module named 'tensorflow'", "Traceback"))
    ends = [end(0, 1, 0, diagnostics=missing)]
    page = failure_report.render(find_root_cause(ends), ends)
    assert (
        "Check: that tensorflow is installed, or choose another backend with --backend jax or --backend torch;" in page
    )
    own = WorkerDiagnostics(error=CrashReport("ModuleNotFoundError", "No module named 'mine'", "Traceback"))
    ends = [end(0, 1, 0, diagnostics=own)]
    assert "--backend" not in failure_report.render(find_root_cause(ends), ends)


def test_stacks_without_frames_are_left_out() -> None:
    """A process that collects garbage while it exits has none."""
    empty = WorkerDiagnostics(state="R", stacks="Thread 0x1 (most recent call first):\n  <no Python frame>\n")
    ends = [end(0, 1, 0), end(1, -9, 1, is_hung=True, diagnostics=empty)]
    assert "Stacks of" not in failure_report.render(find_root_cause(ends), ends)


def test_one_that_lost_another_is_not_said_to_have_failed() -> None:
    assert end(0, 1, 0).failure == "worker/0 (rank 0) failed with exit code 1"
    assert end(0, 71, 0).failure == "worker/0 (rank 0) ended, PeerLostError, with exit code 71"
