"""The cost of encryption on a link: processor time for a message, plain and encrypted, at both ends of a connection.

    python -m benchmarks.encryption            # a table
    python -m benchmarks.encryption --write    # also write benchmarks/results/DATE-encryption.md

Uses TCP on loopback, with a thread at each end. Processor time hardly depends on other load of the machine; it is what
encryption takes from a core that also trains. Values are medians over the messages of a size.
"""

from __future__ import annotations

import argparse
import datetime
import socket
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import processor
from phalanx.transport.encryption import KEY_BYTES, SessionKeys
from phalanx.transport.link import Link

SIZES = {4_096: 400, 65_536: 400, 1_080_000: 100, 16_000_000: 25}
"""Number of timed messages by size in bytes."""
WARM_UP = 3
BOUND_S = 300.0
RESULTS = Path(__file__).parent / "results"


def ends(*, encrypted: bool) -> tuple[Link, Link]:
    """Create both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    links = Link(near, "receiver"), Link(far, "sender")
    if encrypted:
        keys = SessionKeys(b"1" * KEY_BYTES, b"2" * KEY_BYTES)
        links[0].encrypt(keys)
        links[1].encrypt(SessionKeys(keys.receiving, keys.sending))
    return links


def cpu_ms(size: int, count: int, *, encrypted: bool) -> tuple[float, float]:
    """Measure the processor time in ms of a message of this size, for the sender and for the receiver."""
    sender, receiver = ends(encrypted=encrypted)
    deadline = time.monotonic() + BOUND_S
    content, sent = np.random.default_rng(0).integers(0, 256, size, np.uint8), []

    def send() -> None:
        for _ in range(count + WARM_UP):
            before = time.thread_time()
            sender.send(b"header", [content], deadline=deadline)
            sent.append(time.thread_time() - before)

    thread = threading.Thread(target=send)
    thread.start()
    received = []
    for _ in range(count + WARM_UP):
        before = time.thread_time()
        receiver.receive(deadline=deadline)
        received.append(time.thread_time() - before)
    thread.join()
    sender.close()
    receiver.close()
    return 1e3 * statistics.median(sent[WARM_UP:]), 1e3 * statistics.median(received[WARM_UP:])


def table() -> str:
    """Render sizes as rows, plain and encrypted as columns, and the cost of encryption per MB for both ends in
    total."""
    lines = [
        "| message | plain: sends | receives | encrypted: sends | receives | added, ms per MB |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for size, count in SIZES.items():
        plain, sealed = cpu_ms(size, count, encrypted=False), cpu_ms(size, count, encrypted=True)
        cells = [f"{each:.3f}" for each in (*plain, *sealed)]
        added = (sum(sealed) - sum(plain)) / (size / 1e6)
        lines.append(f"| {size:,} bytes | {' | '.join(cells)} | {added:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    found, today = table(), datetime.date.today()
    print(found)
    if arguments.write:
        head = f"# What encryption costs on a link, {today}\n\n{processor()}; ms of processor time per message."
        (RESULTS / f"{today}-encryption.md").write_text(f"{head}\n\n{found}\n")


if __name__ == "__main__":
    main()
