"""The program of one process: runs scenarios in turn and writes down what each found.

    python -m tests.training.worker plain TABLE FOLDER SCENARIO...                        Keras alone
    phalanx run --workers 2 -m tests.training.worker job TABLE FOLDER SCENARIO...         a rank
    python -m tests.training.worker sharded-3 TABLE FOLDER SCENARIO...                    one program

TABLE is a module with a dict `SCENARIOS`, such as tests.training.scenarios.

A scenario that raises does not stop the others. What rank r found in scenario s is pickled to FOLDER/s.r.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from tests.support.backends import ON_GPU
from tests.support.seeds import set_random_seed
from tests.training.scenarios.registry import Scenario, Setting

SEED = 1


def main(kind: str, table: str, folder: Path, names: list[str]) -> None:
    scenarios = importlib.import_module(table).SCENARIOS
    strategy = phalanx.MultiWorkerMirroredStrategy() if kind == "job" else one_program(kind)
    for name in names:
        found = _run(scenarios[name], strategy, folder)
        rank = 0 if strategy is None else strategy.rank
        partial = folder / f"{name}.{rank}.partial"
        partial.write_bytes(pickle.dumps(found))
        partial.rename(folder / f"{name}.{rank}")
        if strategy is not None and not _all_alike(strategy, name, found):
            return


def one_program(kind: str) -> Any:
    """A strategy of one program on four CPU devices, or on the GPUs of the machine, that divides small models too; None
    for plain Keras."""
    if kind == "plain":
        return None
    import jax

    from phalanx.engines.spmd import placement

    if not ON_GPU:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
    placement.MIN_SHARDED_SIZE = 4
    # Few of the small models are wide enough for four shards.
    devices = jax.device_count()
    mesh_shape = (2, devices // 2) if devices > 1 else (1, 1)
    makers: dict[str, Callable[[], Any]] = {
        "mirrored": lambda: phalanx.MirroredStrategy(engine="spmd"),
        **{f"sharded-{n}": partial(phalanx.ShardedStrategy, n, mesh_shape=mesh_shape) for n in (1, 2, 3)},
        "model-parallel": lambda: phalanx.ModelParallelStrategy(mesh_shape=mesh_shape),
    }
    return makers[kind]()


def _run(scenario: Scenario, strategy: Any, folder: Path) -> dict[str, Any]:
    keras.utils.clear_session(free_memory=False)  # a collection takes longer than most scenarios
    set_random_seed(SEED)
    rank = 0 if strategy is None else strategy.rank
    own, shared = folder / f"{scenario.name}.folder.{rank}", folder / f"{scenario.name}.shared"
    own.mkdir()
    shared.mkdir(exist_ok=True)
    start = time.process_time()
    found: dict[str, Any] = {}
    try:
        found["value"] = _plain_values(scenario.function(Setting(strategy, own, shared, keras.backend.backend())))
    except Exception as error:
        found["error"] = (type(error).__name__, str(error), traceback.format_exc())
    found["cpu_seconds"] = time.process_time() - start
    return found


def _plain_values(value: Any) -> Any:
    """Without objects of a backend, so that the process that compares needs none."""
    if isinstance(value, dict):
        return {key: _plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_values(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array.astype("float32") if array.dtype.name == "bfloat16" else array


def _all_alike(strategy: Any, name: str, found: dict[str, Any]) -> bool:
    """Whether all ranks raised, or none did: else they are out of step, and the job ends here."""
    payload = f"{name} {'error' in found}".encode()
    try:
        return len(set(strategy._replica.communicator.all_gather_bytes(payload))) == 1
    except phalanx.PhalanxError:
        traceback.print_exc()
        return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
