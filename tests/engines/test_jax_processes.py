"""Processes that become one JAX program: they meet, and when one is lost the others end at once and say which."""

from __future__ import annotations

import sys

import pytest

from phalanx.cluster.membership import Member, Membership
from phalanx.errors import ConfigurationError, PeerLostError
from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import environment

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif("jax" not in BACKENDS, reason="programs over several processes are JAX's"),
]
BOUND_S = 120.0


def run(*arguments: str, options: tuple[str, ...] = ()) -> tuple[int | None, str]:
    launcher = ["-m", "phalanx", "run", "--workers", "2", "--backend", "jax", *options]
    command = [sys.executable, *launcher, "-m", "tests.engines.spanning_program", *arguments]
    return finish(command, environment("jax"), bound_s=BOUND_S, start=fork_server.popen)


@pytest.mark.slow  # `test_spanning_fit` trains a model on them
@pytest.mark.parametrize("devices", [1, 4])
def test_a_program_spans_the_devices_of_all_processes(devices: int) -> None:
    options = () if devices == 1 else ("--devices-per-worker", str(devices))
    code, output = run(str(devices), options=options)
    assert code == 0, output
    assert output.count("has finished") == 2
    assert "[Gloo]" not in output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_with_a_process_that_is_killed_and_name_it(rank: int) -> None:
    code, output = run("1", "dies", str(rank))
    assert code == 137, output
    assert f"The job ended: worker/{rank} (rank {rank}" in output
    survivor = 1 - rank
    assert f"worker/{survivor} said: PeerLostError: worker/{survivor} (rank {survivor}) lost worker/{rank}" in output
    assert f"worker/{survivor}  exit code {PeerLostError.exit_code} (PeerLostError)" in output


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_error_of_the_program_is_the_cause_and_not_the_abort_of_jax(rank: int) -> None:
    code, output = run("1", "fails", str(rank))
    assert code == 1, output
    assert f"The job ended: worker/{rank} (rank {rank}" in output
    assert "KeyError: 'a mistake of the program'" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("early", "JAX has used a device already on worker/1, and cannot join the other processes any more"),
        ("other", "worker/1 differs: worker/0 has 1 of cpu (cpu), worker/1 has 2 of cpu (cpu)"),
    ],
)
def test_what_cannot_be_one_program_is_refused_before_the_first_step(how: str, message: str) -> None:
    code, output = run("1", how, "1")
    assert code == ConfigurationError.exit_code, output
    assert message in output


def test_devices_that_differ_are_named() -> None:
    from phalanx.engines.spmd.jax_processes import LocalDevices, check_same_devices

    members = tuple(Member(rank, f"worker/{rank}", "host", "", rank) for rank in range(3))
    gpu = LocalDevices(8, "gpu", "NVIDIA H100")
    check_same_devices(Membership(1, 0, members), [gpu, gpu, gpu])
    with pytest.raises(ConfigurationError, match=r"worker/2 differs: .*worker/2 has 8 of gpu \(NVIDIA A100\)"):
        check_same_devices(Membership(1, 0, members), [gpu, gpu, LocalDevices(8, "gpu", "NVIDIA A100")])
