"""Horovod's `BestModelCheckpoint`: a path that is set after it was constructed."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

from phalanx.errors import ConfigurationError
from phalanx.horovod.keras.callbacks import BestModelCheckpoint
from tests.supervisor.models import make_data, make_model


def test_the_best_model_is_saved_where_the_program_says(tmp_path: Path) -> None:
    callback, model = BestModelCheckpoint(monitor="loss"), make_model()
    with pytest.raises(ConfigurationError, match="set its filepath before fit"):
        model.fit(*make_data(), verbose=0, callbacks=[callback])
    callback.filepath = str(tmp_path / "best.keras")
    model.fit(*make_data(), epochs=2, verbose=0, callbacks=[callback])
    assert keras.models.load_model(tmp_path / "best.keras").count_params() == model.count_params()
