"""The simulated network: a bound on what is sent, and a communicator that keeps to it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from phalanx.cluster.membership import Membership
from phalanx.collectives import connect
from phalanx.collectives.host.channel import Channel, PacketKind
from phalanx.config.job_config import CollectiveConfig, JobConfig
from phalanx.errors import ConfigurationError, DisagreementError
from phalanx.transport.throttle import BURST_S, Throttle, first_bytes
from tests.support.processes import run_threads


def test_tokens_come_with_time_and_never_more_than_a_burst() -> None:
    now = [0.0]
    throttle = Throttle(1000.0, clock=lambda: now[0])
    burst = int(1000 * BURST_S)
    many = 10 * burst
    assert throttle.available(many) == burst
    throttle.spend(burst)
    assert throttle.available(many) == 0
    assert throttle.wait_s(many) == pytest.approx(BURST_S / 2)
    now[0] = BURST_S / 2
    assert throttle.available(many) == burst // 2
    assert throttle.wait_s(many) == 0
    now[0] = 100.0
    assert throttle.available(many) == burst


def test_bytes_go_many_at_once_and_the_last_ones_when_they_may() -> None:
    """A sender that took each token as it comes would be busy all the time."""
    now = [0.0]
    throttle = Throttle(1000.0, clock=lambda: now[0])
    throttle.spend(int(1000 * BURST_S))
    now[0] = BURST_S / 4
    assert throttle.available(100) == 0
    assert throttle.wait_s(100) == pytest.approx(BURST_S / 4)
    assert throttle.available(2) == 2
    assert throttle.wait_s(2) == 0


def test_the_first_bytes_of_views() -> None:
    pieces = [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]
    for count in range(9):
        assert b"".join(first_bytes(pieces, count)) == b"abcdefg"[:count]


class BlockedLink:
    """Takes nothing, and keeps how many bytes it was offered."""

    def __init__(self) -> None:
        self.offers: list[int] = []

    def try_send(self, pieces: list[memoryview]) -> int:
        self.offers.append(sum(map(len, pieces)))
        return 0


def test_a_link_that_takes_nothing_is_never_offered_less_than_before() -> None:
    """TLS and encrypted links may have begun to send what they were offered; `Link.try_send` says so."""
    throttle, link = Throttle(1000.0, clock=lambda: 0.0), BlockedLink()
    channel = Channel(link)  # type: ignore[arg-type]
    channel.post(PacketKind.DATA, 1, 1, [memoryview(bytes(100))])
    channel.flush(throttle)
    throttle.spend(4)  # on another link
    channel.flush(throttle)
    throttle.spend(6)
    channel.flush(throttle)
    assert link.offers == [int(1000 * BURST_S)] * 3


def test_a_slow_network_takes_its_time_and_shares_no_memory() -> None:
    """1 MB at 80 Mbit/s cannot take less than the 0.1 s that its bytes need, less a burst."""

    def body(membership: Membership) -> tuple[str, float, int]:
        with connect(membership, config=CollectiveConfig(simulated_mbits=80.0)) as communicator:
            communicator.barrier()
            before, start = communicator.statistics.bytes_on_links, time.monotonic()
            (total,) = communicator.all_reduce([np.ones(250_000, np.float32)])
            assert (total == 2).all()
            return communicator.kind, time.monotonic() - start, communicator.statistics.bytes_on_links - before

    for kind, seconds, sent in run_threads(body, 2):
        assert kind == "ring"
        assert 1_000_000 <= sent < 1_010_000
        assert seconds > 0.1 - 2 * BURST_S


def test_ranks_that_simulate_different_networks_disagree() -> None:
    def body(membership: Membership) -> None:
        connect(membership, config=CollectiveConfig(simulated_mbits=10.0 if membership.rank else None))

    with pytest.raises(DisagreementError, match="simulated_mbits"):
        run_threads(body, 2)


def test_the_setting_is_read() -> None:
    assert JobConfig.from_environment({"PHALANX_SIMULATED_MBITS": "100"}).collectives.simulated_mbits == 100.0
    assert JobConfig.from_environment({}).collectives.simulated_mbits is None


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan"])
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="PHALANX_SIMULATED_MBITS"):
        JobConfig.from_environment({"PHALANX_SIMULATED_MBITS": text})
