"""Saves sharded checkpoints on one mesh and restores them on others, in one process: `sharded_program.py FOLDER`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel

import phalanx
from phalanx.checkpoint import checkpoint_series, sharded_checkpoint
from phalanx.errors import ConfigurationError, SupersededError

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


def main(folder: Path) -> None:
    config: Any = jax.config
    config.update("jax_num_cpu_devices", 4)
    checkpoints = folder / "checkpoints"
    with distributed(4, (None, "model")):
        model = compiled(width=16)
        model.fit(X, X[:, :4], verbose=0)
        saved = phalanx.ShardedCheckpoint(checkpoints, keep=2)
        saved.save(model, 1, {"note": "first"})
        expected = values(model.variables)
        model.fit(X, X[:, :4], epochs=3, verbose=0)  # overwrites what is being written
        saved.wait()
        assert saved.steps == [1]
        model.save_weights(folder / "plain.weights.h5")
        from_keras = values(model.variables)

    with distributed(2, ("model", None)):  # another mesh, another layout, and other names of the layers
        other = compiled(width=16)
        assert phalanx.ShardedCheckpoint(checkpoints).restore(other) == {"step": 1, "state": {"note": "first"}}
        assert_equal(values(other.variables), expected)
        assert not other.layers[0].kernel.value.is_fully_replicated
        other.load_weights(folder / "plain.weights.h5")
        assert_equal(values(other.variables), from_keras)

    plain = compiled(width=16)
    saved.restore(plain)
    assert_equal(values(plain.variables), expected)
    untrained = built(width=16)
    saved.restore(untrained)
    assert_equal(values(untrained.variables), expected[: len(untrained.variables)])

    refused_models(saved)
    several(plain, saved, checkpoints)
    gone_back(plain, folder / "gone_back")
    neighbours(plain, folder / "neighbours")
    late(plain, folder / "late")
    failed(plain, folder / "failed")
    killed_while_it_deletes(plain, folder / "deleted")
    fenced(plain, saved, checkpoints)
    print("finished")


def refused_models(saved: phalanx.ShardedCheckpoint) -> None:
    wide = compiled(width=32)
    before = values(wide.variables)
    with pytest.raises(ConfigurationError, match=r"another model: '[^']*/kernel' has the shape \(8, 32\) in the"):
        saved.restore(wide)
    assert_equal(values(wide.variables), before)
    with pytest.raises(ConfigurationError, match=r"the checkpoint lacks '[^']*/kernel'"):
        saved.restore(compiled(width=16, layers=2))
    with pytest.raises(ConfigurationError, match=r"the model lacks '[^']*velocity'"):
        saved.restore(compiled(width=16, optimizer="sgd"))
    with pytest.raises(ConfigurationError, match=r"no checkpoint of step 7 in .*; there are those of 1"):
        saved.restore(wide, step=7)


def several(model: Any, saved: phalanx.ShardedCheckpoint, folder: Path) -> None:
    for step in (2, 3, 3):  # the same step may be saved again
        saved.save(model, step)
    saved.wait()
    assert saved.steps == [2, 3]
    assert sorted(name for name in os.listdir(folder) if not name.endswith((".lock", ".owner"))) == [
        "model-000000002.orbax",
        "model-000000003.orbax",
    ]
    assert phalanx.ShardedCheckpoint(folder / "none").restore(model) is None


def gone_back(model: Any, folder: Path) -> None:
    """What is saved after an earlier checkpoint was restored is the newest, and older ones are kept."""
    saved = phalanx.ShardedCheckpoint(folder, keep=2)
    for again in range(2):
        for step in (10, 20, 30):
            saved.save(model, step)
        saved.restore(model, step=20)
        saved.save(model, 21 + again)
        saved.wait()
        assert saved.steps == [20, 21 + again]
        found = saved.restore(model)
        assert found is not None
        assert found["step"] == 21 + again
    assert sorted(path.name for path in folder.glob("*.abandoned")) == [
        "model-000000021.orbax.abandoned",
        "model-000000030.orbax.abandoned",
    ]


def neighbours(model: Any, folder: Path) -> None:
    """What another process writes next to them under a longer name is not swept away."""
    (folder / ".model-ema-0000002a").mkdir(parents=True)
    (folder / ".model-0000002a").mkdir()
    saved = phalanx.ShardedCheckpoint(folder)
    saved.save(model, 1)
    saved.wait()
    assert not (folder / ".model-0000002a").exists()
    assert (folder / ".model-ema-0000002a").exists()


def late(model: Any, folder: Path) -> None:
    """The first process puts a checkpoint in its place; the others look for it when that has happened."""
    saved = phalanx.ShardedCheckpoint(folder)
    saved.save(model, 1)
    saved.wait()
    aside = folder / "aside"
    saved.path_of(1).rename(aside)

    def meet(number: int) -> list[int]:
        aside.rename(saved.path_of(1))
        return [number]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "_allgather", meet)
        assert saved.restore(model, step=1) is not None


def failed(model: Any, folder: Path) -> None:
    """A process whose last checkpoint was not written says so to the others, which come to the same collective."""
    saved, told = phalanx.ShardedCheckpoint(folder), []

    def tell(number: int) -> list[int]:
        told.append(number)
        return [number]

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "_commit", full)
        saved.save(model, 1)
        patch.setattr(sharded_checkpoint, "_allgather", tell)
        with pytest.raises(OSError, match="no space left"):
            saved.save(model, 2)
        assert told == [sharded_checkpoint._PROBLEM]
        patch.setattr(sharded_checkpoint, "_allgather", lambda number: [number, sharded_checkpoint._PROBLEM])
        with pytest.raises(OSError, match="Process 1 of the program cannot write"):
            saved.save(model, 2)
    saved.save(model, 2)
    saved.wait()
    assert saved.steps == [2]


def killed_while_it_deletes(model: Any, folder: Path) -> None:
    """What is left of a checkpoint that was being deleted does not pass for one."""
    saved = phalanx.ShardedCheckpoint(folder, keep=1)
    saved.save(model, 1)
    saved.wait()

    def part(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (path / "entries.json").unlink()
            raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_series.shutil, "rmtree", part)
        saved.save(model, 2)
        with pytest.raises(InterruptedError):
            saved.wait()
    assert saved.steps == [2]
    saved.save(model, 3)
    saved.wait()
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["model-000000003.orbax"]


def fenced(model: Any, saved: phalanx.ShardedCheckpoint, folder: Path) -> None:
    """A process that another one has succeeded puts nothing in its place."""

    writing, begun = saved.claim.writing, []

    @contextlib.contextmanager
    def superseded_after_the_first() -> Any:
        begun.append(1)
        if len(begun) > 1:
            raise SupersededError("another process has claimed the directory")
        with writing():
            yield

    saved.save(model, 4, lambda: {"state": object()})  # whatever ends the thread belongs to who waits
    with pytest.raises(TypeError, match="not JSON"):
        saved.wait()
    saved.claim.writing = superseded_after_the_first  # type: ignore[method-assign]
    saved.save(model, 4)
    with pytest.raises(SupersededError):
        saved.wait()
    with pytest.raises(SupersededError):
        saved.save(model, 5)
    assert saved.steps == [2, 3]


def distributed(devices: int, kernels: tuple[str | None, ...]) -> Any:
    mesh = DeviceMesh((1, devices), ["data", "model"], keras.distribution.list_devices()[:devices])
    layouts = LayoutMap(mesh)
    layouts[".*kernel"] = kernels
    return ModelParallel(layout_map=layouts, batch_dim_name="data").scope()


def built(width: int, layers: int = 1) -> Any:
    hidden = [keras.layers.Dense(width, "relu") for _ in range(layers)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.BatchNormalization(), keras.layers.Dense(4)])


def compiled(width: int, layers: int = 1, optimizer: str = "adam") -> Any:
    model = built(width, layers)
    model.compile(optimizer, "mse")
    return model


def values(variables: Any) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
