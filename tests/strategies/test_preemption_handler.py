"""Custom loops that are preempted save after the same step on all replicas, end, and resume there."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.errors import ConfigurationError, PreemptedError
from phalanx.experimental import PreemptionCheckpointHandler, TerminationConfig
from phalanx.strategies import preemption_handler
from tests.launcher.conftest import Launcher
from tests.strategies.preempted_program import PREEMPTED_AT, STEPS, straight
from tests.supervisor.models import make_data, make_model
from tests.support.backends import BACKENDS

PROGRAM = str(Path(__file__).with_name("preempted_program.py"))


def train(model: Any, handler: PreemptionCheckpointHandler, after: Callable[[int], None] = lambda step: None) -> None:
    x, y = make_data()
    while (step := handler.total_run_calls) < STEPS:
        batch = slice(16 * step, 16 * step + 16)
        handler.run(model.train_on_batch, x[batch], y[batch])
        after(step)


def preempt(step: int) -> None:
    if step == PREEMPTED_AT:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("where", ["folder", "store"])
def test_a_preempted_loop_resumes_after_the_same_step(tmp_path: Path, where: str) -> None:
    directory = str(tmp_path / "saved") if where == "folder" else f"memory://{tmp_path.name}"
    model = make_model()
    with pytest.raises(PreemptedError, match=f"after {PREEMPTED_AT + 1} steps"):
        train(model, PreemptionCheckpointHandler(None, model, directory), preempt)
    again = make_model(seed=2)
    handler = PreemptionCheckpointHandler(None, again, directory)
    assert handler.total_run_calls == PREEMPTED_AT + 1
    with handler.watch_preemption_scope():
        train(again, handler)
    for one, other in zip(again.get_weights(), straight().get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_program_says_how_it_is_warned_how_to_save_and_how_to_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption_handler, "POLL_S", 0.001)
    warned, asked, calls = threading.Event(), threading.Event(), []

    def watch() -> bool:
        if not asked.is_set():
            asked.set()
            raise ConnectionError("the server of metadata does not answer")
        return warned.is_set()

    def exit_now() -> None:
        calls.append("exit")
        raise SystemExit(42)

    config = TerminationConfig(watch, exit_now, save_fn=lambda *arguments: calls.append(arguments))
    model = make_model()
    handler = PreemptionCheckpointHandler(None, model, tmp_path / "saved", config)
    handler.save_checkpoint_if_preempted("not yet")
    warned.set()
    (watcher,) = (thread for thread in threading.enumerate() if thread.name == "phalanx-termination-watcher")
    watcher.join(30)
    with pytest.raises(SystemExit) as exit_:
        handler.save_checkpoint_if_preempted("argument")
    assert exit_.value.code == 42
    assert calls == [("argument",), "exit"]
    assert asked.is_set()


def test_most_of_a_grace_period_is_trained_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(preemption_handler.time, "monotonic", lambda: now)
    notice = preemption_handler._PreemptionNotice(60.0)
    assert not notice.is_time_to_save()
    notice.note_duration(5.0)
    notice.signal()
    assert not notice.is_time_to_save()
    now += 44.0
    assert not notice.is_time_to_save()
    now += 1.0
    assert notice.is_time_to_save(), "three steps before the end"


def test_a_checkpoint_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Pass checkpoint_dir"):
        PreemptionCheckpointHandler(None, make_model())
    with pytest.raises(ConfigurationError, match=r"pass a Keras model, or a tf\.train\.Checkpoint"):
        PreemptionCheckpointHandler(None, object(), tmp_path)


@pytest.mark.parametrize("manages", [False, True])
def test_a_checkpoint_of_tensorflow_is_saved_and_restored(tmp_path: Path, manages: bool) -> None:
    tf = pytest.importorskip("tensorflow")

    def handler(epoch: Any) -> PreemptionCheckpointHandler:
        checkpoint = tf.train.Checkpoint(epoch=epoch)
        if manages:
            return PreemptionCheckpointHandler(None, tf.train.CheckpointManager(checkpoint, str(tmp_path), 2))
        return PreemptionCheckpointHandler(None, checkpoint, tmp_path)

    epoch = tf.Variable(0)
    first = handler(epoch)
    first.run(epoch.assign_add, 1)
    first.run(epoch.assign_add, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(PreemptedError, match="after 2 steps"):
        first.run(epoch.assign_add, 1)
    again = tf.Variable(0)
    assert handler(again).total_run_calls == 2
    assert int(again) == 2


@pytest.mark.slow  # one process does the same above
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_workers_are_preempted_together(backend: str, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    settings = {**launcher.environment, "KERAS_BACKEND": backend}
    for how, code in (("signal", PreemptedError.exit_code), ("never", 0)):
        process = launcher.start_run("--workers", "2", PROGRAM, str(tmp_path), how, env=settings)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, out + err
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in (0, 1)]
    assert [found["began"] for found in results] == [PREEMPTED_AT + 1] * 2
    for weights in zip(*[found["weights"] for found in results], results[0]["straight"], strict=True):
        np.testing.assert_allclose(weights[0], weights[1], atol=0)
        np.testing.assert_allclose(weights[0], weights[2], atol=1e-5)
    assert not (tmp_path / "preempted-1").exists(), "the chief alone saves"
    launcher.assert_all_gone()
