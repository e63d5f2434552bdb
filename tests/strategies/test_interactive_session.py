"""`MirroredStrategy` where there is no program that could be run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from phalanx.cluster.membership import Member
from phalanx.errors import CollectiveMismatchError, LinkClosedError
from phalanx.launcher.worker_program import Program, runs_tests
from phalanx.runtime.function_call import encode_error
from phalanx.strategies import interactive_replicas
from phalanx.strategies.interactive_replicas import InteractiveReplicas, _ReplicaProcesses
from phalanx.strategies.replica_calls import Failed
from tests.support.backends import BACKENDS
from tests.support.commands import die_with_parent
from tests.support.programs import environment

BOUND_S = 1200.0
SESSION = Path(__file__).parent / "interactive_session.py"
COPIES = Path(__file__).parent / "copies_session.py"

pytestmark = pytest.mark.timeout(1300)


def run(folder: Path, backend: str, *, short: bool, session: Path = SESSION) -> dict[str, Any]:
    """What the session found; afterwards none of its processes is left."""
    variables = environment(backend) | {"PHALANX_TEST_MARK": str(folder)}
    if short:
        variables["SHORT"] = "1"
    with (
        session.open() as commands,
        subprocess.Popen(
            [sys.executable],
            stdin=commands,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            text=True,
            preexec_fn=die_with_parent,
        ) as process,
    ):
        try:
            output, errors = process.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            pytest.fail(f"the session took too long: {process.communicate()}")
    assert process.returncode == 0, errors
    assert left_behind(folder) == []
    return json.loads(output.rpartition("FOUND ")[2])  # type: ignore[no-any-return]


class _LinkToOneThatDidNotWait:
    """It has told that the method raised, and has ended since."""

    def receive(self, deadline: float) -> tuple[bytes, list[bytes]]:
        return msgspec.msgpack.encode(Failed()), [encode_error(ValueError("a shape does not fit"))]

    def send(self, header: bytes, buffers: list[bytes], deadline: float) -> None:
        raise LinkClosedError("closed")


def test_what_all_replicas_raise_is_raised_also_if_one_of_them_was_faster_and_has_ended() -> None:
    processes = object.__new__(_ReplicaProcesses)
    processes._errors, processes._timeout_s, processes._local_replicas = {}, 1.0, None
    processes._links = SimpleNamespace(links={1: _LinkToOneThatDidNotWait()})  # type: ignore[assignment]
    member = Member(1, "worker/1", "here", "127.0.0.1:1", 1)
    processes.job = SimpleNamespace(membership=SimpleNamespace(members=[member, member]))  # type: ignore[assignment]
    assert not processes.confirm_common_failure(ValueError("a shape does not fit")), "and no PeerLostError"


def test_a_session_whose_collectives_have_failed_is_not_kept() -> None:
    assert not object.__new__(_ReplicaProcesses).confirm_common_failure(CollectiveMismatchError("float32 and bfloat16"))


def test_a_session_ends_with_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    job = SimpleNamespace(before_leaving=called.append)
    processes = SimpleNamespace(job=job, close=lambda: called.append("closed"))
    monkeypatch.setattr(interactive_replicas, "_ReplicaProcesses", lambda devices, join: processes)
    replicas = object.__new__(InteractiveReplicas)
    replicas.devices, replicas._join = ["cpu:0", "cpu:1"], lambda: pytest.fail("another one is there")
    assert replicas._start() is processes
    leave = called.pop()
    leave()
    leave()
    assert called == ["closed"]
    assert replicas._processes is None


def left_behind(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("PHALANX_TEST_MARK") == str(folder):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def check(found: dict[str, Any], *sessions: str) -> None:
    for session in sessions:
        for name, values in found["plain"].items():
            if isinstance(values, dict):
                assert [*found[session][name]] == [*values]
                values, other = [*values.values()], [*found[session][name].values()]
            else:
                other = found[session][name]
            np.testing.assert_allclose(other, values, rtol=1e-4, atol=1e-4, err_msg=f"{session}: {name}")
    np.testing.assert_allclose(found["alternating"], found["alternating plainly"], rtol=1e-4, atol=1e-4)
    assert "cardinality" in found["both"]
    assert found["interrupted"].startswith("KeyboardInterrupt")
    assert "fit(x=...) cannot travel" in found["generator"]
    assert "phalanx.launch" in found["reduce"]
    assert found["steps"] == 4
    assert found["logged"] == 1
    assert found["again"] == 2


def test_cells_train_as_one_process_and_can_be_interrupted(tmp_path: Path) -> None:
    check(run(tmp_path, BACKENDS[0], short=True), "session")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_survives_what_goes_wrong(backend: str, tmp_path: Path) -> None:
    found = run(tmp_path, backend, short=False)
    check(found, "session", "three")
    assert found["one"] == "ZeroDivisionError: on one replica alone"
    assert found["killed"].startswith("PeerLostError: worker/0 (rank 0) lost worker/1")
    assert found["left"] == ""
    assert "was replaced by a later one" in found["replaced"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_have_what_the_program_has_set_or_are_refused(backend: str, tmp_path: Path) -> None:
    found = run(tmp_path, backend, short=True, session=COPIES)
    for name, (expected, results) in found["equal"].items():
        # Parts of a batch are rounded differently where numbers have few digits.
        tolerance = 0.02 if name in ("settings", "quantized") else 1e-4
        assert len(results) == len(expected), name
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=name)
    refusals = {
        "layer": "has the Activation layer 'activation'",
        "function": "The attribute 'act' of",
        "array": "The attribute 'scale' of",
        "deque": "is a deque",
    }
    for name, expected in refusals.items():
        assert found[name].startswith("UnsupportedError"), found[name]
        assert expected in found[name]
    assert found["mismatch"].startswith("CollectiveMismatchError")
    assert found["after"] == "", "other replicas have started"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-m", "pytest", "tests"), True),
        (("-m", "unittest"), True),
        (("/somewhere/bin/pytest", "-x"), True),
        (("-c", "import execnet.gateway_base"), True),
        (("train.py", "pytest"), False),
        (("-m", "train"), False),
    ],
)
def test_a_test_run_is_no_program_to_run_again(arguments: tuple[str, ...], expected: bool) -> None:
    assert runs_tests(Program(arguments)) is expected
