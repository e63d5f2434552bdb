"""`phalanx env` and `phalanx doctor`: facts about a machine, and what they mean."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from phalanx.cli.main import cli
from phalanx.errors import RendezvousError
from phalanx.launcher import machine_check
from phalanx.launcher.environment_report import render, shown_variables
from phalanx.launcher.host_slots import HostSpec
from phalanx.launcher.machine import Machine, describe_machine, gpu_models
from phalanx.launcher.machine_check import BackendProbe, Severity, check_backend_choice, check_machine, probe_backend
from tests.launcher.conftest import Launcher
from tests.launcher.test_ssh_host import install_ssh

GIB = 2**30
MACHINE = Machine(
    system="Debian, Linux 6.1, x86_64",
    python="3.11.7 (/usr/bin/python)",
    packages={"phalanx": "0.2.0", "keras": "3.15.1"},
    cores=8,
    quota=2.0,
    memory=16 * GIB,
    free_memory=12 * GIB,
    shared_memory=8 * GIB,
    descriptors=(1024, 1_000_000),
    gpus=(),
)
JAX = BackendProbe("jax", "0.10.2", (), "")


def test_a_report_of_a_bug_has_versions_the_machine_and_no_secret() -> None:
    environment = {"KERAS_BACKEND": "torch", "PHALANX_SECRET": "abc", "TF_CONFIG": "{}", "HOME": "/me", "PATH": "/bin"}
    text = render(MACHINE, environment)
    assert "  keras 3.15.1\n" in text
    assert "Cores: 8, of which the container grants 2\n" in text
    assert "Keras backend: torch\n" in text
    assert "abc" not in text
    assert shown_variables(environment) == {
        "KERAS_BACKEND": "torch",
        "PHALANX_SECRET": "(set, hidden)",
        "TF_CONFIG": "{}",
    }


def test_no_password_in_a_value_is_in_the_report() -> None:
    environment = {
        "PHALANX_SSH": "sshpass -p hunter2 ssh",
        "KERAS_HOME": "https://me:hunter2@files.example/keras",
        "TF_PASSWD": "hunter2",
        "JAX_ACCESS_KEY": "hunter2",
    }
    assert shown_variables(environment) == {
        "JAX_ACCESS_KEY": "(set, hidden)",
        "KERAS_HOME": "https://(hidden)@files.example/keras",
        "PHALANX_SSH": "sshpass -p(hidden) ssh",
        "TF_PASSWD": "(set, hidden)",
    }


def test_the_command_describes_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_SECRET", "hidden from all")
    done = CliRunner().invoke(cli, ["env"])
    assert done.exit_code == 0
    assert f"Cores: {len(os.sched_getaffinity(0))}" in done.output
    assert "hidden from all" not in done.output
    machine = describe_machine({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert len(machine.gpus) == 2
    assert machine.memory is not None
    assert machine.memory > machine.free_memory  # type: ignore[operator]


def test_of_the_variables_that_begin_like_tensorflows_only_its_own_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TF_")]:  # of the tests before
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", "/of/terraform")
    for name in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "TF_USE_LEGACY_KERAS"):
        monkeypatch.setenv(name, "{}")
    lines = CliRunner().invoke(cli, ["env"]).output.splitlines()
    assert [line for line in lines if line.startswith("  TF_")] == [
        "  TF_CONFIG={}",
        "  TF_CPP_MIN_LOG_LEVEL={}",
        "  TF_USE_LEGACY_KERAS={}",
    ]


def test_each_host_that_was_named_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("probe_backends", "check_machine", "check_backend_choice"):
        monkeypatch.setattr(machine_check, check, lambda *facts: [])
    lines = CliRunner().invoke(cli, ["doctor", "--hosts", "localhost:2"]).output.splitlines()
    assert [line.partition(":")[0] for line in lines[-1:]] == ["ok       localhost"]


def test_the_driver_names_the_gpus(tmp_path: Path) -> None:
    for bus, model in (("0000:01", "NVIDIA H100"), ("0000:02", "NVIDIA L4")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ: 7\n")
    assert gpu_models(tmp_path) == ("NVIDIA H100", "NVIDIA L4")


def verdicts(machine: Machine, *backends: BackendProbe) -> list[str]:
    return [finding.text for finding in check_machine(machine, backends) if finding.severity is not Severity.OK]


def test_a_machine_that_can_train_has_no_notes() -> None:
    assert verdicts(MACHINE, JAX) == []
    unknown = replace(MACHINE, memory=None, free_memory=None, descriptors=(-1, -1))
    assert verdicts(unknown, JAX) == []


@pytest.mark.parametrize(
    ("machine", "backends", "text"),
    [
        (replace(MACHINE, shared_memory=None), [JAX], "/dev/shm cannot be written to"),
        (replace(MACHINE, shared_memory=64 * 2**20), [JAX], "--shm-size"),
        (replace(MACHINE, free_memory=GIB), [JAX], "a worker needs about 1 GiB"),
        (replace(MACHINE, descriptors=(256, 256)), [JAX], "at most 256"),
        (replace(MACHINE, gpus=("NVIDIA L4",)), [JAX], "although this machine has 1 GPU(s)"),
        (replace(MACHINE, packages={}), [JAX], "Keras is not installed"),
        (MACHINE, [], "no backend is installed"),
        (MACHINE, [JAX._replace(error="ImportError: no libcuda")], "cannot be imported: ImportError: no libcuda"),
    ],
)
def test_what_hinders_is_named(machine: Machine, backends: list[BackendProbe], text: str) -> None:
    (found,) = verdicts(machine, *backends)
    assert text in found


def test_a_backend_is_imported_to_know_that_it_works(tmp_path: Path) -> None:
    package = tmp_path / "jax.py"
    package.write_text("__version__ = '9'\nclass _Cpu: platform = 'cpu'\ndef devices(): return [_Cpu()]\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert probe_backend("jax", environment) == BackendProbe("jax", "9", [], "")
    package.write_text("import os\nif os.environ['KERAS_BACKEND'] != 'jax': raise ImportError\n" + package.read_text())
    assert probe_backend("jax", environment | {"KERAS_BACKEND": "mxnet"}).error == "", "TensorFlow imports Keras"
    package.write_text("raise ImportError('libmkl is missing')")
    assert probe_backend("jax", environment).error == "ImportError: libmkl is missing"


@pytest.mark.parametrize(
    ("chosen", "text"), [("jax", None), ("tensorflow", "not installed: pass --backend jax"), ("mxnet", "not a backend")]
)
def test_a_backend_that_programs_would_miss_is_named(chosen: str, text: str | None) -> None:
    found = [finding.text for finding in check_backend_choice(chosen, ["jax"])]
    assert not found if text is None else text in found[0]


DOCTOR = """
    from phalanx.launcher import machine_check
    from phalanx.launcher.host_slots import parse_hosts
    machine_check.probe_backends = lambda environment: [machine_check.BackendProbe("jax", "9", (), "")]
    sys.exit(machine_check.run(parse_hosts("127.0.0.2:1,127.0.0.3:2")))
    """


def test_what_ssh_says_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        def __init__(self, selector: object, host_spec: HostSpec, *, show_line: Callable[[str], None]):
            self.name, self._say = host_spec.name, show_line

        def connect(self) -> None:
            self._say("[a] debug1: read [/etc/ssh/ssh_config], [bold]")

        def ports(self, deadline: float) -> list[int]:
            raise RendezvousError("a did not answer")

        def close(self) -> None:
            pass

    monkeypatch.setattr(machine_check, "SSHHost", Unreachable)
    console = Console(file=io.StringIO())
    with console.capture() as captured:
        (finding,) = machine_check._check_hosts([HostSpec("a", 1)], console)
    assert captured.get() == "[a] debug1: read [/etc/ssh/ssh_config], [bold]\n"
    assert finding.severity is Severity.PROBLEM


def test_other_hosts_are_tried_as_a_job_would_use_them(launcher: Launcher) -> None:
    install_ssh(launcher)
    done = launcher.python(launcher.script(DOCTOR))
    assert done.code == 0, done.out
    for host in ("127.0.0.2", "127.0.0.3"):
        assert f"ok       {host}: Phalanx answers through ssh after" in done.out
    launcher.environment["PHALANX_SSH"] = "false"
    done = launcher.python(launcher.script(DOCTOR))
    assert done.code == 66
    assert "problem  127.0.0.2: ssh to 127.0.0.2 ended with exit code 1" in done.out
