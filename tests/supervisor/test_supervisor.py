"""The supervisor in one process: what it restores, when it saves, how it ends."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import phalanx
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory, read
from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.evaluator import completion_marker
from phalanx.runtime.owner_records import OwnerFile
from phalanx.runtime.write_claim import WriteClaim
from tests.supervisor.models import BATCH, STEPS, make_data, make_model, state_of

BOUND_S = 30.0
OFTEN = 1e-6
"""Seconds: at every step boundary."""


def steps_in(folder: Path) -> list[int]:
    return [read(path).step for path in CheckpointDirectory(folder).paths()]


def fit(model: Any, epochs: int = 1, **arguments: Any) -> Any:
    return model.fit(*make_data(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments)


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends `fit` with an error after some batches."""

    def __init__(self, batches: int):
        super().__init__()
        self._left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            raise Interrupted


def test_a_session_saves_at_its_beginning_and_at_its_end(tmp_path: Path) -> None:
    model = make_model()
    with phalanx.Supervisor(tmp_path / "run").managed_session(model) as session:
        assert session.restored is None
        assert steps_in(tmp_path / "run") == [0]
        fit(model, 2)
        assert session.global_step == 2 * STEPS
    assert steps_in(tmp_path / "run") == [0, 2 * STEPS]
    assert completion_marker.has_marker(tmp_path / "run")


def test_the_next_session_goes_on_with_weights_optimizer_step_and_epoch(tmp_path: Path) -> None:
    first, whole, again = make_model(), make_model(), make_model(seed=2)
    with phalanx.Supervisor(tmp_path).managed_session(first):
        fit(first, 2)
    fit(whole, 5)
    with phalanx.Supervisor(tmp_path).managed_session(again) as session:
        assert session.restored is not None
        assert session.global_step == 2 * STEPS
        for one, other in zip(state_of(again), state_of(first), strict=True):
            np.testing.assert_array_equal(one, other)
        history = fit(again, 5)
    assert history.epoch == [2, 3, 4]
    for one, other in zip(state_of(again), state_of(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_what_was_finished_is_not_trained_again(tmp_path: Path) -> None:
    model = make_model()
    with phalanx.Supervisor(tmp_path).managed_session(model):
        fit(model, 1)
        fit(model, 3)
    again = make_model(seed=2)
    with phalanx.Supervisor(tmp_path).managed_session(again) as session:
        first, second, third = fit(again, 1), fit(again, 4), fit(again, 2)
        assert session.global_step == 4 * STEPS + 1 * STEPS + 2 * STEPS
    assert (first.epoch, second.epoch, third.epoch) == ([], [3], [0, 1])


def test_fit_is_saved_as_it_goes_between_two_steps(tmp_path: Path) -> None:
    model, whole = make_model(), make_model()
    seen: list[list[Any]] = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(self.model.get_weights())

    fit(whole, 1, callbacks=[Note()])
    supervisor = phalanx.Supervisor(tmp_path, save_model_secs=OFTEN, saver=phalanx.Saver(max_to_keep=None))
    with supervisor.managed_session(model):
        fit(model, 1)
    assert steps_in(tmp_path) == list(range(STEPS + 1))
    other = make_model(seed=2)
    for path, weights in zip(CheckpointDirectory(tmp_path).paths()[1:], seen, strict=True):
        other.load_weights(path)
        for one, expected in zip(other.get_weights(), weights, strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


def test_saving_in_the_middle_changes_no_number(tmp_path: Path) -> None:
    watched, alone = make_model(), make_model()
    with phalanx.Supervisor(tmp_path, save_model_secs=OFTEN).managed_session(watched):
        fit(watched, 2)
    fit(alone, 2)
    for one, other in zip(state_of(watched), state_of(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_an_error_inside_saves_nothing_stops_the_loops_and_is_raised_again(tmp_path: Path) -> None:
    model = make_model()
    supervisor = phalanx.Supervisor(tmp_path)
    calls, threads = threading.Event(), []

    def train() -> None:
        with supervisor.managed_session(model):
            threads.append(supervisor.loop(0.01, calls.set))
            assert calls.wait(BOUND_S)
            fit(model, 1, callbacks=[Interrupt(3)])

    with pytest.raises(Interrupted):
        train()
    assert not threads[0].is_alive()
    assert supervisor.should_stop()
    assert steps_in(tmp_path) == [0]
    assert not completion_marker.has_marker(tmp_path)
    assert "fit" not in vars(model)


def test_a_program_that_failed_goes_on_in_its_epoch(tmp_path: Path) -> None:
    model = make_model()
    supervisor = phalanx.Supervisor(tmp_path, save_model_secs=OFTEN)
    with pytest.raises(Interrupted), supervisor.managed_session(model):
        fit(model, 3, callbacks=[Interrupt(STEPS + 4)])
    assert steps_in(tmp_path)[-1] == STEPS + 3, "the callback that failed came before ours"
    again = make_model(seed=2)
    with phalanx.Supervisor(tmp_path).managed_session(again) as session:
        history = fit(again, 3)
        assert history.epoch == [1, 2]
        assert session.global_step == STEPS + 3 + 2 * STEPS


def test_an_error_of_a_loop_ends_fit_and_is_raised_at_the_end(tmp_path: Path) -> None:
    model = make_model()
    supervisor = phalanx.Supervisor(tmp_path)

    def fail() -> None:
        raise Interrupted

    def train() -> None:
        with supervisor.managed_session(model):
            supervisor.loop(10, fail)
            assert supervisor.wait_for_stop(BOUND_S)
            fit(model, 100)

    with pytest.raises(Interrupted):
        train()
    assert steps_in(tmp_path) == [0, 1], "what was reached is saved all the same"


def test_an_error_of_a_custom_thread_is_raised_at_the_end_of_the_session() -> None:
    supervisor = phalanx.Supervisor()

    def work() -> None:
        with supervisor.stop_on_exception():
            raise Interrupted

    def train() -> None:
        with supervisor.managed_session(make_model()):
            thread = threading.Thread(target=work)
            thread.start()
            assert supervisor.wait_for_stop(BOUND_S)
            thread.join(BOUND_S)
            assert not thread.is_alive()

    with pytest.raises(Interrupted):
        train()
    assert supervisor.should_stop()


def test_a_session_that_saves_only_on_request_withdraws_the_end_of_a_former_one(tmp_path: Path) -> None:
    completion_marker.write_marker(tmp_path, WriteClaim(tmp_path, "model.ckpt"))
    supervisor = phalanx.Supervisor(tmp_path, save_model_secs=0)
    with supervisor.managed_session(make_model()):
        assert not completion_marker.has_marker(tmp_path), "or an evaluator would end while this trains"
    assert completion_marker.has_marker(tmp_path)


def test_a_directory_that_becomes_full_at_the_end_fails_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with phalanx.Supervisor(tmp_path, save_model_secs=0).managed_session(make_model()):
        monkeypatch.setattr(completion_marker, "write_file", full)
    assert "finished cannot be written" in caplog.text


def test_a_session_that_cannot_begin_leaves_the_directory_to_others(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-000000001.weights.h5").write_bytes(b"damaged")
    supervisor = phalanx.Supervisor(tmp_path)
    with pytest.raises(ConfigurationError, match="None of the checkpoints"), supervisor.managed_session(make_model()):
        pytest.fail("it began")
    assert not OwnerFile(tmp_path / ".model.ckpt.owner", tmp_path / "lock").is_alive()
    (tmp_path / "model.ckpt-000000001.weights.h5").unlink()
    with supervisor.managed_session(make_model()):  # and itself to the next session
        pass


def test_a_stop_from_another_thread_leaves_requests_to_the_training_thread() -> None:
    model, asks, served_by, late = make_model(), threading.Event(), [], []
    supervisor = phalanx.Supervisor(stop_grace_secs=0.2)

    def stop() -> None:
        try:
            supervisor.stop()
        except RuntimeError as error:
            late.append(error)

    with supervisor.managed_session(model) as session:

        def ask() -> None:
            asks.set()
            served_by.append(session.requests.call(threading.get_ident, BOUND_S))

        loop = supervisor.loop(None, ask)
        assert asks.wait(BOUND_S)
        stopping = threading.Thread(target=stop)
        stopping.start()
        stopping.join()
        while loop.is_alive():
            session.should_stop()
            loop.join(0.01)
    assert served_by == [threading.get_ident()], "which nothing else may take them from"
    assert len(late) == 1


def test_a_loop_of_ones_own_is_saved_where_it_asks_whether_to_stop(tmp_path: Path) -> None:
    model = make_model()
    x, y = make_data()
    supervisor = phalanx.Supervisor(tmp_path, save_model_secs=OFTEN, saver=phalanx.Saver(None))
    with supervisor.managed_session(model) as session:
        while not supervisor.should_stop():
            model.train_on_batch(x[:BATCH], y[:BATCH])
            if supervisor.global_step == 3:
                session.should_stop()
                supervisor.request_stop()
    assert steps_in(tmp_path) == [0, 1, 2, 3]


def test_saving_by_hand_works_beside_it_also_from_another_thread(tmp_path: Path) -> None:
    model = make_model()
    supervisor = phalanx.Supervisor(tmp_path / "run", saver=phalanx.Saver(max_to_keep=2))
    saver = supervisor.saver
    assert saver is not None
    saved: list[str | None] = []
    with supervisor.managed_session(model) as session:
        assert saver.save(session, supervisor.save_path, global_step=7) == str(
            tmp_path / "run" / "model.ckpt-000000007.weights.h5"
        )
        supervisor.loop(60, lambda: saved.append(saver.save(session, tmp_path / "other" / "mine")))
        while not saved:
            fit(model, 1)
        step = read(Path(saved[0])).step
        assert 0 <= step <= session.global_step
        other = make_model(seed=2)
        saver.restore(session, saved[0])
        other.load_weights(saved[0])
        for one, expected in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(one, expected)
    assert len(steps_in(tmp_path / "run")) == 2
    with pytest.raises(RuntimeError, match="managed session is over"):
        run_in_thread(lambda: session.save())


def run_in_thread(function: Any) -> Any:
    result: list[Any] = []

    def target() -> None:
        try:
            result.append(function())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(BOUND_S)
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def test_nothing_is_saved_by_itself_without_a_saver_or_seconds(tmp_path: Path) -> None:
    for folder, arguments in (("none", {"saver": None}), ("zero", {"save_model_secs": 0})):
        model = make_model()
        with phalanx.Supervisor(tmp_path / folder, **arguments).managed_session(model):
            fit(model)
        assert steps_in(tmp_path / folder) == []
    model = make_model()
    with phalanx.Supervisor().managed_session(model) as session:
        fit(model)
        with pytest.raises(ConfigurationError, match="has no logdir"):
            session.save()
        assert session.save(tmp_path / "by" / "hand") is not None


def test_init_fn_gives_the_first_values_only(tmp_path: Path) -> None:
    for _ in range(2):
        model, calls = make_model(), []
        supervisor = phalanx.Supervisor(tmp_path, init_fn=calls.append)
        with supervisor.managed_session(model) as session:
            pass
        assert calls == ([session] if session.restored is None else [])
    assert session.restored is not None


def test_a_counter_of_ones_own_is_restored(tmp_path: Path) -> None:
    for begin, end in ((0, 5), (5, 10)):
        counter = keras.Variable(0, dtype="int64", trainable=False)
        model = make_model()
        with phalanx.Supervisor(tmp_path, global_step=counter).managed_session(model) as session:
            assert session.global_step == begin
            counter.assign(end)
    assert steps_in(tmp_path) == [0, 5, 10]
    with phalanx.Supervisor(tmp_path, global_step=lambda: 77).managed_session(make_model()):
        pass
    assert steps_in(tmp_path)[-1] == 77


def test_a_disk_that_is_full_later_is_a_warning_and_at_the_end_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    supervisor = phalanx.Supervisor(tmp_path / "run", save_model_secs=OFTEN)

    def train() -> None:
        with supervisor.managed_session(model):
            for path in (tmp_path / "run").iterdir():
                path.unlink()
            (tmp_path / "run").rmdir()
            (tmp_path / "run").write_text("in the way")
            fit(model)

    with pytest.raises(OSError, match="cannot be written"):
        train()
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == STEPS
    assert "Training continues; the next attempt is in" in caplog.text


def test_a_directory_that_cannot_be_written_is_found_out_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OSError, match="The checkpoint of step 0 cannot be written"),
        phalanx.Supervisor(tmp_path / "file" / "run").managed_session(make_model()),
    ):
        pytest.fail("the session must not begin")


def test_event_files_have_steps_per_second_logs_and_what_they_are_given(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tests.supervisor.event_files import scalars

    model = make_model()
    supervisor = phalanx.Supervisor(tmp_path, save_summaries_secs=OFTEN)
    with supervisor.managed_session(model) as session:
        fit(model)
        supervisor.summary_computed(session, {"mine": 0.5})
        supervisor.summary_computed(session, {"mine": np.float32(0.25)}, global_step=99)
    found = scalars(tmp_path)
    assert found["mine"] == {STEPS: 0.5, 99: 0.25}
    assert set(found["epoch_loss"]) == {STEPS}
    assert sorted(found["global_step/sec"]) == list(range(1, STEPS + 1))
    assert found["global_step/sec"][1] > 0


def test_without_the_package_summaries_that_were_asked_for_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.monitoring.event_writer.is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"need the package tensorboardX.*pip install tensorboardX"):
        phalanx.Supervisor(tmp_path, save_summaries_secs=10)
    model = make_model()
    supervisor = phalanx.Supervisor(tmp_path)
    with (
        supervisor.managed_session(model) as session,
        pytest.raises(ConfigurationError, match="pip install tensorboardX"),
    ):
        supervisor.summary_computed(session, {"a": 1})


# Another process than the chief, without a strategy in common.


def test_who_is_not_the_chief_waits_for_its_checkpoint(tmp_path: Path) -> None:
    chief, other = make_model(), make_model(seed=2)
    with phalanx.Supervisor(tmp_path).managed_session(chief):
        fit(chief)
    names = sorted(os.listdir(tmp_path))
    supervisor = phalanx.Supervisor(tmp_path, is_chief=False)
    with supervisor.managed_session(other) as session:
        assert session.restored is not None
        assert session.global_step == STEPS
        fit(other)
        assert supervisor.saver is not None
        assert supervisor.saver.save(session) is None
        supervisor.summary_computed(session, {"a": 1})
    assert sorted(os.listdir(tmp_path)) == names, "it writes nothing"


def test_a_chief_that_never_comes_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_RENDEZVOUS_TIMEOUT", "0.2")
    begun = time.monotonic()
    with (
        pytest.raises(RendezvousError, match=r"The chief did not save a checkpoint in .* within 0\.2 s"),
        phalanx.Supervisor(tmp_path, is_chief=False).managed_session(make_model()),
    ):
        pytest.fail("the session must not begin")
    assert time.monotonic() - begun < BOUND_S


@pytest.mark.parametrize(
    ("task", "expected"),
    [(("worker", 0), True), (("worker", 1), False), (("ps", 0), False), (("evaluator", 0), False)],
)
def test_the_cluster_says_who_is_the_chief(
    task: tuple[str, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
    config = {"cluster": cluster, "task": {"type": task[0], "index": task[1]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert phalanx.Supervisor().is_chief is expected


# Arguments that do not fit.


def test_a_model_that_is_not_built_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    with (
        pytest.raises(ConfigurationError, match="The model is not built"),
        phalanx.Supervisor(tmp_path).managed_session(model),
    ):
        pass
    with (
        pytest.raises(ConfigurationError, match="takes the Keras model"),
        phalanx.Supervisor(tmp_path).managed_session("grpc://localhost"),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_model_secs": -1}, "save_model_secs is -1"),
        ({"save_model_secs": "often"}, "save_model_secs is 'often'"),
        ({"stop_grace_secs": float("inf")}, "stop_grace_secs is inf"),
        ({"saver": "saver"}, "pass a phalanx.Saver"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        phalanx.Supervisor("run", **arguments)
    with pytest.raises(ConfigurationError, match="max_to_keep is -1"):
        phalanx.Saver(-1)


def test_one_session_at_a_time(tmp_path: Path) -> None:
    supervisor = phalanx.Supervisor(tmp_path)
    with (
        supervisor.managed_session(make_model()),
        pytest.raises(ConfigurationError, match="has a managed session already"),
        supervisor.managed_session(make_model()),
    ):
        pass


def test_what_a_callback_saves_at_the_end_of_an_epoch_has_that_epoch(tmp_path: Path) -> None:
    model, again = make_model(), make_model(seed=2)
    supervisor = phalanx.Supervisor(tmp_path / "run", save_model_secs=3600)

    class Save(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            supervisor.saver.save(session)
            if epoch == 1:
                raise Interrupted

    with pytest.raises(Interrupted), supervisor.managed_session(model) as session:
        fit(model, 4, callbacks=[Save()])
    with phalanx.Supervisor(tmp_path / "run").managed_session(again) as session:
        assert fit(again, 4).epoch == [2, 3]
        assert session.global_step == 4 * STEPS
