"""What the programs share beside their structure: small real data, and a way to say what came out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.digits import load_digits

Arrays = tuple[np.ndarray, np.ndarray]


def digits(training: int = 480, testing: int = 160) -> tuple[Arrays, Arrays]:
    """Handwritten digits of 8 x 8 pixels from 0 to 16, to train on and to test on, as MNIST comes."""
    images, labels = load_digits()
    images, labels = images.reshape(-1, 8, 8).astype("float32"), labels.astype("int64")
    return (images[:training], labels[:training]), (images[-testing:], labels[-testing:])


def report(**values: Any) -> None:
    """Write what this process found, numbers or lists of arrays, to a file of its own in the folder `REPORTS`."""
    found = {name: _plain(value) for name, value in values.items()}
    (Path(os.environ["REPORTS"]) / f"{Path(sys.argv[0]).stem}.{os.getpid()}.json").write_text(json.dumps(found))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value).tolist()
