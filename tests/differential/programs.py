"""Whole Keras programs, as hypothesis draws them, and the scripts that repeat them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from textwrap import indent

from hypothesis import strategies as st

from tests.differential import comparison
from tests.differential.actions import Actions
from tests.differential.architectures import draw_architecture
from tests.differential.compilation import draw_compile
from tests.differential.inputs import draw_data
from tests.differential.writer import Writer

TOLERANCES = {"float32": 2e-5, "float64": 1e-6, "mixed_bfloat16": 5e-2, "mixed_float16": 5e-3, "bfloat16": 5e-2}
"""Of the largest value of an array. Float32 rounds at 1e-7, and a few dozen operations add up. What programs in float64
compute of data alone (targets, weights) is in float32."""
FLOAT8_TOLERANCE = 5e-2
"""A gradient in the middle between two values of float8 is rounded the other way if its last bit differs."""

SNAPSHOT = '''
def snapshot(model):
    """All that training has changed."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return {
        "iterations": int(optimizer.iterations),
        "weights": [ops.convert_to_numpy(v) for v in model.variables if "seed" not in v.path],
        "optimizer": [ops.convert_to_numpy(v) for v in model.optimizer.variables],
        "metrics": keras.tree.map_structure(ops.convert_to_numpy, model.get_metrics_result()),
    }
'''


@dataclass(frozen=True)
class Program:
    """A program in Python, without the lines that run it.

    Attributes:
        source: defines `program(scope, folder)`, which yields labels and values.
        tolerance: of the comparison, relative.
    """

    source: str
    world_size: int
    tolerance: float

    def script(self, title: str) -> str:
        """A script for `phalanx run` that compares the replicas with plain Keras."""
        parts = (
            f'"""{title}\n\n    KERAS_BACKEND=... phalanx run -n {self.world_size} script.py\n"""\n',
            "import contextlib\nimport pathlib\nimport sys\nimport tempfile\nfrom typing import Any\n",
            self.source,
            "\n",
            inspect.getsource(comparison.flatten),
            "\n",
            inspect.getsource(comparison._distance),
            "\n",
            inspect.getsource(comparison.differences),
            "\n",
            'if __name__ == "__main__":',
            indent(_MAIN.format(tolerance=self.tolerance), "    "),
        )
        return "\n".join(parts)


_MAIN = """import phalanx

strategy = phalanx.MultiWorkerMirroredStrategy()
folder = pathlib.Path(tempfile.mkdtemp())
together = [(label, flatten(value)) for label, value in program(strategy.scope, folder)]
alone = [(label, flatten(value)) for label, value in program(contextlib.nullcontext, folder)]
found = [
    f"{{label}}{{difference}}"
    for (label, actual), (_, expected) in zip(together, alone, strict=True)
    for difference in differences(actual, expected, {tolerance})
]
print("\\n".join(found) or "equal")
sys.exit(bool(found))"""


@st.composite
def programs(draw: st.DrawFn, backend: str) -> Program:
    """Programs that plain Keras runs, nearly all of them."""
    w = Writer(draw, backend)
    world_size = w.one_of([2, 2, 2, 2, 3, 3, 3, 1])
    others = ["mixed_bfloat16", "mixed_float16", *(["float64"] if backend != "jax" else [])]
    precision = w.one_of(["float32"] * 8 + others)
    w.write("keras.backend.clear_session()")
    w.write(f"keras.utils.set_random_seed({w.number(0, 3)})")
    if precision == "float64":
        w.write("keras.config.set_floatx('float64')")
    if precision != "float32":
        w.write(f"keras.config.set_dtype_policy('{precision}')")
        w.rounds_coarsely = precision != "float64"
    w.write("rng = np.random.default_rng(0)")
    with w.in_scope():
        architecture = draw_architecture(w)
        w.write(draw_compile(w, architecture))
    data = draw_data(w, architecture, "", weighted=w.chance(3))
    Actions(w, architecture, data).draw()
    w.imports |= {"import random", *(["import torch"] if backend == "torch" else [])}
    of_torch = ", float(torch.rand(()))" if backend == "torch" else ""
    w.write(f'yield "drawn", [random.random(), np.random.random(){of_torch}]')
    imports = [
        "import keras",
        "import numpy as np",
        *sorted(w.imports),
        "from keras import layers, losses, metrics, ops, optimizers",
    ]
    functions = [SNAPSHOT.strip("\n"), *w.definitions.values(), "\n".join(["def program(scope, folder):", *w.lines])]
    source = "\n".join(imports) + "\n\n\n" + "\n\n\n".join(functions) + "\n"
    return Program(source, world_size, FLOAT8_TOLERANCE if "float8" in source else TOLERANCES[precision])
