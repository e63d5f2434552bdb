"""Which GPUs a program of Horovod's sees, and which is its own. No GPU is needed: what would be chosen is looked at."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from phalanx.horovod.visible_gpus import init_for
from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import environment

PROGRAM = """
import os
alone = os.environ["CUDA_VISIBLE_DEVICES"]
import phalanx.horovod.{module} as hvd
print("sees", alone, "then", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


def _seen(module: str, backend: str, folder: Path) -> list[str]:
    """What each of two workers on a host with the GPUs 4, 6 and 7 sees before and after the import."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(module=module))
    settings = environment(backend) | {"CUDA_VISIBLE_DEVICES": "4,6,7"}
    command = [sys.executable, "-m", "phalanx", "run", "--workers", "2", str(program)]
    code, output = finish(command, settings, bound_s=90, start=fork_server.popen)
    assert code == 0, output
    return sorted(line.partition("sees ")[2] for line in output.splitlines() if "sees" in line)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend == "torch"])
def test_where_programs_choose_by_local_rank_all_gpus_are_seen(backend: str, tmp_path: Path) -> None:
    assert _seen(backend, backend, tmp_path) == ["4 then 4,6,7", "6 then 4,6,7"]


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "torch"])
def test_with_keras_it_is_as_its_backend_has_it(backend: str, tmp_path: Path) -> None:
    shown = ["4", "6"] if backend == "jax" else ["4,6,7"] * 2
    assert _seen("keras", backend, tmp_path) == [f"4 then {shown[0]}", f"6 then {shown[1]}"]


@pytest.mark.parametrize("gpus", [1, 0])
@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
def test_init_chooses_the_gpu_of_the_local_rank_where_it_is_there(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delitem(os.environ, "TF_CONFIG", raising=False)
    import phalanx.horovod.torch as hvd

    hvd.init()
    try:
        hvd.init()  # a second time does nothing
        assert chosen == [0] * gpus
    finally:
        hvd.shutdown()


def test_jax_has_no_such_line() -> None:
    from phalanx.horovod import basics

    assert init_for("jax") is basics.init
