"""`Checkpoint` in a program that spans several processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.callbacks import Checkpoint
from phalanx.errors import UnsupportedError
from phalanx.training.fit_resumption import resumable
from phalanx.training.replica import alone


def test_a_checkpoint_that_only_the_chief_writes_is_refused(tmp_path: Path) -> None:
    spanning = replace(alone(), mesh_parts=2)
    with pytest.raises(UnsupportedError, match="ShardedCheckpoint"), resumable([Checkpoint(tmp_path)], None, spanning):
        pass
