"""Runs the user's program with a `PlanRequest`, until its first `fit` has written the result."""

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
"""A program can be told of so many: a variable of the environment holds 128 KiB, and TF_CONFIG names each of them."""
EXIT_S = 10.0
"""A program that has written its result has so long to exit."""
POLL_S = 0.05
SHOWN_LINES = 15

_OF_A_JOB = (
    *(ELASTIC_COORDINATOR, HOST_GPUS, LISTEN_FD, LOCAL_REPLICAS, PROGRESS_FILE, RUN, SECRET, TF_CONFIG, TIMELINE),
    WORKER_BOOTSTRAP,
)
"""Set for the tasks of a job: an examined program belongs to none."""


def examine(
    program: Sequence[str],
    request: PlanRequest,
    kind: type[R],
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    cores: Sequence[int] = (),
) -> R:
    """Run a program as the first of `request.replicas` workers, and read what its `fit` writes.

    Args:
        program: Command line after `python`.
        request: Request to the program; its `result` is a file that does not exist yet.
        kind: Type of the result.
        environment: Environment variables of the program.
        timeout_s: Time limit of the program.
        cores: The only cores that it may use; if empty, those of this process.

    Raises: PhalanxError if it exits or the time is up before it has written a result.
    """
    with tempfile.TemporaryFile() as output:
        with children_bound_to(cores):
            process = subprocess.Popen(
                [sys.executable, *program],
                env=_environment(request, environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is this process's, which then ends it
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
    """Wait for the result, or the end of the program; returns whether it still runs without a result."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and not result.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if result.exists():
        # A program that catches SystemExit and continues: the answer is there already.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_S)
        return False
    return process.poll() is None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and all that it has started."""
    if process.poll() is None:
        # It leads a process group (`start_new_session`), with whatever it has started.
        os.killpg(process.pid, 9)
        process.wait()


def _environment(request: PlanRequest, environment: Mapping[str, str]) -> dict[str, str]:
    # With an id the program is a worker of a launcher, and starts no replicas itself.
    settings = {JOB_ID: "plan", PLAN: request.as_text()}
    if request.topology:  # one program on all devices, in a process that has no cluster
        settings |= _topology_variables(parse_topology(request.topology))
    else:
        cluster = {"worker": [f"m{number}:1" for number in range(request.replicas)]}
        settings[TF_CONFIG] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    return {name: value for name, value in environment.items() if name not in _OF_A_JOB} | settings


def _topology_variables(topology: DeviceTopology) -> dict[str, str]:
    """Keras makes the model on this machine's CPU, in as many parts as the topology has devices."""
    on_cpu = {"JAX_PLATFORMS": "cpu", CPU_DEVICES: str(topology.devices), KERAS_BACKEND: "jax"}
    return on_cpu | topology.tpu_variables


def _failure(program: Sequence[str], code: int, output: str, timeout_s: float | None) -> str:
    lines = output.strip().splitlines()
    own_error = next((number for number, line in enumerate(lines) if line.startswith("phalanx.errors.")), 0)
    lines = lines[own_error:][-SHOWN_LINES:]  # an error of Phalanx says what its traceback would
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
