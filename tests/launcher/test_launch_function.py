"""`launch`: jobs of functions."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.errors import CollectiveTimeoutError, ConfigurationError, PeerLostError
from phalanx.launcher.launch_function import launch
from phalanx.launcher.watching.job_follower import read_view
from phalanx.runtime import function_call, pickling
from phalanx.runtime.worker_traceback import WorkerTraceback


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    files = psutil.Process().num_fds()
    yield
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before
    assert psutil.Process().num_fds() <= files


def own_rank() -> int:
    import json

    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def describe(factor: int, *, offset: int = 0) -> tuple[int, int]:
    return own_rank(), factor * own_rank() + offset


def test_results_come_back_in_rank_order() -> None:
    assert launch(describe, workers=3, args=(10,), kwargs={"offset": 1}) == [(0, 1), (1, 11), (2, 21)]


def test_a_closure_and_a_lambda_can_be_launched() -> None:
    base = {"value": 40}
    assert launch(lambda: base["value"] + 2, workers=1) == [42]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "long"])
def test_a_start_takes_some_time(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="start_timeout_s"):
        launch(describe, start_timeout_s=seconds)


def test_a_start_may_take_for_ever() -> None:
    assert launch(own_rank, start_timeout_s=float("inf")) == [0, 1]


def test_none_is_a_result_too() -> None:
    assert launch(lambda: None) == [None, None]


def test_a_large_result_comes_back_whole() -> None:
    results = launch(lambda: os.urandom(1) * 5_000_000)
    assert [len(result) for result in results] == [5_000_000, 5_000_000]


def fail_on_1() -> int:
    if own_rank() == 1:
        raise KeyError("bad key")
    return 0


def test_an_error_is_raised_here_with_the_workers_traceback() -> None:
    with pytest.raises(KeyError, match="bad key") as caught:
        launch(fail_on_1)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerTraceback)
    assert cause.task == "worker/1"
    assert "in fail_on_1" in str(cause)
    assert "worker/1 (rank 1" in caught.value.__notes__[0]


def test_errors_of_phalanx_stay_what_they_are() -> None:
    def time_out() -> None:
        if own_rank() == 0:
            raise CollectiveTimeoutError("late")

    with pytest.raises(CollectiveTimeoutError, match="late"):
        launch(time_out)


def lose_peer() -> None:
    if own_rank() == 0:
        raise PeerLostError("lost worker/1", rank=1, task="worker/1", host="here")
    raise ValueError("the cause")


def test_the_cause_is_raised_and_not_its_consequence() -> None:
    with pytest.raises(ValueError, match="the cause"):
        launch(lose_peer)


def test_an_error_that_cannot_be_pickled_keeps_its_text() -> None:
    def fail() -> None:
        class Strange(Exception):
            def __init__(self, one: int, two: int):
                super().__init__("only one argument")
                self.lock = threading.Lock()

        raise Strange(1, 2)

    with pytest.raises(RuntimeError, match="Strange: only one argument"):
        launch(fail, workers=1)


@pytest.mark.parametrize("text", [None, "caf\udce9"])
def test_an_error_without_proper_words_is_raised_all_the_same(text: str | None) -> None:
    def fail() -> None:
        class Strange(Exception):
            def __str__(self) -> str:
                return text  # type: ignore[return-value]  # on purpose

        raise Strange

    with pytest.raises(Exception) as caught:
        launch(fail, workers=1)
    assert type(caught.value).__name__ == "Strange"
    assert isinstance(caught.value.__cause__, WorkerTraceback)


def test_a_thread_does_not_keep_a_worker_whose_function_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_GRACE", "0.5")

    def fail() -> None:
        threading.Thread(target=threading.Event().wait).start()
        raise KeyError("the real error")

    with pytest.raises(KeyError, match="the real error"):
        launch(fail, workers=1)


OWN_MODULE = """
class Own(Exception):
    pass
"""


@pytest.fixture
def own_folder(tmp_path: Path) -> str:
    """A folder with a module that only workers import."""
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    return str(tmp_path)


def test_an_error_whose_class_only_the_worker_has_keeps_its_text_and_traceback(own_folder: str) -> None:
    def fail() -> None:
        sys.path.append(own_folder)
        import own_module

        raise own_module.Own("the real error")

    with pytest.raises(RuntimeError, match="Own: the real error") as caught:
        launch(fail, workers=1)
    assert "in fail" in str(caught.value.__cause__)


def test_a_result_whose_class_only_the_worker_has_is_named(own_folder: str) -> None:
    def make() -> object:
        sys.path.append(own_folder)
        import own_module

        return own_module.Own() if own_rank() == 1 else None

    with pytest.raises(ModuleNotFoundError, match="own_module") as caught:
        launch(make)
    assert "The result of worker/1 (rank 1)" in caught.value.__notes__[0]


def test_logs_that_are_gone_do_not_hide_the_error(tmp_path: Path) -> None:
    logs = tmp_path / "logs"

    def fail() -> None:
        shutil.rmtree(logs)
        raise KeyError("the real error")

    with pytest.raises(KeyError, match="the real error") as caught:
        launch(fail, workers=1, log_dir=logs)
    assert any("cannot be written" in note for note in caught.value.__notes__)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TypeError, match="pickle"):
        launch(threading.Lock, workers=1)


def test_a_worker_that_dies_without_an_error_is_a_lost_peer() -> None:
    def die() -> None:
        import signal

        if own_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLostError, match=r"worker/1.*SIGKILL") as caught:
        launch(die)
    assert (caught.value.rank, caught.value.task) == (1, "worker/1")


def test_a_worker_that_leaves_without_a_result_is_a_lost_peer() -> None:
    with pytest.raises(PeerLostError, match=r"without a result"):
        launch(lambda: os._exit(0), workers=1)


def test_sys_exit_in_a_function_is_no_success() -> None:
    def leave() -> None:
        raise SystemExit(0)

    with pytest.raises(PeerLostError, match=r"without a result"):
        launch(leave, workers=1)


def test_output_is_shown_with_its_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    launch(lambda: print("hello"), log_dir=tmp_path / "logs")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[worker/0] hello", "[worker/1] hello"]
    assert (tmp_path / "logs" / "worker-1.log").read_text() == "hello\n"
    view = read_view(tmp_path / "logs")
    assert view.started is not None
    assert view.started.program == "phalanx.launch(test_output_is_shown_with_its_task.<locals>.<lambda>)"
    assert view.status == "succeeded"


def test_it_can_be_called_from_any_thread() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(launch(own_rank)))
    thread.start()
    thread.join(60)
    assert results == [[0, 1]]


@pytest.fixture
def ignored_ends() -> Iterator[None]:
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, former)


@pytest.mark.usefixtures("ignored_ends")
def test_a_process_that_ignores_the_ends_of_its_children_gets_results_and_errors() -> None:
    assert launch(own_rank) == [0, 1]
    with pytest.raises(KeyError, match="bad key"):
        launch(fail_on_1)
    with pytest.raises(PeerLostError, match=r"worker/0.*SIGKILL"):
        launch(lambda: os.kill(os.getpid(), signal.SIGKILL), workers=1)
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN


@pytest.mark.usefixtures("ignored_ends")
def test_a_thread_cannot_change_that_and_gets_them_all_the_same() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch, own_rank).result(60) == [0, 1]
        with pytest.raises(KeyError, match="bad key"):
            pool.submit(launch, fail_on_1).result(60)
        with pytest.raises(PeerLostError, match="ignores SIGCHLD"):
            pool.submit(launch, lambda: os.kill(os.getpid(), signal.SIGKILL), 1).result(60)


def test_an_interrupt_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.launcher import job_supervisor

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_supervisor.JobSupervisor, "_advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(own_rank)


def test_bad_arguments_are_explained() -> None:
    with pytest.raises(ConfigurationError, match="workers=0"):
        launch(own_rank, workers=0)
    with pytest.raises(ConfigurationError, match="pass a function"):
        launch(own_rank.__name__)  # type: ignore[arg-type]


def test_functions_of_torch_and_of_keras_travel() -> None:
    """Cloudpickle takes `torch.ops` for something that the function refers to."""
    torch = pytest.importorskip("torch")
    from keras import ops

    def both() -> object:
        return torch, ops

    content = pickling.dumps(both)
    assert pickle.loads(content)()[0] is torch


def test_code_that_travels_keeps_its_file_for_tracebacks_and_autograph() -> None:
    def outer() -> object:
        return lambda: None

    loaded = pickle.loads(pickling.dumps(outer))
    assert loaded.__code__ is not outer.__code__
    assert loaded.__code__.co_filename == loaded().__code__.co_filename == __file__


class _OfTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


class _WithLock(_OfTwo):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)
        self.lock = threading.Lock()


def test_an_error_comes_back_also_if_its_init_has_other_arguments() -> None:
    found = function_call.decode_result(function_call.encode_error(_OfTwo(1, 2)))
    assert isinstance(found, function_call.CallRaised)
    assert isinstance(found.error, _OfTwo)
    assert (str(found.error), found.error.first) == ("1 and 2", 1)
    assert "_OfTwo: 1 and 2" in found.traceback


def test_an_error_that_cannot_be_pickled_has_a_stand_in() -> None:
    found = function_call.decode_result(function_call.encode_error(_WithLock(1, 2)))
    assert isinstance(found, function_call.CallRaised)
    assert (type(found.error), str(found.error)) == (RuntimeError, "_WithLock: 1 and 2")
