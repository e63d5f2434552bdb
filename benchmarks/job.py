"""Runs one tool on one work as one job, and prints its figures: `python -m benchmarks.job ddp mlp64`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.tools import ALL_REDUCE, CORES, RESULT_FILE, TOOLS, Kind, Share, Tool
from benchmarks.work import WORKS
from phalanx.devices.gpu_count import HIDE_GPUS, ON_DEMAND_ALLOCATION

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = bool(os.environ.get("BENCH_ON_GPU"))
"""Whether tools may use this host's GPUs; otherwise, all compute on its processors."""
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def interpreter() -> str:
    """Return the Python interpreter for all tools: that of the peers' environment, if it exists.

    This environment also has Phalanx and all three backends. With the same packages for all tools, no startup time
    includes packages that only developers have: `import keras` imports scikit-learn and Matplotlib if it finds them,
    which takes seconds.
    """
    return str(PEERS_PYTHON) if PEERS_PYTHON.exists() else sys.executable


# The slowest job (a CNN on XLA, two alternating runs) takes 150 s on two busy cores. Twice that is a hang.
JOB_TIMEOUT_S = 300.0
# Peers sometimes never exit after their last barrier, but have reported their figures by then.
EXIT_TIMEOUT_S = 10.0
POLL_S = 0.02
ENDING_CHARACTERS = 2000


class JobError(Exception):
    """The job gave no figures. The message contains the end of its output."""


def run(tool: Tool, work: str, windows: int) -> dict[str, Any]:
    """Start the tool's processes, wait for the figures, and end all processes.

    Returns: The report of rank 0: `ms_per_step` of each window, `first_step_s`, and facts. For a collective,
        `ms_per_call` by system and case.
    Raises: JobError if a process failed, hung or reported nothing.
    """
    affinity = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        result, output = Path(folder) / "result.json", Path(folder) / "output"
        stream = stack.enter_context(output.open("wb"))
        stack.callback(os.sched_setaffinity, 0, affinity)
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        command, environment = _command(tool, work, windows, result), _environment(tool, result)
        for rank, cores in enumerate(_core_shares(tool)):
            # A child inherits the affinity of the thread that starts it.
            os.sched_setaffinity(0, cores)
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment | _threads(tool, cores) | {"BENCH_RANK": str(rank)},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        _wait(processes, result)
        codes = [process.poll() for process in processes]
        if not result.exists() or (tool.kind is not Kind.PEER and any(code != 0 for code in codes)):
            ending = output.read_text(errors="replace").strip()[-ENDING_CHARACTERS:]
            raise JobError(f"{tool.name} on {work} gave no figures; exit codes {codes} (None: it hung).\n{ending}")
        figures = json.loads(result.read_text())
    return {"ms_per_call": figures} if tool.kind is Kind.COLLECTIVE else figures


def available_cores() -> list[int]:
    """Return the cores that the comparison uses."""
    return sorted(os.sched_getaffinity(0))[: None if ON_GPU else CORES]


def free_ports(count: int) -> list[int]:
    """Return loopback ports that were free a moment ago, because peers accept only port numbers."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _core_shares(tool: Tool) -> list[list[int]]:
    """Return the cores of each process started here. A process that starts the ranks divides them."""
    cores = available_cores()
    if tool.share is Share.ONE:
        return [cores[:1]]
    if tool.share is Share.OWN and tool.kind is Kind.PEER:
        size = len(cores) // tool.ranks
        return [cores[rank * size :][:size] for rank in range(tool.ranks)]
    return [cores] * tool.starts


def _threads(tool: Tool, cores: Sequence[int]) -> dict[str, str]:
    """Return the thread settings of each process, except where Phalanx must set them itself."""
    if tool.kind is Kind.PHALANX:
        return {}
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(len(cores)))


def _environment(tool: Tool, result: Path) -> dict[str, str]:
    """Return this process's environment without variables that would change a job, and with those that it needs."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # Installed packages have bytecode. Without it, the startup time of this checkout would include its
        # compilation.
        if name not in ("PYTHONDONTWRITEBYTECODE", "KERAS_BACKEND", "TF_CONFIG")
        and not name.startswith(("PHALANX_", "BENCH_"))
    }
    environment |= {
        "PATH": f"{Path(interpreter()).parent}{os.pathsep}{environment.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        **(ON_DEMAND_ALLOCATION if ON_GPU else {**HIDE_GPUS, "JAX_PLATFORMS": "cpu"}),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "BENCH_RESULT": str(result),
        "BENCH_PORTS": ",".join(map(str, free_ports(tool.ranks))),
        "BENCH_WORLD_SIZE": str(tool.ranks),
        "BENCH_STARTED": repr(time.time()),
    }
    return environment | ({"KERAS_BACKEND": tool.backend} if tool.backend else {})


def _command(tool: Tool, work: str, windows: int, result: Path) -> list[str]:
    arguments = [str(result) if argument == RESULT_FILE else argument for argument in tool.arguments]
    program = ["-m", tool.module, *arguments]
    if tool.kind is not Kind.COLLECTIVE:
        program += ["--work", work, "--windows", str(windows)]
    if tool.kind is Kind.PHALANX:
        tasks = ["--workers", str(tool.workers), *(["--ps", str(tool.servers)] if tool.servers else [])]
        return [interpreter(), "-m", "phalanx", "run", *tasks, *program]
    return [*tool.launched_by, interpreter(), *program]


def _wait(processes: Sequence[subprocess.Popen[bytes]], result: Path) -> None:
    """Return when all processes have exited, one has failed, or the time is up."""
    deadline, reported = time.monotonic() + JOB_TIMEOUT_S, False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if not reported and result.exists():
            reported, deadline = True, min(deadline, time.monotonic() + EXIT_TIMEOUT_S)
        if not reported and any(codes):
            return
        time.sleep(POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def exit_on_termination() -> None:
    """Make SIGTERM unwind this process, so that it ends the processes that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("work", choices=(*WORKS, ALL_REDUCE))
    parser.add_argument("--windows", type=int, default=5, help="timed windows; 0 times the first step only")
    args = parser.parse_args()
    exit_on_termination()
    try:
        print(json.dumps(run(TOOLS[args.tool], args.work, args.windows)))
    except JobError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
