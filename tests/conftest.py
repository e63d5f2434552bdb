"""What holds for all tests: a backend for Keras, and the same random examples in each run.

What is marked `slow` stands beside each test. `make test` leaves it out, `make test-slow` runs it.
"""

from __future__ import annotations

import gc
import os
import sys

import hypothesis
import pytest

from phalanx.keras_compat import lazy_imports
from tests.support import compilation
from tests.support.backends import FIRST

# The tests themselves use Keras a little, on any backend there is; jobs are told theirs.
os.environ.setdefault("KERAS_BACKEND", FIRST)
# Of this process and of the programs that it starts. Threads of PyTorch that wait for each other spin: where all cores
# are busy with other tests, a step of a small model takes three to ten times as long with two threads as with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")  # as workers have it, which are forked from the same template then
lazy_imports.install()  # Keras imports scikit-learn, pandas and Matplotlib, which take longer than Keras
# The process that starts those of pytest-xdist makes the folder that they share.
os.environ.update(compilation.settings(os.environ["KERAS_BACKEND"]))

# The same examples in each run; how long one takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

LONGEST = (
    *("training/test_scenarios", "parameter_server/test_restarts", "horovod/test_parallel", "elastic/test_jobs"),
    *("training/test_deterministic", "engines/test_spanning_fit", "engines/test_spanning_restart"),
    *("collectives/test_failures", "launcher/test_run_command", "training/test_one_program", "chaos/test_chaos"),
    *("parameter_server/test_training", "parameter_server/test_faults", "keras_compat/test_contract"),
    *("strategies/test_mirrored_strategy", "collectives/test_contract", "strategies/test_interface"),
    *("compression/test_scenarios", "strategies/test_interactive_session", "launcher/test_terminal"),
    *("parameter_server/test_embedding_rows", "launcher/test_host_pool"),
)
"""Modules that take half a minute or more, the longest first: one that comes late keeps a core waiting at the end."""


@pytest.hookimpl(tryfirst=True)  # before `pytest-xdist` reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a module on one backend share their jobs, and so run one after another (`--dist loadgroup`)."""

    def place(item: pytest.Item) -> int:
        module = item.nodeid.partition(".py")[0].removeprefix("tests/")
        return LONGEST.index(module) if module in LONGEST else len(LONGEST)

    items.sort(key=place)
    # Hypothesis looks at each module's `__file__`, which would import what is deferred.
    for name in lazy_imports.DEFERRED:
        if type(sys.modules.get(name)).__name__ == "_LazyModule":
            del sys.modules[name]
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        backend = parameters.get("backend", "")
        item.add_marker(pytest.mark.xdist_group(f"{item.nodeid.partition('::')[0]} {backend}".strip()))


@pytest.hookimpl(trylast=True)  # after `pytest-xdist` has named the groups
def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # or a collection in a fork would write to every page, and so copy it
    if getattr(session.config.option, "loadgroup", False):
        assert all("@" in item.nodeid for item in session.items), "pytest-xdist would not keep a group's tests together"
