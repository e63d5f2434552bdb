"""Addresses are checked where they are read."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.transport.address import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:2222", Address("localhost", 2222)),
        ("  10.0.0.1:80 ", Address("10.0.0.1", 80)),
        ("[::1]:2222", Address("::1", 2222)),
        ("[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535)),
        ("worker_0.train.svc.cluster.local.:1", Address("worker_0.train.svc.cluster.local.", 1)),
    ],
)
def test_addresses_are_read(text: str, address: Address) -> None:
    assert Address.parse(text, where="x") == address
    assert Address.parse(str(address), where="x") == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host0", "cluster.worker\\[0\\] is 'host0', which has no port. Write 'host0:2222'"),
        ("", "no port. Write 'host:2222'"),
        ("host0:", "port '' is not a number from 1 to 65535. Write for example 'host0:2222'"),
        ("host0:0", "port '0'"),
        ("host0:65536", "port '65536'"),
        ("host0:" + "9" * 5000, "is not a number from 1 to 65535"),
        ("host0:http", "port 'http'"),
        ("host0:-1", "port '-1'"),
        ("host0:2222/", "is a URL. Write only host and port: 'host0:2222'"),
        ("grpc://host0:2222", "is a URL. Write only host and port: 'host0:2222'"),
        ("ho st:2222", "host 'ho st' is neither a host name nor an IP address"),
        (":2222", "host '' is neither"),
        ("::1:2222", "an IPv6 address needs brackets"),
        ("fe80::1", "an IPv6 address needs brackets"),
        ("[::1]", "an IPv6 address needs brackets|no port"),
        (2222, "is 2222, which is not an address. Write a string like 'host:2222'"),
        (None, "is None"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(text: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Address.parse(text, where="cluster.worker[0]")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("LocalHost", True),
        ("10.0.0.1", False),
        ("h", False),
    ],
)
def test_loopback_is_told_by_name_and_number(host: str, expected: bool) -> None:
    assert Address(host, 1).is_loopback is expected
