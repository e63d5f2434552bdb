"""What holds for all tests: a backend for Keras, and the same random examples in each run.

What is marked `slow` stands beside each test. `make test` leaves it out, `make test-slow` runs it.
"""

from __future__ import annotations

import os

import hypothesis

from tests.support.backends import FIRST

# The tests themselves use Keras a little, on any backend there is; jobs are told theirs.
os.environ.setdefault("KERAS_BACKEND", FIRST)

# The same examples in each run; how long one takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")
