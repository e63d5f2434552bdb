"""The hint that a replica sees a part of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.training.checks.model_checks import annotate_size_errors

BY_KERAS = """Exception encountered when calling Odd.call().

Could not automatically infer the output shape / dtype of 'odd' (of type Odd). Error encountered:

{text}

Arguments received by Odd.call():
  args=('<KerasTensor shape=(None, 6), dtype=float32>',)"""


@pytest.mark.parametrize(
    ("text", "hinted"),
    [
        ("shape '[8, 6]' is invalid for input of size 36", True),
        (BY_KERAS.format(text="shape '[8, 6]' is invalid for input of size 36"), True),
        (BY_KERAS.format(text="odd numbers are refused"), False),
    ],
)
def test_errors_about_sizes_get_a_hint(text: str, hinted: bool) -> None:
    with pytest.raises(ValueError, match=r"numbers|invalid") as caught, annotate_size_errors(np.zeros((6, 6)), 2):
        raise ValueError(text)
    notes = getattr(caught.value, "__notes__", [])
    assert ["this one 6 samples" in note for note in notes] == [True] * hinted
