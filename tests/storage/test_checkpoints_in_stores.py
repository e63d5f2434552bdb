"""Checkpoints, claims, the evaluator and the supervisor with a directory in a store."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import phalanx
from phalanx.checkpoint import checkpoint_directory
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.errors import SupersededError
from phalanx.evaluator import sidecar_evaluator
from phalanx.evaluator.checkpoint_watcher import DELIVERY_TIMEOUT_S, CheckpointWatcher
from phalanx.runtime import write_claim
from phalanx.runtime.write_claim import Owner, WriteClaim
from phalanx.storage.files import list_names, write_file
from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import RemotePath
from tests.supervisor.models import STEPS, make_data, make_model


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> RemotePath:
    found: RemotePath = request.getfixturevalue(request.param)
    return found


def names(store: RemotePath) -> list[str]:
    return sorted(name for name in list_names(store) if not name.startswith("."))


def test_checkpoints_come_back_and_the_oldest_are_deleted(store: RemotePath) -> None:
    model = make_model()
    directory = CheckpointDirectory(store, keep=2)
    for step in (1, 2, 3):
        directory.save(model, step, {"epoch": step})
    assert names(store) == ["model.ckpt-000000002.weights.h5", "model.ckpt-000000003.weights.h5"]
    other = make_model(seed=2)
    found = CheckpointDirectory(str(store)).restore(other)
    assert found is not None
    assert (found.step, found.state["epoch"]) == (3, 3)
    for one, another in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, another)


def test_a_damaged_checkpoint_and_what_killed_processes_left_are_not_in_the_way(store: RemotePath) -> None:
    directory = CheckpointDirectory(store)
    directory.save(make_model(), 1)
    newest = directory.save(make_model(), 2)
    write_file(newest, newest.read_bytes()[:-1])
    write_file(store / ".model.ckpt-000000003.weights.h5.77-abc", b"a part")
    directory.remove_partial_files()
    found = directory.restore(make_model())
    assert found is not None
    assert found.step == 1
    assert names(store) == ["model.ckpt-000000001.weights.h5", "model.ckpt-000000002.weights.h5.damaged"]


def test_a_writer_that_another_one_has_succeeded_writes_nothing_more(
    store: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = CheckpointDirectory(store)
    former.save(make_model(), 1)
    owner = msgspec.json.decode((store / ".model.ckpt.owner").read_bytes(), type=Owner)
    later = msgspec.structs.replace(owner, process="another", host="elsewhere")
    write_file(store / ".model.ckpt.owner", msgspec.json.encode(later))
    with pytest.raises(SupersededError, match=r"may no longer write to .*elsewhere"):
        former.save(make_model(), 2)
    with pytest.raises(SupersededError):
        former.save(make_model(), 2)
    assert names(store) == ["model.ckpt-000000001.weights.h5"]
    assert not [name for name in list_names(store) if "000000002" in name], "no staged content is left"


@pytest.mark.parametrize(("attempt", "is_refused"), [(2, True), (0, False)])
def test_of_one_run_the_later_attempt_owns_a_directory(
    memory: RemotePath, attempt: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_claim, "run_of_job", lambda: ("run", 1))
    write_file(memory / ".fit0.owner", msgspec.json.encode(Owner("run", attempt, 0, "another", "elsewhere", 7)))
    claim = WriteClaim(memory, "fit0")
    if is_refused:
        with pytest.raises(SupersededError):
            claim.acquire()
    else:
        claim.acquire()
        claim.release()


def put_owner(store: RemotePath, attempt: int) -> None:
    """As another process of the run does, which claims the directory in this moment."""
    write_file(store / ".fit0.owner", msgspec.json.encode(Owner("run", attempt, 0, "another", "elsewhere", 7)))


def test_of_two_that_claim_a_directory_at_once_the_later_attempt_has_it(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find it free, and the earlier one writes its claim last. No store has a lock against that."""
    monkeypatch.setattr(write_claim, "run_of_job", lambda: ("run", 1))
    claim = WriteClaim(memory, "fit0")
    claim.acquire()
    put_owner(memory, attempt=0)
    with claim.writing():
        pass
    owner = msgspec.json.decode((memory / ".fit0.owner").read_bytes(), type=Owner)
    assert (owner.attempt, owner.pid) == (1, os.getpid()), "the other one stops before it writes again"


def test_a_writer_that_wakes_in_the_middle_of_a_save_does_no_more_than_finish_its_file(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_claim, "run_of_job", lambda: ("run", 1))
    late, ahead = CheckpointDirectory(memory, basename="fit0", keep=1), CheckpointDirectory(memory, basename="fit0")
    ahead.save(make_model(), 7)
    ahead.save(make_model(), 8)
    commit_file = checkpoint_directory.commit_file

    def stop_and_wake(staging: StoragePath, path: StoragePath) -> None:
        commit_file(staging, path)
        put_owner(memory, attempt=2)

    monkeypatch.setattr(checkpoint_directory, "commit_file", stop_and_wake)
    with pytest.raises(SupersededError, match="has at most finished the file"):
        late.save(make_model(), 6)
    kept = [f"fit0-00000000{step}.weights.h5" for step in (6, 7, 8)]
    assert names(memory) == kept, "it has set aside or deleted what others had written"


@pytest.mark.parametrize("content", [b"", b'{"run": "ru', b"\xff"], ids=["empty", "truncated", "garbled"])
def test_a_writer_whose_claim_is_damaged_stops(memory: RemotePath, content: bytes) -> None:
    claim = WriteClaim(memory, "fit0")
    claim.acquire()
    write_file(memory / ".fit0.owner", content)
    with pytest.raises(SupersededError, match="deleted or damaged"), claim.writing():
        pytest.fail("it may belong to another process now")


def test_fit_resumes_from_a_store(store: RemotePath) -> None:
    from phalanx.training import fit_resumption

    def train() -> tuple[Any, Any]:
        model = make_model()
        saved = phalanx.callbacks.Checkpoint(str(store), every_steps=4)
        history = model.fit(*make_data(), batch_size=16, epochs=2, verbose=0, callbacks=[saved])
        return model, history

    first, history = train()
    fit_resumption._finished.clear()  # as in another process
    again, resumed = train()
    assert resumed.history == history.history
    for one, another in zip(again.get_weights(), first.get_weights(), strict=True):
        np.testing.assert_array_equal(one, another)
    ledger = json.loads((store / "fit0-ledger.json").read_bytes())
    assert ledger


def test_a_supervisor_saves_to_a_store_and_an_evaluator_reads_from_it(
    store: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    model = make_model()
    logdir = str(store / "run")
    with phalanx.Supervisor(logdir, save_summaries_secs=60).managed_session(model) as session:
        model.fit(*make_data(), batch_size=16, epochs=1, verbose=0)
        path = session.save()
        assert str(path).startswith(logdir)
    assert [name for name in names(store / "run") if name.startswith("events.")], "the steps per second"
    evaluator = phalanx.SidecarEvaluator(
        make_model(seed=2), make_data(), logdir, log_dir=str(store / "logs"), verbose=0, patience_s=0.1
    )
    monkeypatch.setattr(evaluator, "_poll_s", 0.01)
    monkeypatch.setenv("PHALANX_RENDEZVOUS_TIMEOUT", "0.5")  # another job could begin
    evaluator.start()
    assert evaluator.evaluations == 1
    best = json.loads((store / "run" / "best_evaluation.json").read_bytes())
    assert best["step"] == STEPS
    assert evaluator.best == pytest.approx(model.evaluate(*make_data(), verbose=0)[0], rel=1e-5)
    assert names(store / "logs" / "validation")[0].startswith("events.")
    with phalanx.Supervisor(logdir).managed_session(make_model(seed=3)) as session:
        assert session.restored is not None
        assert session.restored.step == STEPS


def test_the_evaluator_takes_a_file_of_keras_when_it_was_left_alone(store: RemotePath, tmp_path: Path) -> None:
    make_model().save_weights(tmp_path / "epoch-7.weights.h5")
    now = 0.0
    (tmp_path / "scratch").mkdir()
    watch = CheckpointWatcher(store, tmp_path / "scratch", clock=lambda: now)
    assert watch.next() is None
    write_file(store / "epoch-7.weights.h5", (tmp_path / "epoch-7.weights.h5").read_bytes())
    assert watch.next() is None
    now += DELIVERY_TIMEOUT_S
    found = watch.next()
    assert found is not None
    assert dataclasses.asdict(found)["name"] == "epoch-7.weights.h5"
    assert watch.next() is None


def test_the_evaluator_waits_while_a_store_does_not_answer(
    memory: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scratch").mkdir()
    watch = CheckpointWatcher(memory, tmp_path / "scratch")

    def fail(*args: object) -> None:
        raise OSError("no route to the store")

    with monkeypatch.context() as outage:
        outage.setattr(RemotePath, "files", fail)
        with pytest.raises(OSError, match="no route"):
            watch.next()
    assert watch.next() is None
    with monkeypatch.context() as outage:
        outage.setattr(RemotePath, "files", fail)
        assert watch.next() is None
    assert "no route to the store. Trying again" in caplog.text
    CheckpointDirectory(memory).save(make_model(), 3)
    found = watch.next()
    assert found is not None
    assert found.step == 3


def test_stores_are_polled_less_often_than_folders() -> None:
    assert sidecar_evaluator.STORE_POLL_S > sidecar_evaluator.POLL_S
