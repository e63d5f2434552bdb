"""A task of a job, for tests: joins, reports in JSON lines, and does what it is told on standard input."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from phalanx.cluster import JobFacts, Node, join, resolve
from phalanx.errors import LinkClosedError, PhalanxError

BOUND_S = 50.0


def report(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def exchange(node: Node) -> list[str]:
    """What every other member sent here; "closed" if it is gone."""
    deadline = time.monotonic() + BOUND_S
    received = []
    for _, link in sorted(node.membership.links.items()):
        try:
            link.send(f"from {node.membership.rank}".encode(), deadline=deadline)
        except LinkClosedError:
            received.append("closed")
    for rank, link in sorted(node.membership.links.items()):
        try:
            received.append(link.receive(deadline=deadline)[0].decode())
        except LinkClosedError as error:
            received.append(f"{rank} closed: {error}")
    return received


def main() -> int:
    try:
        node = join(resolve(), facts=JobFacts(seed=int(os.environ.get("TEST_SEED", "1"))))
    except PhalanxError as error:
        report(event="error", type=type(error).__name__, message=str(error))
        return error.exit_code
    with node:
        report(
            event="joined",
            rank=node.membership.rank,
            members=[member.task for member in node.membership.members],
            pids=[member.pid for member in node.membership.members],
            local_ranks=node.membership.local_ranks,
        )
        for line in sys.stdin:
            if line.strip() == "exchange":
                report(event="exchanged", received=exchange(node))
    return 0


if __name__ == "__main__":
    sys.exit(main())
