"""Workers on different backends in one job."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.parameter_server.tasks import Tasks
from tests.parameter_server.test_faults import BATCHES
from tests.support.backends import BACKENDS, FIRST

EPOCHS = 4


class Mixed(Tasks):
    """Some tasks run on another backend than all else: the last worker."""

    others = ("worker/1",)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        self._backend = BACKENDS[-1] if name in self.others else FIRST
        return super().start(name)


class OnOtherServers(Mixed):
    """The servers; a backend has its own idea of how many bytes a count of steps takes."""

    others = ("ps/0", "ps/1")

    def start(self, name: str) -> subprocess.Popen[bytes]:
        self._backend = BACKENDS[1] if name in self.others else FIRST
        return super(Mixed, self).start(name)


class UnderAnotherChief(Mixed):
    """The chief, which describes the optimizer. Keras has ones of its own for PyTorch."""

    others = ("worker/0",)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(BACKENDS) < 2, reason="BACKENDS names one only")
@pytest.mark.parametrize(
    ("chief", "kinds"),
    # The chief's backend draws the first weights and the order of the data.
    [(FIRST, (Tasks, Mixed, OnOtherServers)), (BACKENDS[-1], (Tasks, UnderAnotherChief))],
)
def test_workers_on_two_backends_train_as_those_on_one(
    tmp_path: Path, chief: str, kinds: Sequence[type[Tasks]]
) -> None:
    weights = []
    for kind in kinds:
        folder = tmp_path / kind.__name__
        folder.mkdir()
        program = ["-m", "tests.parameter_server.program", str(folder), "synchronous", str(EPOCHS)]
        with kind(folder, program, servers=2, workers=2, backend=chief) as tasks:
            assert set(tasks.ends().values()) == {0}, tasks.everything()
        assert (folder / "0.end").read_text() == f"{EPOCHS * BATCHES} True"
        with np.load(folder / "1.weights.npz") as archive:
            weights.append([archive[name] for name in archive.files])
    for one, *others in zip(*weights, strict=True):
        for other in others:
            np.testing.assert_allclose(other, one, atol=1e-4)
