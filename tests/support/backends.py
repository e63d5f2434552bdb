"""The backends that the tests of this run are for: those that the environment variable `BACKENDS` names."""

from __future__ import annotations

import os

BACKENDS = tuple(os.environ.get("BACKENDS", "jax tensorflow torch").split())
FIRST = BACKENDS[0]
