"""Checkpoints of models that are divided over the devices of several processes. Each process writes the part it holds.

A checkpoint is a folder, which gets its name when it is complete:

    model-000000120.orbax/
        weights/        Orbax's: every entry of Keras's weights file, in shards
        entries.json    step, state, and the name, shape and dtype of the variable of each entry

Entries have the names that Keras gives them in `.weights.h5`, which follow from the structure of the model. So the
checkpoint can be restored on another mesh, by another number of processes, and in plain Keras.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from phalanx.checkpoint.background_save import BackgroundSave, State
from phalanx.checkpoint.checkpoint_directory import StoredCheckpoint, remove_partial
from phalanx.checkpoint.checkpoint_series import CheckpointSeries
from phalanx.checkpoint.step_names import check_keep, names_by_step
from phalanx.errors import ConfigurationError, PhalanxError, UnsupportedError
from phalanx.keras_compat.saving.weight_entry_names import load_weight_entries, weight_entries
from phalanx.runtime.write_claim import WriteClaim
from phalanx.storage.files import sync_directory
from phalanx.storage.paths import StoragePath, local_path
from phalanx.version import __version__

SUFFIX = ".orbax"
WEIGHTS, ENTRIES = "weights", "entries.json"
DEFAULT_BASENAME = "model"
_OPTIMIZER = re.compile(r"(^|/)\w*optimizer/")
_SHOWN = 3
"""Number of variables that an error names."""
_NONE, _PROBLEM = -1, -2
"""Sent among processes instead of a number: there is none; the process raises an error."""


class ShardedCheckpoint:
    """A directory of sharded checkpoints. Each process writes its part in the background. Requires orbax-checkpoint.

    All processes of a multi-process program must make the same calls and see the same directory. In a single-process
    program, with or without a strategy, it works the same, so models move from many devices to plain Keras and back.

    Example:

        checkpoint = phalanx.ShardedCheckpoint("checkpoints")
        checkpoint.save(model, step=1000)
        checkpoint.wait()
        checkpoint.restore(model)                  # on another mesh, in another program, in plain Keras
        model.save_weights("model.weights.h5")

    Args:
        directory: Directory of the checkpoints, created with the first one.
        basename: Prefix of the checkpoints' names.
        keep: Number of newest checkpoints to keep; None: all. Checkpoints of steps later than the saved one are renamed
            to `*.abandoned`, and the same number of these is kept.

    Raises: ConfigurationError if Orbax is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, basename: str = DEFAULT_BASENAME, keep: int | None = None
    ) -> None:
        check_keep(keep)
        self.directory = local_path(directory, "directory").absolute()
        self.claim = WriteClaim(self.directory, basename)
        self._basename = basename
        self._keep = keep
        self._series = CheckpointSeries(self.directory, basename, SUFFIX, are_folders=True)
        self._orbax = _import_orbax()
        # An Orbax checkpointer, created by the first `save` and kept: it tracks what is still being written.
        self._writer: Any = None
        self.background = BackgroundSave("phalanx-sharded-checkpoint")

    # Writing.

    @property
    def busy(self) -> bool:
        """Whether this process is writing a checkpoint."""
        return self.background.busy

    def save(self, model: Any, step: int, state: Mapping[str, Any] | State | None = None) -> None:
        """Save weights, layer state and optimizer state. Returns once they are copied; writes in the background.

        Waits for the previous checkpoint if it is still being written.

        Args:
            step: Step of the model.
            state: Additional state to save, of JSON types, or a function that returns it and runs in the background.
                The first process's state is saved.

        Raises:
            OSError: the last checkpoint could not be written, or the directory is not writable; raised on all processes
                if it happens on one. Orbax raises other errors too.
            ConfigurationError, SupersededError: see `WriteClaim.acquire`.
        """
        problem = self.background.wait_for_error()
        _build_optimizer(model)
        entries = weight_entries(model)
        # From here on, all processes must reach the same collectives in the same order: the one about the token, then
        # Orbax's barriers. So a process that cannot write reports it in the first.
        staging = self._open_staging(problem)
        described = {"step": step, "entries": _describe(entries), "phalanx": __version__}
        values = _nested({key: _copied(_value(entry)) for key, entry in entries.items()})
        self._writer = self._writer or self._orbax.AsyncCheckpointer(self._orbax.PyTreeCheckpointHandler())
        self._writer.save(staging / WEIGHTS, args=self._orbax.args.PyTreeSave(values))

        def describe() -> Mapping[str, Any]:
            return {**described, "state": dict((state() if callable(state) else state) or {})}

        self.background.start(step, lambda: self._finish(staging, step, describe))

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is finished. Raises: see `save`; on this process only."""
        self.background.wait()

    def _open_staging(self, problem: Exception | None) -> Path:
        """Create the folder for the parts of all processes, on the first one. Raises on all of them if one cannot.

        Args:
            problem: Reason why this process cannot write, if already known.
        """
        # 31 bits: without x64 mode, JAX sends signed 32-bit integers.
        token = secrets.randbits(31)
        if self._is_primary and problem is None:
            try:
                with self.claim.writing():
                    # Safe here: this process has finished writing (`save`), and the claim excludes all other writers.
                    remove_partial(self.directory, self._basename)
                    self._staging(token).mkdir()
            except (OSError, PhalanxError) as error:
                problem = error
        return self._staging(self._broadcast_from_primary(token, problem))

    def _broadcast_from_primary(self, number: int, problem: Exception | None) -> int:
        """The first process's number, on all. Raises on all if one of them has a problem."""
        numbers = _allgather(_PROBLEM if problem is not None else number)
        if problem is not None:
            raise problem
        if _PROBLEM in numbers:
            raise OSError(f"Process {numbers.index(_PROBLEM)} of the program cannot write to {self.directory}")
        return numbers[0]

    def _staging(self, token: int) -> Path:
        return self.directory / self._series.hidden_name(token)

    def _finish(self, staging: Path, step: int, describe: Callable[[], Mapping[str, Any]]) -> Path | None:
        try:
            # A barrier of Orbax: when it returns on the first process, the parts of all are on disk.
            self._writer.wait_until_finished()  # in all processes
            if not self._is_primary:
                return None
            self._commit(staging, step, describe())
        except Exception:  # including Orbax's own kinds
            if self._is_primary:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        return self.path_of(step)

    def _commit(self, staging: Path, step: int, description: Mapping[str, Any]) -> None:
        with open(staging / ENTRIES, "w") as file:
            json.dump(description, file)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(staging)
        # A folder cannot be renamed over one that has content. If the process is killed between the two renames, the
        # step is under neither name, and the next `save` deletes both; the previous checkpoint is then the newest.
        path, replaced = self.path_of(step), staging.with_name(f"{staging.name}.replaced")
        with self.claim.writing():
            if path.exists():
                os.rename(path, replaced)
            os.rename(staging, path)
            self._series.set_aside_after(step)
            sync_directory(self.directory)
            self._series.delete_old(self._keep)
        shutil.rmtree(replaced, ignore_errors=True)

    # Reading.

    def path_of(self, step: int) -> Path:
        """Path of a step's checkpoint, which need not exist yet."""
        return self.directory / self._series.name_of(step)

    def paths(self) -> list[Path]:
        """All checkpoints, in the order of their steps."""
        return [self.path_of(step) for step in self.steps]

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, the newest last."""
        return [step for step, _ in self._series.by_step()]

    def restore(self, model: Any, step: int | None = None) -> Mapping[str, Any] | None:
        """Load a checkpoint, saved on any mesh, into the model; each process reads the part that it holds.

        Args:
            model: A built model, with its optimizer if that is to be restored; without one, it gets only the weights.
            step: Step to restore; None: the newest.

        Returns: what `save` received, with the keys `step` and `state`; None if there is no checkpoint.
        Raises: ConfigurationError naming the variables, if it is a checkpoint of another model.
        """
        problem = self.background.wait_for_error()
        # Also if the step is given: the first process, which puts the checkpoint in place, may be later than the
        # others, and only gets here after that.
        chosen = self._broadcast_from_primary((self.steps or [_NONE])[-1] if step is None else step, problem)
        if step is None and chosen == _NONE:
            return None
        path = self.path_of(chosen)
        try:
            description = _read_description(path)
        except FileNotFoundError:
            known = ", ".join(map(str, self.steps)) or "none"
            raise ConfigurationError(
                f"There is no checkpoint of step {chosen} in {self.directory}; there are those of {known}."
            ) from None
        _build_optimizer(model)
        entries = weight_entries(model)
        wanted = _match(entries, description["entries"], path)
        target = _nested({key: _target(entries[key]) for key in wanted})
        arguments = self._orbax.args.PyTreeRestore(
            item=target,
            restore_args=self._orbax.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        reader = self._orbax.Checkpointer(self._orbax.PyTreeCheckpointHandler())
        restored = reader.restore(path / WEIGHTS, args=arguments)
        # Keras's loader requires every entry that it would save. Those that are not restored keep their values.
        kept = {key: _value(entry) for key, entry in entries.items() if key not in wanted}
        load_weight_entries(model, {**kept, **_flat(restored)})
        return {"step": description["step"], "state": description["state"]}

    @property
    def _is_primary(self) -> bool:
        return bool(_jax().process_index() == 0)


def newest_sharded(directory: StoragePath, basename: str) -> StoredCheckpoint | None:
    """The newest sharded checkpoint in a directory; None if there is none, as in stores. Does not need Orbax.

    Raises: ConfigurationError if it is damaged.
    """
    if not isinstance(directory, Path) or not (found := names_by_step(directory, basename, SUFFIX)):
        return None
    step, name = found[-1]
    path = directory / name
    return StoredCheckpoint(path, step, _read_description(path)["state"])


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((path / ENTRIES).read_text())
    except ValueError as error:
        raise ConfigurationError(
            f"{path / ENTRIES} is damaged ({error}). Move {path} away to continue from the checkpoint before."
        ) from error
    return description


def _import_orbax() -> Any:
    if keras.backend.backend() != "jax":
        raise UnsupportedError(
            f"Sharded checkpoints are of arrays of JAX, and Keras runs on {keras.backend.backend()!r}. Set "
            f"KERAS_BACKEND=jax; model.save_weights() then writes a file that every backend reads."
        )
    if importlib.util.find_spec("orbax.checkpoint") is None:
        raise ConfigurationError("Sharded checkpoints need the package orbax-checkpoint: pip install orbax-checkpoint.")
    return importlib.import_module("orbax.checkpoint")


def _jax() -> Any:
    return importlib.import_module("jax")


def _build_optimizer(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _allgather(number: int) -> list[int]:
    """The numbers of all processes, on every process."""
    if _jax().process_count() == 1:
        return [number]
    multihost: Any = importlib.import_module("jax.experimental.multihost_utils")
    return [int(each) for each in multihost.process_allgather(np.int64(number))]


def _value(entry: Any) -> Any:
    """The array of a variable as it is on the devices, or what a layer stores instead."""
    return entry.value if isinstance(entry, keras.Variable) else np.asarray(entry)


def _copied(value: Any) -> Any:
    """A copy that the next step does not overwrite: on CPUs, Orbax reads the arrays in place."""
    jax = _jax()
    if isinstance(value, jax.Array) and next(iter(value.devices())).platform != "cpu":
        return value  # copied to the host before `save` returns
    return jax.numpy.array(value, copy=True) if isinstance(value, jax.Array) else np.array(value)


def _target(entry: Any) -> Any:
    """The shape, dtype and sharding to which an entry is restored."""
    value, jax = _value(entry), _jax()
    if not isinstance(value, jax.Array):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)


def _describe(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {"name": getattr(entry, "path", key), "shape": list(entry.shape), "dtype": str(entry.dtype)}
        for key, entry in entries.items()
    }


def _match(entries: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> list[str]:
    """The names of the entries to restore, without optimizer entries if the model or the checkpoint has none.

    Raises: ConfigurationError naming variables that only one of the two has, or whose shapes differ.
    """
    wanted, found = _without_missing_optimizers(entries, saved), _without_missing_optimizers(saved, entries)
    problems = [f"the checkpoint lacks {getattr(entries[key], 'path', key)!r}" for key in wanted if key not in saved]
    problems += [f"the model lacks {saved[key]['name']!r}" for key in found if key not in entries]
    problems += [
        f"{saved[key]['name']!r} has the shape {tuple(entries[key].shape)} in the model, and "
        f"{tuple(saved[key]['shape'])} in the checkpoint"
        for key in wanted
        if key in saved and list(entries[key].shape) != saved[key]["shape"]
    ]
    if problems:
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigurationError(
            f"The checkpoint {path} is of another model: {'; '.join(problems[:_SHOWN])}{more}. Build the model that it "
            f"was saved from, with the same optimizer, or pass another directory."
        )
    return list(wanted)


def _without_missing_optimizers(keys: Iterable[str], others: Iterable[str]) -> list[str]:
    """The keys, without those of optimizers if no other key belongs to an optimizer."""
    keys = list(keys)
    if any(_OPTIMIZER.search(key) for key in others):
        return keys
    return [key for key in keys if not _OPTIMIZER.search(key)]


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest a flat dict: Orbax names arrays by the keys of nested dicts."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Undo `_nested`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{path}{name}/") if isinstance(value, dict) else {f"{path}{name}": value}
    return found
