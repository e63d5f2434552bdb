"""Several CPU devices of one JAX process get threads enough."""

from __future__ import annotations

import os

import pytest

from phalanx.devices import cpu_devices
from phalanx.devices.cpu_devices import reserve_device_threads

FORCED = {"XLA_FLAGS": "--other=1 --xla_force_host_platform_device_count=64"}


@pytest.mark.parametrize(
    ("before", "has_begun", "after"),
    [
        (FORCED, False, {**FORCED, "PJRT_NPROC": str(max(os.cpu_count() or 1, 256))}),
        ({**FORCED, "PJRT_NPROC": "3"}, False, {**FORCED, "PJRT_NPROC": "3"}),
        (FORCED, True, FORCED),
        ({}, False, {}),
    ],
)
def test_threads_follow_the_devices(
    before: dict[str, str], has_begun: bool, after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_devices, "is_initialized", lambda backend: has_begun)
    environ = dict(before)
    reserve_device_threads(environ)
    assert environ == after
