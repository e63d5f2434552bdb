"""What a worker need not import, and that nothing is missing for it. In processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.keras_compat.lazy_imports import DEFERRED
from tests.support.backends import FIRST
from tests.support.programs import check_python

BOUND_S = 120.0


PRELUDE = """
import json, sys, types
import keras

def show_loaded():
    import phalanx.keras_compat.lazy_imports as lazy_imports
    executed = [name for name in lazy_imports.DEFERRED if type(sys.modules.get(name)) is types.ModuleType]
    print(json.dumps(executed + [name for name in ("sklearn", "matplotlib.pyplot", "pandas") if name in sys.modules]))
"""


def loaded(folder: Path, *parts: str) -> list[list[str]]:
    """Which of some modules are loaded after each of these parts of a worker's program, which has imported Keras."""
    program = folder / "program.py"
    program.write_text("\n".join([PRELUDE, *(f"{part}\nshow_loaded()" for part in parts)]))
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "--workers", "1", str(program)],
        env={**os.environ, "KERAS_BACKEND": FIRST},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    return [json.loads(line.removeprefix("[worker/0] ")) for line in done.stdout.splitlines()[-len(parts) :]]


TRAINED = """
import numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 3)), np.ones((8, 1)), validation_split=0.5, verbose=0)
"""
TRAINED_ON_TABLES = """
import pandas
table, series = pandas.DataFrame(np.ones((8, 3))), pandas.Series(np.ones(8))
model.fit(table, series, validation_split=0.5, verbose=0)
assert model.predict(table, verbose=0).shape == (8, 1)
from keras.src.trainers.data_adapters import array_slicing
kinds = [type(made).__name__ for made in array_slicing.convert_to_sliceable((table, series))]
assert kinds == ["PandasDataFrameSliceable", "PandasSeriesSliceable"], kinds
assert array_slicing.can_slice_array(table) and not array_slicing.can_slice_array([1.0])
"""


def test_a_worker_imports_wrappers_pictures_and_tables_when_the_program_uses_them_and_not_with_keras(tmp_path):
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    used = "assert keras.wrappers.SKLearnClassifier and keras.visualization.plot_image_gallery"
    before, after = loaded(tmp_path, TRAINED, TRAINED_ON_TABLES + used)
    assert before == []
    assert {"pandas", "sklearn", "keras.wrappers", "keras.visualization"} <= set(after)


def test_there_is_all_that_is_deferred():
    """Each name still means something: Keras moves its modules now and then."""
    there = [name for name in sorted(DEFERRED) if name.startswith("keras") or FIRST == "jax"]
    program = f"""
import importlib.util
import keras
for name in {there!r}:
    assert importlib.util.find_spec(name) is not None, name
"""
    check_python("-c", program, backend=FIRST)
