"""A pytest plugin that runs tests of Keras itself in a strategy's scope.

    phalanx run -n 2 -m pytest -p tests.differential.in_scope --pyargs keras.src.trainers.trainer_test

Every rank runs every test. Those of `ONE_PROCESS` look at what a single process does, and are skipped.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

import phalanx

ONE_PROCESS: dict[str, str] = {}
"""Tests that cannot pass with several replicas, and why."""

_strategies: list[phalanx.MultiWorkerMirroredStrategy] = []


def pytest_configure() -> None:
    _strategies.append(phalanx.MultiWorkerMirroredStrategy())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in ONE_PROCESS.items():
            if name in item.name and _strategies[0].num_replicas_in_sync > 1:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    with _strategies[0].scope():
        yield
