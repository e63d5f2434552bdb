"""Of two processes that write checkpoints to one directory, the one that came too late for its job is refused."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import phalanx
from phalanx.config.environment_variables import RUN
from phalanx.errors import ConfigurationError, SupersededError
from phalanx.runtime import write_claim
from phalanx.runtime.write_claim import WriteClaim
from tests.support.backends import BACKENDS
from tests.support.programs import check_python

BOUND_S = 30.0
Run = Callable[[str], None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """What follows happens in a process of this run and attempt."""
    monkeypatch.setattr(write_claim, "LOCAL_TAKEOVER_S", 0.2)
    monkeypatch.setattr(write_claim, "REMOTE_TAKEOVER_S", 0.2)
    return lambda name: monkeypatch.setenv(RUN, name)


@contextmanager
def another_process(body: Callable[[], None]) -> Iterator[int]:
    """A process that has done something and then lives until the end of the block."""
    begun, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os.write(done, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(done)
    try:
        assert os.read(begun, 1) == b"!", "the other process failed"
        yield pid
    finally:
        os.close(begun)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def elsewhere(body: Callable[[], None]) -> None:
    """Do something in a process that then is dead."""
    with another_process(body):
        pass


def claim(folder: Path, generation: int = 0, name: str = "fit") -> WriteClaim:
    return WriteClaim(folder, name, lambda: generation)


def test_a_later_attempt_of_a_job_takes_the_directory_from_a_process_that_is_alive(tmp_path: Path, run: Run) -> None:
    run("job:0")
    old = claim(tmp_path)
    old.acquire()
    run("job:1")
    with another_process(claim(tmp_path).acquire), pytest.raises(SupersededError, match="job"), old.writing():
        pytest.fail("two writers")
    run("job:0")
    with pytest.raises(SupersededError):
        claim(tmp_path).acquire()  # with its next `fit` the old process is still too old


def test_a_later_generation_takes_it_and_an_earlier_one_does_not(tmp_path: Path, run: Run) -> None:
    run("job:0")
    elsewhere(claim(tmp_path, generation=4).acquire)
    with pytest.raises(SupersededError):
        claim(tmp_path, generation=3).acquire()
    mine = claim(tmp_path, generation=5)
    with mine.writing():
        pass


def test_a_directory_of_a_job_that_is_alive_is_refused_to_another_job(tmp_path: Path, run: Run) -> None:
    run("one:0")
    with another_process(claim(tmp_path).acquire) as pid:
        run("two:0")
        with pytest.raises(ConfigurationError, match=rf"in use: process {pid} of job one .* delete .*\.fit\.owner"):
            claim(tmp_path).acquire()
        claim(tmp_path, name="other").acquire()
    claim(tmp_path).acquire()  # it was killed


def test_a_process_that_lost_its_directory_does_not_claim_it_back(tmp_path: Path, run: Run) -> None:
    run("one:0")
    old = claim(tmp_path)
    old.acquire()
    (tmp_path / ".fit.owner").unlink()  # as the message says
    run("two:0")
    elsewhere(claim(tmp_path).acquire)
    run("one:0")
    for _ in range(2):
        with pytest.raises(SupersededError), old.writing():
            pytest.fail("two writers")
    with pytest.raises(SupersededError):
        claim(tmp_path).acquire()


def test_a_directory_that_was_released_is_free(tmp_path: Path, run: Run) -> None:
    run("one:0")
    first = claim(tmp_path)

    def use() -> None:
        first.acquire()
        first.release()

    with another_process(use):
        run("two:0")
        mine = claim(tmp_path)
        mine.acquire()
        mine.release()


def test_the_owner_does_not_change_while_a_file_is_put_in_its_place(tmp_path: Path, run: Run) -> None:
    run("job:0")
    old = claim(tmp_path)
    run("job:1")
    new = claim(tmp_path)
    run("job:0")
    with old.writing():
        run("job:1")
        pid = os.fork()
        if pid == 0:
            new.acquire()
            os._exit(0)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        run("job:0")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(SupersededError), old.writing():
        pytest.fail("two writers")


def test_a_fork_that_ends_leaves_its_parent_the_directory(tmp_path: Path, run: Run) -> None:
    """It ends in the `with` of its parent, which then releases the claim in the fork."""
    run("one:0")
    mine = claim(tmp_path)
    mine.acquire()
    elsewhere(mine.release)
    owner = os.getpid()

    def claim_as_another_job() -> None:
        run("two:0")
        with pytest.raises(ConfigurationError, match=f"in use: process {owner} of job one"):
            claim(tmp_path).acquire()

    elsewhere(claim_as_another_job)
    run("one:0")
    with mine.writing():
        pass


def test_threads_that_claim_directories_at_once_are_one_process(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("one:0")
    monkeypatch.setattr(write_claim, "_own", {})
    both, draw = threading.Barrier(2), secrets.token_hex

    def meet(count: int) -> str:
        both.wait(BOUND_S)
        return draw(count)

    monkeypatch.setattr(write_claim.secrets, "token_hex", meet)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(write_claim._process())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(write_claim.secrets, "token_hex", draw)
    assert {*found, write_claim._process()} == {found[0]}


@pytest.mark.parametrize("name", ["run[1]", "fit*"])
def test_names_of_checkpoints_are_no_patterns(tmp_path: Path, run: Run, name: str) -> None:
    run("one:0")
    other = tmp_path / ".run1.owner.0123abcd"  # that another process is about to rename
    another_one = tmp_path / ".fit7.owner.0123abcd"
    for path in (other, another_one):
        path.touch()
    claim(tmp_path, name=name).acquire()
    assert other.exists()
    assert another_one.exists()


@contextmanager
def another(run: str) -> Iterator[None]:
    """Inside, this process is another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_claim, "_own", {os.getpid(): "another"})
        patch.setenv(RUN, run)
        yield


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {path.name: path.read_bytes() for path in found if not path.name.startswith(("events", ".fit0-"))}


@pytest.mark.parametrize("kind", ["checkpoint", "model_checkpoint", "backup", "orbax", "supervisor"])
def test_whatever_saves_during_a_fit_stops_when_the_job_goes_on_elsewhere(tmp_path: Path, run: Run, kind: str) -> None:
    run("job:0")
    folder, steps, before = tmp_path / "saved", 3, []
    name, callback = {
        "checkpoint": ("saved/fit0", lambda: phalanx.callbacks.Checkpoint(folder, every_steps=1)),
        "model_checkpoint": ("saved/best.keras", lambda: keras.callbacks.ModelCheckpoint(folder / "best.keras")),
        "backup": ("saved", lambda: keras.callbacks.BackupAndRestore(str(folder))),
        "orbax": ("saved", lambda: keras.callbacks.OrbaxCheckpoint(folder, monitor="loss", save_freq="epoch")),
        "supervisor": ("saved/model.ckpt", keras.callbacks.Callback),
    }[kind]
    callbacks = [callback()]
    if kind in ("model_checkpoint", "backup", "orbax"):  # without this, Keras itself trains a model on one replica
        callbacks.append(phalanx.callbacks.Checkpoint(tmp_path, every_steps=1000))

    def cut_off(epoch: int, logs: object = None) -> None:
        if epoch == 1:
            with another("job:1"):
                successor = claim((tmp_path / name).parent, name=Path(name).name)
                successor.acquire()
                successor.release()
            before.append(files(tmp_path))

    with phalanx.MirroredStrategy(["cpu:0"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=cut_off)
    supervised: Any = nullcontext()
    if kind == "supervisor":
        supervised = phalanx.Supervisor(logdir=folder, save_model_secs=0.001).managed_session(model)
    x = np.ones((4 * steps, 2), np.float32)
    with pytest.raises(SupersededError, match=r"belongs to process .* of job job .* stops"), supervised:
        model.fit(x, x[:, :1], batch_size=4, epochs=9, verbose=0, callbacks=[watch, *callbacks])
    assert files(tmp_path) == before[0]


def test_a_chief_that_another_one_has_succeeded_does_not_announce_the_end_of_the_job(tmp_path: Path, run: Run) -> None:
    run("job:0")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    session = phalanx.Supervisor(tmp_path, save_model_secs=0).managed_session(model)
    with pytest.raises(SupersededError), session, another("job:1"):
        claim(tmp_path, name="model.ckpt").acquire()
    assert not (tmp_path / "finished").exists(), "or the evaluator of the successor would end"


SHARDED = """
import os, sys
from pathlib import Path

import keras, pytest
import phalanx
from phalanx.config.environment_variables import RUN
from phalanx.errors import SupersededError
from phalanx.runtime import write_claim
from tests.security.test_write_claims import another, files

write_claim.LOCAL_TAKEOVER_S = write_claim.REMOTE_TAKEOVER_S = 0.2
os.environ[RUN], folder = "job:0", Path(sys.argv[1])
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
checkpoint = phalanx.ShardedCheckpoint(folder)
for step in (1, 2):
    checkpoint.save(model, step)
    checkpoint.wait()
with another("job:1"):
    successor = phalanx.ShardedCheckpoint(folder)
    successor.save(model, 2)
    successor.wait()
before = files(folder)
with pytest.raises(SupersededError, match="job job"):
    checkpoint.save(model, 3)
assert phalanx.ShardedCheckpoint(folder).steps == [1, 2]
assert files(folder) == before, "what it has not finished is gone"
"""


@pytest.mark.jax
@pytest.mark.skipif("jax" not in BACKENDS, reason="ShardedCheckpoint is JAX's")
def test_a_sharded_checkpoint_is_not_finished_by_a_process_that_was_succeeded(tmp_path: Path) -> None:
    check_python("-c", SHARDED, str(tmp_path), backend="jax")
