"""Pickles travel only between processes that have proved the job's secret, over connections that no one can change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.config.job_config import Encryption
from phalanx.errors import ConfigurationError
from phalanx.horovod import object_collectives
from phalanx.horovod.horovod_job import HorovodJob


class Job:
    """What `check_pickle_is_safe` asks of a job, with the answers of the real one."""

    has_secret, is_protected = HorovodJob.has_secret, HorovodJob.is_protected

    def __init__(self, *hosts: str, encryption: Encryption, secret: bytes | None = b"secret", tls: Any = None):
        self._node = SimpleNamespace(config=SimpleNamespace(secret=secret, tls=tls, encryption=encryption))
        members = [SimpleNamespace(host=host) for host in hosts]
        self.membership = SimpleNamespace(members=members, world_size=len(members))


def check_trust(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    monkeypatch.setattr(object_collectives, "current_job", lambda: job)
    object_collectives.check_pickle_is_safe("broadcast_object")


@pytest.mark.parametrize(
    "job",
    [
        Job("a", "a", "b", encryption=Encryption.ALWAYS),
        Job("a", "b", encryption=Encryption.REMOTE),
        Job("a", "a", encryption=Encryption.NEVER, tls="files"),
        Job("a", encryption=Encryption.NEVER, secret=None),
    ],
    ids=["encrypted", "between hosts", "TLS", "alone"],
)
def test_objects_travel_over_protected_connections(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    check_trust(monkeypatch, job)


@pytest.mark.parametrize(
    ("job", "match"),
    [
        (Job("a", "b", encryption=Encryption.NEVER), "PHALANX_ENCRYPTION exempts"),
        (Job("a", "a", "b", encryption=Encryption.REMOTE), "PHALANX_ENCRYPTION exempts"),
        (Job("a", "b", encryption=Encryption.ALWAYS, secret=None), "no secret"),
    ],
    ids=["never", "two on one host", "no secret"],
)
def test_objects_that_someone_could_replace_are_refused(monkeypatch: pytest.MonkeyPatch, job: Job, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        check_trust(monkeypatch, job)
