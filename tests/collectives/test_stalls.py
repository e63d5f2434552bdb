"""A rank that is there but does not come to a collective is named, by one of those that wait."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import CommunicationOptions, connect
from tests.support.processes import run_ranks, values


@pytest.mark.parametrize("hosts", [("a", "a", "a"), ("a", "b", "c")], ids=["shared memory", "ring"])
def test_who_does_not_come_is_named_once_and_then_it_goes_on(hosts: tuple[str, ...]) -> None:
    read, write = os.pipe()  # from rank 0, as soon as it has warned

    def body(membership: Membership) -> Any:
        warned, warnings = threading.Event(), []
        handler = logging.Handler()
        handler.emit = lambda record: (warnings.append(record.getMessage()), warned.set())  # type: ignore
        logging.getLogger("phalanx.collectives.host.stall_watch").addHandler(handler)
        with connect(membership, CommunicationOptions(timeout_seconds=50.0)) as communicator:
            communicator.barrier()
            communicator.barrier()  # all have come, and said so
            communicator.runner.stalls.warn_after(1.0, 20.0)
            if communicator.rank == 2:
                os.read(read, 1)
            elif communicator.rank == 0:
                threading.Thread(target=lambda: warned.wait(20) and os.write(write, b"!"), daemon=True).start()
            (total,) = communicator.all_reduce([np.ones(3)])
            return total.tolist(), warnings

    (result, warnings), *others = values(run_ranks(body, hosts=hosts))
    os.close(read)
    os.close(write)
    assert result == [3.0] * 3
    assert [silent for _, silent in others] == [[], []]
    (warning,) = [text for text in warnings if "all_reduce(" in text]
    assert "all_reduce(op=sum, 1 array [float64 (3,)])" in warning
    assert "waits for worker/2 (rank 2, pid " in warning
    assert "The job ends after 20 s" in warning
