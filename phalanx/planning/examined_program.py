"""Runs the user's program with a `PlanRequest` until its first `fit` has written the result."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from phalanx.config.environment_variables import (
    CPU_DEVICES,
    ELASTIC_COORDINATOR,
    HOST_GPUS,
    JOB_ID,
    KERAS_BACKEND,
    LISTEN_FD,
    LOCAL_REPLICAS,
    PLAN,
    PROGRESS_FILE,
    RUN,
    SECRET,
    TF_CONFIG,
    TIMELINE,
    WORKER_BOOTSTRAP,
)
from phalanx.config.plan_request import PlanRequest
from phalanx.errors import PhalanxError
from phalanx.planning.accelerators import DeviceTopology, parse_topology
from phalanx.runtime.core_affinity import children_bound_to
from phalanx.runtime.exit_codes import describe_exit
from phalanx.transport.decoding import decode_json

R = TypeVar("R", bound=msgspec.Struct)

MAX_REPLICAS = 8192
"""TF_CONFIG names each replica, and an environment variable holds at most 128 KiB."""
EXIT_S = 10.0
"""How long a program has to exit once it has written its result."""
POLL_S = 0.05
SHOWN_LINES = 15

_OF_A_JOB = (
    *(ELASTIC_COORDINATOR, HOST_GPUS, LISTEN_FD, LOCAL_REPLICAS, PROGRESS_FILE, RUN, SECRET, TF_CONFIG, TIMELINE),
    WORKER_BOOTSTRAP,
)
"""Variables of the tasks of a job. They are removed, because an examined program belongs to no job."""


def examine(
    program: Sequence[str],
    request: PlanRequest,
    kind: type[R],
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    cores: Sequence[int] = (),
) -> R:
    """Run a program as the first of `request.replicas` workers, and return the result that its `fit` writes.

    Args:
        program: Command line after `python`.
        request: Request to the program; its `result` is a file that does not exist yet.
        kind: Type of the result.
        environment: Environment variables of the program.
        timeout_s: Time limit of the program.
        cores: Cores that it may use; if empty, the cores of this process.

    Raises: PhalanxError if the program exits or times out before it has written a result.
    """
    with tempfile.TemporaryFile() as output:
        with children_bound_to(cores):
            process = subprocess.Popen(
                [sys.executable, *program],
                env=_environment(request, environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only this process receives Ctrl-C; it then ends the program
            )
        try:
            is_late = _wait(process, request.result, timeout_s)
        finally:
            _end(process)
        if request.result.exists():
            return decode_json(request.result.read_bytes(), kind)
        output.seek(0)
        text = output.read().decode(errors="replace")
        raise PhalanxError(_failure(program, process.returncode, text, timeout_s if is_late else None))


def _wait(process: subprocess.Popen[bytes], result: Path, timeout_s: float) -> bool:
    """Wait for the result or the end of the program. Return whether it is still running without a result."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and not result.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if result.exists():
        # A program may catch SystemExit and continue. Its result is already written.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_S)
        return False
    return process.poll() is None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and the processes that it started."""
    if process.poll() is None:
        # The program leads a process group (`start_new_session`), which includes the processes that it started.
        os.killpg(process.pid, 9)
        process.wait()


def _environment(request: PlanRequest, environment: Mapping[str, str]) -> dict[str, str]:
    # With a job ID, the program acts as a worker of a launcher and starts no replicas itself.
    settings = {JOB_ID: "plan", PLAN: request.as_text()}
    if request.topology:  # one program on all devices, in a process without a cluster
        settings |= _topology_variables(parse_topology(request.topology))
    else:
        cluster = {"worker": [f"m{number}:1" for number in range(request.replicas)]}
        settings[TF_CONFIG] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    return {name: value for name, value in environment.items() if name not in _OF_A_JOB} | settings


def _topology_variables(topology: DeviceTopology) -> dict[str, str]:
    """Environment with which Keras builds the model on this machine's CPU, split into as many devices as the topology
    has."""
    on_cpu = {"JAX_PLATFORMS": "cpu", CPU_DEVICES: str(topology.devices), KERAS_BACKEND: "jax"}
    return on_cpu | topology.tpu_variables


def _failure(program: Sequence[str], code: int, output: str, timeout_s: float | None) -> str:
    lines = output.strip().splitlines()
    own_error = next((number for number, line in enumerate(lines) if line.startswith("phalanx.errors.")), 0)
    lines = lines[own_error:][-SHOWN_LINES:]  # an error of Phalanx needs no traceback
    shown = "".join(f"\n    {line}" for line in lines) or " nothing"
    name = " ".join(program[:2] if program[0].startswith("-") else program[:1])
    if code == 0:
        return (
            f"{name} ended without a fit() of a model that was created or compiled under a strategy's scope(), which "
            f"`phalanx plan` examines. Its last lines:{shown}"
        )
    if timeout_s is not None:
        cause = f"did not reach a fit() and take a few steps within {timeout_s:g} s (--timeout)"
    else:
        cause = f"{describe_exit(code)} before its fit() was examined"
    return f"{name} {cause}. Its last lines:{shown}"
