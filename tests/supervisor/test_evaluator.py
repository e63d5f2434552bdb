"""The evaluator in one process: what it evaluates, what it keeps, when it ends. Jobs are in test_jobs.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

import phalanx
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory, load, read
from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.evaluator import completion_marker
from phalanx.evaluator.best_checkpoint import BestCheckpoint
from phalanx.evaluator.checkpoint_watcher import FoundCheckpoint
from phalanx.runtime.owner_records import OwnerFile
from phalanx.runtime.write_claim import WriteClaim
from phalanx.storage.temporary_directory import temporary_directory
from tests.supervisor.models import make_data, make_model

BOUND_S = 60.0


class Note(keras.callbacks.Callback):
    """Notes the steps that are evaluated; then does what it is told."""

    def __init__(self, then: Any = None):
        super().__init__()
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.begun = 0
        self._then = then

    def on_test_begin(self, logs: Any = None) -> None:
        self.begun += 1

    def on_test_end(self, logs: Any = None) -> None:
        self.steps.append(int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)))
        self.losses.append(float(logs["loss"]))
        if self._then is not None:
            self._then()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PHALANX_RENDEZVOUS_TIMEOUT", "0.5")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of steps 10, 20, 30 of one model: the losses fall, and that of 30 is that of 10 again."""
    folder = tmp_path_factory.mktemp("saved")
    model, directory = make_model(), CheckpointDirectory(folder)
    paths = []
    for step in (10, 20):
        model.fit(*make_data(), batch_size=16, epochs=1, verbose=0)
        paths.append(directory.save(model, step))
    model.load_weights(paths[0])
    paths.append(directory.save(model, 30))
    return paths


def put(source: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copyfile(source, folder / ".new")
    os.replace(folder / ".new", folder / source.name)


def evaluator(folder: Path, **arguments: Any) -> phalanx.SidecarEvaluator:
    options = {"verbose": 0} | arguments
    return phalanx.SidecarEvaluator(make_model(seed=3), make_data(), folder, **options)


def test_it_evaluates_each_in_order_keeps_the_best_and_ends_with_the_job(saved: list[Path], tmp_path: Path) -> None:
    left = saved[1:]

    def next_one() -> None:
        if left:
            put(left.pop(0), tmp_path)
        else:
            completion_marker.write_marker(tmp_path, WriteClaim(tmp_path, "model.ckpt"))

    put(saved[0], tmp_path)
    note = Note(next_one)
    sidecar = evaluator(tmp_path, callbacks=[note])
    sidecar.start()
    assert (sidecar.evaluations, note.begun, note.steps) == (3, 3, [10, 20, 30])
    assert note.losses[2] == pytest.approx(note.losses[0])
    assert sidecar.best == pytest.approx(note.losses[1])
    assert read(tmp_path / "best_evaluation.weights.h5").step == 20
    owner = OwnerFile(tmp_path / ".best_evaluation.owner", tmp_path / ".best_evaluation.lock")
    assert not owner.is_alive(), "this process may live on, and other evaluators keep their best here"
    content = json.loads((tmp_path / "best_evaluation.json").read_text())
    assert (content["monitor"], content["step"], content["checkpoint"]) == ("loss", 20, saved[1].name)
    assert content["metrics"]["loss"] == pytest.approx(sidecar.best)


def test_it_begins_with_the_newest_and_ends_after_so_many(saved: list[Path], tmp_path: Path) -> None:
    for second, path in enumerate(saved):
        put(path, tmp_path)
        os.utime(tmp_path / path.name, (second, second))
    note = Note()
    evaluator(tmp_path, callbacks=[note], max_evaluations=1).start()
    assert note.steps == [30]


class Several(keras.metrics.Metric):
    """A value for each of two classes, as `keras.metrics.F1Score` has."""

    def update_state(self, *_: Any, **__: Any) -> None:
        pass

    def result(self) -> Any:
        return keras.ops.convert_to_tensor([0.25, 0.75])


def test_metrics_may_have_several_values(saved: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tests.supervisor.event_files import scalars

    put(saved[0], tmp_path)
    model = make_model(metrics=[Several(name="several")])
    phalanx.SidecarEvaluator(
        model, make_data(), tmp_path, max_evaluations=1, verbose=0, log_dir=tmp_path / "logs"
    ).start()
    content = json.loads((tmp_path / "best_evaluation.json").read_text())
    assert content["metrics"]["several"] == [0.25, 0.75]
    noted = scalars(tmp_path / "logs" / "validation")
    assert noted["evaluation_several_vs_iterations/0"] == {10: 0.25}
    assert noted["evaluation_several_vs_iterations/1"] == {10: 0.75}
    sidecar = phalanx.SidecarEvaluator(model, make_data(), tmp_path, verbose=0, monitor="several", mode="max")
    with pytest.raises(ConfigurationError, match=r"has 2 values.*Name another"):
        sidecar.start()


def test_an_evaluator_that_is_started_again_knows_the_best(saved: list[Path], tmp_path: Path) -> None:
    put(saved[1], tmp_path)
    evaluator(tmp_path, max_evaluations=1).start()
    put(saved[2], tmp_path)
    again = evaluator(tmp_path, max_evaluations=1)
    assert again.best is not None
    again.start()
    assert read(tmp_path / "best_evaluation.weights.h5").step == 20
    (tmp_path / "best_evaluation.weights.h5").unlink()
    assert evaluator(tmp_path).best is None, "what is gone is not the best"


def test_more_of_a_metric_may_be_better(saved: list[Path], tmp_path: Path) -> None:
    put(saved[1], tmp_path)
    note = Note(lambda: put(saved[2], tmp_path))
    evaluator(tmp_path, callbacks=[note], monitor="val_loss", mode="max", max_evaluations=2).start()
    assert read(tmp_path / "best_evaluation.weights.h5").step == 30
    shutil.rmtree(tmp_path)
    put(saved[0], tmp_path)
    evaluator(tmp_path, monitor=None, max_evaluations=1).start()
    assert [path.name for path in tmp_path.iterdir()] == [saved[0].name]


def test_the_best_can_be_loaded_and_is_what_was_evaluated(saved: list[Path], tmp_path: Path) -> None:
    put(saved[1], tmp_path)
    sidecar = evaluator(tmp_path, max_evaluations=1)
    sidecar.start()
    model = make_model(seed=4)
    model.load_weights(tmp_path / "best_evaluation.weights.h5")
    assert float(model.evaluate(*make_data(), verbose=0)[0]) == pytest.approx(sidecar.best, rel=1e-5)


def test_the_best_model_is_exported(saved: list[Path], tmp_path: Path) -> None:
    for path in saved:
        shutil.copyfile(path, tmp_path / path.name)
    export = phalanx.callbacks.SidecarEvaluatorModelExport(
        tmp_path / "best-{epoch}.keras", tmp_path, monitor="val_loss"
    )
    evaluator = phalanx.SidecarEvaluator(
        make_model(), make_data(), tmp_path, max_evaluations=1, callbacks=[export], verbose=0
    )
    evaluator.start()
    exported = keras.models.load_model(tmp_path / "best-30.keras")
    assert exported.evaluate(*make_data(), verbose=0)[0] == pytest.approx(evaluator.best, rel=1e-5)


def test_event_files_without_tensorflow(saved: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tests.supervisor.event_files import scalars

    put(saved[0], tmp_path / "run")
    note = Note()
    evaluator(tmp_path / "run", callbacks=[note], max_evaluations=1, log_dir=tmp_path / "logs").start()
    found = scalars(tmp_path / "logs" / "validation")
    assert set(found) == {"evaluation_loss_vs_iterations", "evaluation_mae_vs_iterations"}
    assert found["evaluation_loss_vs_iterations"] == {10: pytest.approx(note.losses[0], rel=1e-5)}


def test_without_the_package_a_log_dir_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.monitoring.event_writer.is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"need the package tensorboardX.*pip install tensorboardX"):
        evaluator(tmp_path, log_dir=tmp_path)


def test_a_job_that_never_comes_is_an_error_that_says_what_was_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"Neither the chief of the job nor a checkpoint in .*absent came"):
        evaluator(tmp_path / "absent").start()


def test_without_anything_to_ask_it_ends_when_nothing_new_comes(saved: list[Path], tmp_path: Path) -> None:
    put(saved[0], tmp_path)
    sidecar = evaluator(tmp_path, patience_s=0.6)
    sidecar.start()
    assert sidecar.evaluations == 1


def test_a_damaged_checkpoint_is_left_out(saved: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in saved[:2]:
        put(path, tmp_path)
    content = bytearray((tmp_path / saved[1].name).read_bytes())
    content[200] ^= 1
    (tmp_path / saved[1].name).write_bytes(content)
    completion_marker.write_marker(tmp_path, WriteClaim(tmp_path, "model.ckpt"))
    note = Note()
    evaluator(tmp_path, callbacks=[note]).start()
    assert note.steps == [10]
    assert f"{tmp_path / saved[1].name} is left out" in caplog.text


def test_a_checkpoint_of_another_model_is_an_error(saved: list[Path], tmp_path: Path) -> None:
    put(saved[0], tmp_path)
    sidecar = phalanx.SidecarEvaluator(make_model(width=5), make_data(), tmp_path, verbose=0)
    with pytest.raises(ConfigurationError, match=r"(?s)is of another model.*Build the same model in the evaluator"):
        sidecar.start()


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD,
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=3),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
    ids=["plain", "accumulating", "scaling"],
)
def test_another_optimizer_than_in_training_does_not_matter(
    saved: list[Path], tmp_path: Path, optimizer: Callable[[], Any]
) -> None:
    put(saved[0], tmp_path)
    note = Note()
    model = make_model(optimizer=optimizer())
    phalanx.SidecarEvaluator(model, make_data(), tmp_path, max_evaluations=1, callbacks=[note], verbose=0).start()
    assert note.steps == [10]


@pytest.mark.filterwarnings("ignore:.*mode.*")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_evaluations": 0}, "max_evaluations is 0"),
        ({"patience_s": 0}, "patience_s is 0"),
        ({"mode": "best"}, "mode is 'best'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        evaluator(tmp_path, **arguments)


def test_a_metric_that_is_not_there_or_not_known_is_refused(saved: list[Path], tmp_path: Path) -> None:
    put(saved[0], tmp_path)
    with pytest.raises(ConfigurationError, match="monitor is 'accuracy', and the evaluation has loss, mae"):
        evaluator(tmp_path, monitor="accuracy").start()
    model = make_model()
    model.compile("sgd", "mse", metrics=[lambda y, p: keras.ops.mean(p)])
    (name,) = set(model.evaluate(*make_data(), verbose=0, return_dict=True)) - {"loss"}
    sidecar = phalanx.SidecarEvaluator(model, make_data(), tmp_path, monitor=name, verbose=0)
    with pytest.raises(ConfigurationError, match="pass mode='min' or 'max'"):
        sidecar.start()


def test_a_model_that_is_not_built_or_compiled_is_refused(tmp_path: Path) -> None:
    for model in (keras.Sequential([keras.layers.Dense(1)]), keras.Sequential([keras.Input((4,))])):
        with pytest.raises(ConfigurationError, match=r"must be built .* and compiled"):
            phalanx.SidecarEvaluator(model, make_data(), tmp_path)


def test_a_worker_is_no_evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"This process is worker/1.*phalanx run --evaluator"):
        evaluator(tmp_path)


def test_it_waits_for_a_file_that_keras_is_still_writing(saved: list[Path], tmp_path: Path) -> None:
    model = make_model()
    load(model, saved[0])
    whole = tmp_path / "whole.weights.h5"
    model.save_weights(whole)
    content = whole.read_bytes()
    folder = tmp_path / "run"
    folder.mkdir()
    with open(folder / "slow.weights.h5", "wb", buffering=0) as file:
        file.write(content[: len(content) // 2])
        note = Note()
        sidecar = evaluator(folder, callbacks=[note], patience_s=120)
        thread = threading.Thread(target=sidecar.start)
        thread.start()
        waiting = threading.Event()
        assert not waiting.wait(2.5), "longer than a file is left alone"
        assert note.steps == []
        file.write(content[len(content) // 2 :])
    completion_marker.write_marker(folder, WriteClaim(folder, "model.ckpt"))
    thread.join(BOUND_S)
    assert not thread.is_alive()
    assert note.steps == [10]


def test_what_a_killed_evaluator_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import time; from phalanx.storage.temporary_directory import temporary_directory\n"
        "with temporary_directory() as it: print(it, flush=True); time.sleep(99)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
        )
        for _ in range(2)
    ]
    try:
        killed, living = (
            Path(str(process.stdout and process.stdout.readline(), "utf-8").strip()) for process in processes
        )
        (killed / "copy").write_text("of a checkpoint")
        processes[0].kill()
        processes[0].wait()
        with temporary_directory() as own:
            assert {killed.exists(), living.exists(), own.exists()} == {False, True}
            assert len(list(tmp_path.iterdir())) == 2
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("content", ["", "[]", '{"monitor": "loss", "metrics": null}'])
def test_a_damaged_record_of_the_best_is_reported_and_started_over(
    content: str, saved: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(saved[0], tmp_path)
    (tmp_path / "best_evaluation.json").write_text(content)
    watcher = evaluator(tmp_path, max_evaluations=1)
    assert "best_evaluation.json is damaged" in caplog.text
    watcher.start()
    assert json.loads((tmp_path / "best_evaluation.json").read_text())["monitor"] == "loss"


def test_a_file_is_no_directory_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="which is a file"):
        evaluator(tmp_path / "file")


def test_the_best_of_another_format_replaces_the_one_before(saved: list[Path], tmp_path: Path) -> None:
    model = make_model()
    for name, loss in (("a.keras", 2.0), ("b.weights.h5", 1.0), ("c.keras", 0.5)):
        copy = tmp_path / name
        copy.write_text(name)
        best = BestCheckpoint(tmp_path / "run", model, "loss")
        assert best.update(FoundCheckpoint(name, copy, copy, 1), {"loss": loss})
        kept = BestCheckpoint(tmp_path / "run", model, "loss").path
        assert isinstance(kept, Path)
        assert kept.read_text() == name
        assert len(list((tmp_path / "run").glob("best_evaluation.*"))) == 2, "the checkpoint and its figures"
