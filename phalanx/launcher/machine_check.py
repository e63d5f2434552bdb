"""`phalanx doctor` without a cluster: checks whether this machine, and those of `--hosts`, can train.

`check_machine` evaluates facts. The other checks are trials: they import each backend in a separate process, open a
port, and start Phalanx's agent on other hosts through ssh, as `phalanx run` does.
"""

from __future__ import annotations

import enum
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import KERAS_BACKEND
from phalanx.config.keras_backends import BACKENDS, installed_backends, keras_backend
from phalanx.devices.gpu_count import ON_DEMAND_ALLOCATION
from phalanx.errors import PhalanxError, RendezvousError
from phalanx.launcher.host_slots import HostSpec
from phalanx.launcher.hosts.ssh_host import SSHHost
from phalanx.launcher.machine import Machine, as_gib, describe_machine, describe_quota
from phalanx.launcher.worker_placement import START_TIMEOUT_S
from phalanx.monitoring.startup_noise import QUIET
from phalanx.transport.address import LOOPBACK, Address
from phalanx.transport.dial import connect
from phalanx.transport.ports import listen_at

# Long enough to import a backend from a cold network file system.
IMPORT_TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 5.0
MIB = 2**20
# The default of containers. Phalanx itself needs a few MiB, processes that load data need much more.
SMALL_SHARED_MEMORY = 64 * MIB
# Keras and a backend, without a model.
WORKER_MEMORY = 1024 * MIB
FEW_DESCRIPTORS = 1024

_PROBE = """
import importlib, json, sys
name = sys.argv[1]
module = importlib.import_module(name)
if name == "jax":
    gpus = [str(each.device_kind) for each in module.devices() if each.platform != "cpu"]
elif name == "tensorflow":
    gpus = [each.name for each in module.config.list_physical_devices("GPU")]
else:
    gpus = [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
print(json.dumps([module.__version__, gpus]))
"""


class Severity(enum.Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class CheckResult(NamedTuple):
    """The result of one check."""

    severity: Severity
    text: str


class BackendProbe(NamedTuple):
    """The result of importing a backend.

    Attributes:
        error: The last line of its error output; empty if it succeeded.
    """

    name: str
    version: str
    gpus: Sequence[str]
    error: str


def run(hosts: Sequence[HostSpec] = ()) -> int:
    """Examine this machine and other hosts, print the findings, and return the exit code: 0 if there is no problem."""
    console = Console()
    environment = process_environment()
    machine = describe_machine(environment)
    found = []
    with console.status("importing the backends"):
        backends = probe_backends(environment)
    chosen = check_backend_choice(keras_backend(environment), [backend.name for backend in backends])
    for result in (*check_machine(machine, backends), *chosen, _check_port(), *_check_hosts(hosts, console)):
        found.append(result)
        color = {Severity.OK: "green", Severity.NOTE: "yellow", Severity.PROBLEM: "red"}[result.severity]
        line = f"[{color}]{result.severity.value:<8}[/] {escape(result.text)}"
        console.print(line, highlight=False, soft_wrap=True)
    return RendezvousError.exit_code if any(each.severity is Severity.PROBLEM for each in found) else 0


def check_machine(machine: Machine, backends: Sequence[BackendProbe]) -> Iterator[CheckResult]:
    """Evaluate whether a machine is fit for training."""
    yield CheckResult(Severity.OK, f"{machine.system}, Python {machine.python}")
    yield CheckResult(
        Severity.OK, f"{machine.cores} cores{describe_quota(machine)}; {', '.join(machine.gpus) or 'no GPU'}"
    )
    yield _check_memory(machine)
    yield _check_shared_memory(machine)
    yield _check_descriptors(machine)
    for backend in backends:
        yield _check_backend(machine, backend)
    if not backends:
        yield CheckResult(Severity.PROBLEM, f"no backend is installed: pip install one of {', '.join(BACKENDS)}")
    if "keras" not in machine.packages:
        yield CheckResult(Severity.PROBLEM, "Keras is not installed: pip install keras")


def _check_memory(machine: Machine) -> CheckResult:
    text = f"memory: {as_gib(machine.free_memory)} of {as_gib(machine.memory)} free"
    if machine.free_memory is not None and machine.free_memory < 2 * WORKER_MEMORY:
        return CheckResult(Severity.NOTE, f"{text}; a worker needs about 1 GiB, and the memory of the whole model")
    return CheckResult(Severity.OK, text)


def _check_shared_memory(machine: Machine) -> CheckResult:
    if machine.shared_memory is None:
        return CheckResult(
            Severity.NOTE,
            "/dev/shm cannot be written to: processes that load data (PyTorch's DataLoader) need it",
        )
    text = f"/dev/shm: {as_gib(machine.shared_memory)} free"
    if machine.shared_memory <= SMALL_SHARED_MEMORY:
        return CheckResult(
            Severity.NOTE, f"{text}; give a container more with --shm-size, or delete what jobs have left there"
        )
    return CheckResult(Severity.OK, text)


def _check_descriptors(machine: Machine) -> CheckResult:
    _, hard = machine.descriptors
    if 0 <= hard < FEW_DESCRIPTORS:
        return CheckResult(Severity.NOTE, f"open files: at most {hard}; a job of many workers needs more (ulimit -Hn)")
    return CheckResult(Severity.OK, f"open files: {'no limit' if hard < 0 else f'at most {hard}'}")


def _check_backend(machine: Machine, backend: BackendProbe) -> CheckResult:
    if backend.error:
        return CheckResult(Severity.PROBLEM, f"{backend.name} is installed, but cannot be imported: {backend.error}")
    text = f"{backend.name} {backend.version}: {', '.join(backend.gpus) or 'CPU only'}"
    if machine.gpus and not backend.gpus:
        return CheckResult(
            Severity.NOTE,
            f"{text}, although this machine has {len(machine.gpus)} GPU(s): a build for CPUs, or another CUDA version",
        )
    return CheckResult(Severity.OK, text)


def check_backend_choice(chosen: str, installed: Sequence[str]) -> Iterator[CheckResult]:
    """Evaluate the backend that Keras uses without `--backend`."""
    if installed and chosen not in installed:
        why = "not installed" if chosen in BACKENDS else "not a backend that Phalanx trains on"
        yield CheckResult(
            Severity.NOTE,
            f"Keras is set to run on {chosen}, which is {why}: pass --backend {installed[0]}, or set KERAS_BACKEND",
        )


def probe_backends(environment: Mapping[str, str]) -> list[BackendProbe]:
    """Import each installed backend in a separate process."""
    installed = installed_backends()
    with ThreadPoolExecutor(max(1, len(installed)), thread_name_prefix="phalanx-probe") as pool:
        return list(pool.map(lambda name: probe_backend(name, environment), installed))


def probe_backend(name: str, environment: Mapping[str, str]) -> BackendProbe:
    """Import one backend in a separate process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, name],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            # TensorFlow imports Keras, which must not load the backend that the user chose.
            env={**environment, **ON_DEMAND_ALLOCATION, **QUIET, KERAS_BACKEND: name},
        )
    except subprocess.TimeoutExpired:
        return BackendProbe(name, "", (), f"the import takes longer than {IMPORT_TIMEOUT_S:g} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return BackendProbe(name, "", (), lines[-1])
    version, gpus = json.loads(done.stdout.splitlines()[-1])
    return BackendProbe(name, version, gpus, "")


def _check_port() -> CheckResult:
    try:
        with listen_at(LOOPBACK) as listener, socket.create_connection(listener.getsockname(), CONNECT_TIMEOUT_S):
            return CheckResult(Severity.OK, "ports of this machine can be opened and reached")
    except OSError as error:
        return CheckResult(Severity.PROBLEM, f"a port of this machine cannot be opened and reached: {error}")


def _check_hosts(host_specs: Sequence[HostSpec], console: Console) -> Iterator[CheckResult]:
    """Start an agent on each other host, as a job would, and connect to a port that it opens."""
    for host_spec in host_specs:
        if host_spec.is_local:
            yield CheckResult(Severity.OK, f"{host_spec.name}: this machine, checked above; it needs no ssh")
    with selectors.DefaultSelector() as selector:

        def show_line(line: str) -> None:  # no markup: it begins with the host in brackets
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        hosts = [
            SSHHost(selector, host_spec, show_line=show_line) for host_spec in host_specs if not host_spec.is_local
        ]
        started_at = time.monotonic()
        try:
            for host in hosts:
                host.connect()  # all in parallel
            for host in hosts:
                yield _check_host(host, started_at)
        finally:
            for host in hosts:
                host.close()


def _check_host(host: SSHHost, started_at: float) -> CheckResult:
    try:
        port = host.ports(started_at + START_TIMEOUT_S)[0]
    except PhalanxError as error:
        return CheckResult(Severity.PROBLEM, f"{host.name}: {error}")
    text = f"{host.name}: Phalanx answers through ssh after {time.monotonic() - started_at:.1f} s, in {os.getcwd()}"
    try:
        with connect(Address(host.name.strip("[]"), port), host.name, deadline=time.monotonic() + CONNECT_TIMEOUT_S):
            return CheckResult(Severity.OK, f"{text}; its ports can be reached")
    except PhalanxError as error:
        return CheckResult(
            Severity.PROBLEM,
            f"{text}, but its port {port} cannot be reached: {error}. Workers connect to each other at ports that the "
            "system chooses: let them through the firewall.",
        )
