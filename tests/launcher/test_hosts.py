from __future__ import annotations

import socket

import pytest

from phalanx.errors import ConfigurationError
from phalanx.launcher.hosts import HostShare, parse_hosts


def test_hosts_are_names_with_numbers_of_workers() -> None:
    assert parse_hosts("a:2, me@b.example.org:3,c") == [
        HostShare("a", 2),
        HostShare("b.example.org", 3, "me"),
        HostShare("c", 1),
    ]
    assert parse_hosts("[fe80::1]:4") == [HostShare("[fe80::1]", 4)]


def test_ssh_gets_the_name_without_brackets_and_with_the_user() -> None:
    assert parse_hosts("me@[fe80::1]:4")[0].login == "me@fe80::1"
    assert parse_hosts("a:4")[0].login == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a host"),
        ("a:2,", "'' is not a host"),
        ("a:two", "'a:two' is not a host"),
        ("-oProxyCommand=x:1", "is not a host"),
        ("a b:1", "is not a host"),
        ("fe80::1", "is not a host"),
        ("a:0", "has no worker"),
        ("a:1,a:2", "names a twice. Write it once: a:3"),
        ("localhost:1,b:2", "has localhost beside other hosts"),
    ],
)
def test_a_bad_value_is_an_error_that_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_hosts(text)


def test_this_host_needs_no_ssh_unless_another_user_is_named() -> None:
    assert HostShare("localhost", 1).is_here
    assert HostShare(socket.gethostname(), 1).is_here
    assert not HostShare("localhost", 1, "other").is_here
    assert not HostShare("elsewhere.example.org", 1).is_here
