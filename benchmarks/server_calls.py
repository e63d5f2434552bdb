"""A parameter server by itself: the cost of pushing gradients and pulling new values, without training.

    python -m benchmarks.server_calls

The arrays are those of the MLP in `benchmarks.work`: six with a total of 1.08 MB. A client sends a gradient for each
variable and receives the new values in the answer. The server is the one used in training, in a process with its own
core; the clients share the other core. The same run also times gloo's all-reduce of as many bytes between two
processes.

`bare` is a server whose optimizer does nothing: the gradients become the new values. It measures the round trip and all
work of the server except the arithmetic. `Adam` is that of Keras, on JAX.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = ((784, 256), (256,), (256, 256), (256,), (256, 10), (10,))
BARE, ADAM = "bare", "Adam"
BOUND_S = 120.0
SECRET = b"of this benchmark"
WARM_UP_CALLS = 20
CALLS = 400
CLIENTS = (1, 2, 4)


@dataclass(frozen=True)
class Calls:
    """Results of one run of clients.

    Attributes:
        ms: Duration of a call, median over one client's calls. With several clients, includes waiting for the others.
        updates_per_s: Updates per second of all clients.
        server_ms: Processor time of the server per update, which bounds its rate.
    """

    optimizer: str
    clients: int
    ms: float
    updates_per_s: float
    server_ms: float


def measure(optimizer: str, clients: int, calls: int = CALLS) -> Calls:
    """Measure one server and its clients, in separate processes."""
    context = multiprocessing.get_context("fork")
    cores = sorted(os.sched_getaffinity(0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Clients are part of the cluster, but do not listen.
        port = listener.getsockname()[1]
        spec = {"ps": [f"127.0.0.1:{port}"], "worker": [f"127.0.0.1:{index + 1}" for index in range(clients)]}
        server = context.Process(target=_serve, args=(spec, listener, optimizer, cores[0]), daemon=True)
        server.start()
        barrier = context.Barrier(clients)
        pipes = [context.Pipe(duplex=False) for _ in range(clients)]
        others = [
            context.Process(
                target=_push,
                args=(
                    spec,
                    number,
                    optimizer,
                    calls,
                    cores[1 % len(cores)],
                    server.pid,
                    barrier,
                    pipes[number][1],
                ),
                daemon=True,
            )
            for number in range(clients)
        ]
        for client in others:
            client.start()
    try:
        found = []
        for number, (reader, writer) in enumerate(pipes):
            writer.close()
            if not reader.poll(BOUND_S):
                raise TimeoutError(f"client {number} of a server with {optimizer} took more than {BOUND_S:g} s")
            found.append(reader.recv())
    finally:
        for process in (*others, server):
            process.join(5)
            process.kill()
            process.join()
    total = sum(len(samples) for samples, _, _ in found)
    elapsed = max(seconds for _, seconds, _ in found)
    server_s = max(busy for _, _, busy in found)
    return Calls(optimizer, clients, 1e3 * statistics.median(found[0][0]), total / elapsed, 1e3 * server_s / total)


def gloo_ms(calls: int = CALLS) -> float:
    """Measure an all-reduce of as many bytes between two processes with one core each."""
    from benchmarks.all_reduce import run_pair

    with tempfile.TemporaryDirectory() as folder:
        return run_pair(_time_gloo, str(Path(folder) / "store"), calls, links=False)["gloo"]


def _time_gloo(rank: int, store: str, calls: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from benchmarks.all_reduce import time_calls

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tensor = torch.zeros(sum(int(np.prod(shape)) for shape in SHAPES))
    ms = time_calls(lambda: dist.all_reduce(tensor), dist.barrier, calls)
    dist.destroy_process_group()
    return {"gloo": ms}


class _Bare:
    """Replaces an `Updater`: the gradients become the new values."""

    slots = ()
    shares_buffers = False

    def __init__(self, _: str, pieces: Sequence[Any]) -> None:
        self._values = [piece.value for piece in pieces]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple((number,) for number in range(len(self._values)))

    def apply(self, gradients: Sequence[Any]) -> None:
        self._values = list(gradients)  # in the worker's memory, which it does not touch until it has the answer

    def values(self) -> list[Any]:
        return self._values

    def optimizer_values(self) -> list[Any]:
        return []

    def load_optimizer(self, values: Sequence[Any]) -> None:
        assert not values


def _start(core: int) -> None:
    os.sched_setaffinity(0, {core})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["KERAS_BACKEND"] = "jax"


def _identity(spec: dict[str, list[str]], kind: str, number: int, listen_fd: int | None) -> Any:
    from phalanx.cluster.spec import ClusterSpec, Task
    from phalanx.cluster.task_comparison import JobFacts
    from phalanx.cluster.task_identity import TaskIdentity
    from phalanx.config.job_config import JobConfig

    config = JobConfig(secret=SECRET, rendezvous_timeout_s=BOUND_S, timeout_s=BOUND_S, listen_fd=listen_fd)
    return TaskIdentity(ClusterSpec(spec), Task(kind, number), JobFacts(), config)


def _serve(spec: dict[str, list[str]], listener: socket.socket, optimizer: str, core: int) -> None:
    _start(core)
    from phalanx.engines import prepare
    from phalanx.parameter_server.server import declared_shards, parameter_server

    prepare()
    if optimizer == BARE:
        vars(declared_shards)["make_updater"] = _Bare
    parameter_server.ParameterServer(_identity(spec, "ps", 0, listener.fileno())).run()


def _push(
    spec: dict[str, list[str]],
    number: int,
    optimizer: str,
    calls: int,
    core: int,
    server_pid: int,
    barrier: Any,
    writer: Any,
) -> None:
    _start(core)
    from phalanx.parameter_server.client.parameter_client import ParameterServerClient
    from phalanx.parameter_server.server_messages import (
        DeclareModel,
        EndFit,
        FitJoined,
        JoinFit,
        ModelDescription,
        OpenEpoch,
        PushGradients,
        RequestTicket,
        Ticket,
        UpdateRules,
        Values,
        dtypes_of,
    )
    from phalanx.parameter_server.shard_packing import ShardPacking
    from phalanx.parameter_server.shard_placement import PlacedVariable, place_shards

    client = ParameterServerClient(_identity(spec, "worker", number, None))
    variables = tuple(PlacedVariable(f"v{index}", shape, "float32") for index, shape in enumerate(SHAPES))
    gradients = [np.full(shape, 1e-3, np.float32) for shape in SHAPES]
    if number == 0:
        description, slots, state = _optimizer(optimizer)
        nothing = (None,) * len(SHAPES)
        model = ModelDescription(variables, place_shards(variables, 1), description, nothing, (True,) * len(SHAPES))
        rules = UpdateRules(
            synchronous=False, replicas_to_aggregate=0, staleness=-1, refuse_nan=True, timeout_s=BOUND_S
        )
        client.request(0, DeclareModel(0, 0, model, rules, slots, step=0, era=1), [*gradients, *state])
    answer, _ = client.request(0, JoinFit(0, variables))
    assert isinstance(answer, FitJoined)
    groups = ShardPacking([(gradient.shape, gradient.dtype) for gradient in gradients], answer.groups)
    client.share_memory(0, groups.kinds)
    era = answer.era
    if number == 0:
        client.request(0, OpenEpoch(0, 0, -1))
    ticket, _ = client.request(0, RequestTicket(0, 0, era))

    def call() -> None:
        nonlocal ticket
        assert isinstance(ticket, Ticket)
        room = client.send_buffers(0, groups.kinds)
        for view, gradient in zip(groups.unpack(room), gradients, strict=True):
            np.copyto(view, gradient)
        answer, buffers = client.request(0, PushGradients(ticket, 0, True, True, 1.0, dtypes_of(room)), room)
        assert isinstance(answer, Values)
        assert len(buffers) == len(groups.kinds)
        ticket = answer.ticket

    for _ in range(WARM_UP_CALLS):
        call()
    samples = []
    barrier.wait(BOUND_S)
    busy, start = _processor_s(server_pid), time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        call()
        samples.append(time.perf_counter() - before)
    elapsed = time.perf_counter() - start
    barrier.wait(BOUND_S)
    busy = _processor_s(server_pid) - busy
    if number == 0:
        client.request(0, EndFit(0))
    writer.send((samples, elapsed, busy))
    client.close()


def _optimizer(name: str) -> tuple[str, tuple[tuple[int, str], ...], list[Any]]:
    """Return the description of an optimizer, and the names and values of its variables, as `fit` declares them."""
    if name == BARE:
        return "", (), []
    import keras

    from phalanx.keras_compat.copies.object_config import config_json_of
    from phalanx.keras_compat.variables.optimizer_slots import build_and_record_slots

    adam = keras.optimizers.Adam()
    slots = build_and_record_slots(adam, [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES])
    state = [np.array(keras.ops.convert_to_numpy(variable)) for variable in adam.variables]
    return config_json_of(keras.optimizers.Adam()), tuple((slot.variable, slot.name) for slot in slots), state


def _processor_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=CALLS, help="timed calls of each client")
    parser.add_argument("--clients", type=int, default=CLIENTS, nargs="+")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    found = [measure(optimizer, clients, args.calls) for optimizer in (BARE, ADAM) for clients in args.clients]
    for calls in found:
        print(
            f"{calls.optimizer:5} {calls.clients} client(s): {calls.ms:.3f} ms, {calls.updates_per_s:,.0f} updates/s, "
            f"server {calls.server_ms:.3f} ms of processor each"
        )
    gloo = gloo_ms(args.calls)
    print(f"gloo's all-reduce: {gloo:.3f} ms")
    if args.json:
        args.json.write_text(json.dumps({"gloo_ms": gloo, "calls": [asdict(calls) for calls in found]}) + "\n")


if __name__ == "__main__":
    main()
