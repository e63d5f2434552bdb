"""`MirroredStrategy` as a program uses it that was started by `python`. Its processes: `test_local_replicas`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx
from phalanx.errors import ConfigurationError
from tests.support import fork_server
from tests.support.backends import slow_after_the_first
from tests.support.commands import finish
from tests.support.programs import environment

BOUND_S = 240.0
PROGRAM = Path(__file__).parent / "mirrored_program.py"
ONE_OF_EACH_FORM = [
    ("2", "None", "replicas 2"),
    ('["cpu:0", "cpu:1"]', "phalanx.HierarchicalCopyAllReduce", "replicas 2"),
    ('["/cpu:0", "/cpu:1", "/cpu:2"]', "phalanx.ReductionToOneDevice(reduce_to_device='cpu:1')", "replicas 3"),
    ("null", "phalanx.HierarchicalCopyAllReduce(num_packs=2)", "replicas 1"),
]

pytestmark = pytest.mark.timeout(600)


Plain = Callable[[str], dict[str, Any]]


def run(folder: Path, backend: str, kind: str, **variables: str) -> tuple[str, dict[str, Any]]:
    """What the program printed and found."""
    out = folder / f"{kind}.json"
    code, output = finish(
        [sys.executable, str(PROGRAM), kind, str(out)],
        environment(backend) | variables,
        bound_s=BOUND_S,
        start=lambda *arguments, **options: fork_server.popen(*arguments, starts_others=True, **options),
    )
    assert code == 0, output
    return output, json.loads(out.read_text())


@pytest.fixture(scope="module")
def plain_of(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What plain Keras finds on a backend."""
    return functools.cache(lambda backend: run(tmp_path_factory.mktemp("plain"), backend, "plain")[1])


def check(
    folder: Path, backend: str, plain: dict[str, Any], devices: str, ops: str, words: str, kind: str = "mirrored"
) -> None:
    output, found = run(folder, backend, kind, DEVICES=devices, OPS=ops)
    assert output.splitlines()[-1] == words  # and the other replicas print nothing
    assert [*found["history"]] == [*plain["history"]]
    for name in plain:
        if name == "history":
            continue
        for mine, expected in zip(found[name], plain[name], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, values in plain["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_a_program_started_by_python_trains_as_one_process(backend: str, tmp_path: Path, plain_of: Plain) -> None:
    check(tmp_path, backend, plain_of(backend), *ONE_OF_EACH_FORM[0])


@pytest.mark.parametrize("backend", slow_after_the_first())
def test_central_storage_trains_as_one_process(backend: str, tmp_path: Path, plain_of: Plain) -> None:
    check(tmp_path, backend, plain_of(backend), *ONE_OF_EACH_FORM[0], kind="central")


@pytest.mark.parametrize(
    ("devices", "ops", "words"), [pytest.param(*ONE_OF_EACH_FORM[1], marks=pytest.mark.slow), *ONE_OF_EACH_FORM[2:]]
)
@pytest.mark.parametrize("backend", slow_after_the_first())
def test_each_form_of_the_arguments(
    backend: str, devices: str, ops: str, words: str, tmp_path: Path, plain_of: Plain
) -> None:
    check(tmp_path, backend, plain_of(backend), devices, ops, words)


@pytest.mark.slow  # a scenario of the interface covers Phalanx's part
@pytest.mark.tensorflow
def test_checkpoints_have_the_values_of_all_replicas_as_those_of_tf_distribute(tmp_path: Path) -> None:
    """Each also restores what the other has saved."""

    def found(distribute: str, folder: str, *others: Path) -> dict[str, Any]:
        arguments = [str(PROGRAM.with_name("checkpoint_program.py")), distribute, str(tmp_path / folder)]
        code, output = finish(
            [sys.executable, *arguments, *map(str, others)], environment("tensorflow"), bound_s=BOUND_S
        )
        assert code == 0, output
        printed: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        return printed

    original = found("tf.distribute", "original")
    ours = found("phalanx", "ours", tmp_path / "original/saved/variables")
    again = found("tf.distribute", "again", tmp_path / "ours/saved/variables")
    assert original["saved"] == ours["saved"] == {"SUM": 3, "MEAN": 1.5, "ONLY_FIRST_REPLICA": 1}
    assert original["steps"] == ours["steps"][:3]
    assert ours["steps"] == again["steps"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "must be a number"),
        ("cpu:0", "must be a number"),
        (0, "at least one"),
        (True, "at least one"),
        (["x"], "'x'"),
    ],
)
def test_devices_that_make_no_sense_are_an_error_before_anything_is_started(devices: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        phalanx.MirroredStrategy(devices)
