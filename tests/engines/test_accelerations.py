"""Which accelerations `PHALANX_ACCELERATIONS` enables."""

from __future__ import annotations

import importlib

import pytest

from phalanx.engines.accelerations.registry import KNOWN, enabled_accelerations
from phalanx.errors import ConfigurationError
from tests.support.backends import FIRST
from tests.support.programs import run_python


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set(KNOWN)),
        ("all", set(KNOWN)),
        ("none", set()),
        ("torch_fused_adam", {"torch_fused_adam"}),
        ("torch_fused_adam, vectorized_updater", {"torch_fused_adam", "vectorized_updater"}),
        ("-torch_fused_adam", set(KNOWN) - {"torch_fused_adam"}),
    ],
)
def test_names_enable_and_disable(text: str, expected: set[str]) -> None:
    assert enabled_accelerations(text) == expected


@pytest.mark.parametrize("text", ["fast", "-fast", "torch_fused_adam,-vectorized_updater", "all,none"])
def test_unknown_names_are_errors_that_list_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigurationError, match="vectorized_updater"):
        enabled_accelerations(text)


def test_each_has_a_module_of_its_name() -> None:
    for name in KNOWN:
        assert importlib.util.find_spec(f"phalanx.engines.accelerations.{name}")


PROGRAM = """
import keras, numpy as np
from phalanx.engines import make_updater
from phalanx.engines.updater import UpdaterPiece
from phalanx.keras_compat.copies.object_config import config_json_of

pieces = [UpdaterPiece(name, np.ones(3, "float32"), None, True) for name in "ab"]
updater = make_updater(config_json_of(keras.optimizers.Adam()), pieces)
print(len(updater.groups))
"""


@pytest.mark.parametrize(("text", "groups"), [("none", 2), ("-torch_fused_adam", 1)])
def test_engines_ask_the_variable(text: str, groups: int) -> None:
    code, output = run_python("-c", PROGRAM, backend=FIRST, variables={"PHALANX_ACCELERATIONS": text})
    assert code == 0, output
    assert output.split()[-1] == str(groups)
