"""What is known of the data that was trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.training.ledger import Ledger

__all__ = ["ledger"]


def ledger() -> dict[int, np.ndarray[Any, Any]]:
    """How often each sample was used in steps that were applied, in the last `fit` of this process.

    One is kept in jobs whose members come and go and in every `fit` with a `phalanx.callbacks.Checkpoint`, where the
    samples have numbers: arrays, and map-style DataLoaders. It goes on where the training goes on.

    Returns: for each epoch that is over its counts, shape (samples,), uint8; the same on all ranks.

    Raises: ConfigurationError if there is none.
    """
    newest = Ledger.newest()
    if newest is None:
        raise ConfigurationError(
            "There is no ledger: it is kept by `fit` over arrays and map-style DataLoaders, in jobs whose members come "
            "and go (phalanx run --workers MIN:MAX) or with a phalanx.callbacks.Checkpoint."
        )
    return {epoch: counts.copy() for epoch, counts in newest.epochs.items()}
