"""Callbacks that save, in a program that spans several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from phalanx.engines.spmd.placement import Placement
from phalanx.errors import UnsupportedError
from phalanx.training.saver_claims import refuse_divided


@pytest.mark.parametrize("level", [0, 3])
def test_what_the_chief_would_save_or_restore_alone_is_refused_by_name(level: int, tmp_path: Path) -> None:
    mesh: Any = None
    placement = Placement(mesh, ("data",), "data", level)
    with pytest.raises(UnsupportedError, match=r"BackupAndRestore alone.*phalanx.callbacks.Checkpoint"):
        refuse_divided([keras.callbacks.BackupAndRestore(tmp_path)], placement)
    best = [keras.callbacks.ModelCheckpoint(tmp_path / "best.keras")]
    if level == 0:  # every process holds the whole model
        refuse_divided(best, placement)
    else:
        with pytest.raises(UnsupportedError, match="ModelCheckpoint alone"):
            refuse_divided(best, placement)
