"""All-reduce between two local processes with one core each: Phalanx compared with PyTorch's gloo, in one run.

    python benchmarks/all_reduce.py                      # a table
    python benchmarks/all_reduce.py --json result.json   # also write the figures

Systems run one after another, in separate processes: `shared memory` and `ring` (over TCP loopback) are the
communicators of Phalanx, `ring, encrypted` is the latter as used between hosts in a job with a secret, `gloo` is
torch.distributed, if torch is installed. Times are medians, in ms, of a whole call that merges float32 arrays in place
(gloo) or into reused arrays (Phalanx).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Number of timed calls by size in bytes.
SIZES = {4_096: 300, 65_536: 300, 1_080_000: 150, 16_000_000: 20, 100_000_000: 7}
# Relative sizes of the arrays of a small model (an MLP), to measure the cost of many arrays.
MLP_ARRAYS = (200_704, 256, 65_536, 256, 2_560, 10)
WARM_UP_CALLS = 5
BOUND_S = 120

Call = Callable[[], None]


def time_calls(call: Call, barrier: Call, count: int) -> float:
    """Median ms of a call; the processes synchronize before each one, so that waiting for the other does not count."""
    for _ in range(WARM_UP_CALLS):
        call()
    samples = []
    for _ in range(max(count, 5)):
        barrier()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return 1e3 * statistics.median(samples)


def phalanx_times(
    rank: int, implementation: str, encrypted: bool, link: socket.socket, pids: list[int]
) -> dict[str, float]:
    """Measure the ms of each case."""
    from phalanx.cluster.membership import Member, Membership
    from phalanx.collectives import CommunicationImplementation, CommunicationOptions, connect
    from phalanx.transport.encryption import KEY_BYTES, SessionKeys
    from phalanx.transport.link import Link

    peer = Link(link, f"worker/{1 - rank}")
    if encrypted:
        keys = (b"0" * KEY_BYTES, b"1" * KEY_BYTES)
        peer.encrypt(SessionKeys(keys[rank], keys[1 - rank]))
    members = tuple(Member(i, f"worker/{i}", "here", "127.0.0.1:0", pid) for i, pid in enumerate(pids))
    membership = Membership(1, rank, members, {1 - rank: peer})
    options = CommunicationOptions(implementation=CommunicationImplementation(implementation))
    times = {}
    with connect(membership, options) as communicator:
        for size, count in SIZES.items():
            source, out = [np.ones(size // 4, np.float32)], [np.zeros(size // 4, np.float32)]
            times[str(size)] = time_calls(
                lambda source=source, out=out: communicator.all_reduce(source, out=out),
                communicator.barrier,
                count,
            )
            assert (out[0] == 2).all()
        arrays = [np.ones(length, np.float32) for length in MLP_ARRAYS]
        merged = [np.zeros_like(array) for array in arrays]
        times["mlp"] = time_calls(lambda: communicator.all_reduce(arrays, out=merged), communicator.barrier, 100)
        fifty = [np.ones(5_400, np.float32) for _ in range(50)]
        merged_fifty = [np.zeros_like(array) for array in fifty]
        times["50 arrays"] = time_calls(
            lambda: communicator.all_reduce(fifty, out=merged_fifty), communicator.barrier, 100
        )
    membership.close()
    return times


def gloo_times(rank: int, store: str) -> dict[str, float]:
    """Measure the ms of each case. Several arrays are sent as one flat array, as in DDP, without its copies."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    times = {}
    cases = {str(size): (size, count) for size, count in SIZES.items()}
    cases |= {"mlp": (4 * sum(MLP_ARRAYS), 100), "50 arrays": (4 * 50 * 5_400, 100)}
    for name, (size, count) in cases.items():
        tensor = torch.zeros(size // 4)
        times[name] = time_calls(lambda tensor=tensor: dist.all_reduce(tensor), dist.barrier, count)
    dist.destroy_process_group()
    return times


def run_pair(body: Callable[..., dict[str, float]], *args: Any, links: bool) -> dict[str, float]:
    """Run `body(rank, ...)` in two processes with one core each, and return the result of rank 0."""
    context = multiprocessing.get_context("fork")
    cores = sorted(os.sched_getaffinity(0))
    ends = tcp_pair() if links else (None, None)
    reader, writer = context.Pipe(duplex=False)
    pids, ready = context.Array("l", 2), context.Event()

    def process(rank: int) -> None:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        ready.wait()
        if links:
            ends[1 - rank].close()
            times = body(rank, *args, ends[rank], list(pids))
        else:
            times = body(rank, *args)
        if rank == 0:
            writer.send(times)

    processes = [context.Process(target=process, args=(rank,), daemon=True) for rank in range(2)]
    for rank, child in enumerate(processes):
        child.start()
        pids[rank] = child.pid
    ready.set()
    writer.close()
    try:
        if not reader.poll(BOUND_S):
            raise TimeoutError(f"{body.__name__}{args} took more than {BOUND_S} s")
        return reader.recv()
    finally:
        for child in processes:
            child.join(5)
            child.kill()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def measure() -> dict[str, dict[str, float]]:
    """Measure the ms by system and case."""
    times = {
        "shared memory": run_pair(phalanx_times, "AUTO", False, links=True),
        "ring": run_pair(phalanx_times, "RING", False, links=True),
        "ring, encrypted": run_pair(phalanx_times, "RING", True, links=True),
    }
    try:
        import importlib.util

        if importlib.util.find_spec("torch") is not None:
            with tempfile.TemporaryDirectory() as directory:
                times["gloo"] = run_pair(gloo_times, str(Path(directory) / "store"), links=False)
    except TimeoutError as error:
        print(f"gloo left out: {error}", file=sys.stderr)
    return times


def table(times: dict[str, dict[str, float]]) -> str:
    """Render cases as rows and systems as columns, with the speed of each relative to gloo."""
    systems = list(times)
    lines = ["| ms | " + " | ".join(systems) + " |", "|---|" + "---|" * len(systems)]
    for case in times[systems[0]]:
        name = f"{int(case):,} bytes" if case.isdecimal() else case
        cells = []
        for system in systems:
            cell = f"{times[system][case]:.3f}"
            if system != "gloo" and "gloo" in times:
                cell += f" ({times['gloo'][case] / times[system][case]:.1f}x)"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    times = measure()
    print(table(times))
    if arguments.json:
        arguments.json.write_text(json.dumps(times, indent=2) + "\n")


if __name__ == "__main__":
    main()
