from __future__ import annotations

import socket
from pathlib import Path

import pytest

from phalanx.errors import ConfigurationError
from phalanx.launcher.host_slots import HostSpec, check_interfaces, choose_hosts, parse_hostfile, parse_hosts


def test_hosts_are_names_with_numbers_of_workers() -> None:
    assert parse_hosts("a:2, me@b.example.org:3,c") == [
        HostSpec("a", 2),
        HostSpec("b.example.org", 3, "me"),
        HostSpec("c", 1),
    ]
    assert parse_hosts("[fe80::1]:4") == [HostSpec("[fe80::1]", 4)]


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
        ("-Fconfig@a:1", "is not a host"),
        ("a b:1", "is not a host"),
        ("fe80::1", "is not a host"),
        ("a:0", "has no worker"),
        ("a:1,a:2", "names a twice. Write it once: a:3"),
        ("localhost:1,b:2", "has localhost next to other hosts"),
    ],
)
def test_a_bad_value_is_an_error_that_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_hosts(text)


def test_this_host_needs_no_ssh_unless_another_user_is_named() -> None:
    assert HostSpec("localhost", 1).is_local
    assert HostSpec("Localhost", 1).is_local
    assert HostSpec(socket.gethostname(), 1).is_local
    assert HostSpec(socket.gethostname().upper(), 1).is_local
    assert not HostSpec("localhost", 1, "other").is_local
    assert not HostSpec("elsewhere.example.org", 1).is_local


def test_a_hostfile_says_the_same() -> None:
    text = "# all of them\nnode-a slots=4\n\nuser@node-b   # one\n[fe80::1] slots=2\n"
    assert parse_hostfile(text) == parse_hosts("node-a:4,user@node-b,[fe80::1]:2")
    for wrong, words in (("node-a slots", "line 1"), ("a slots=2\nb slots=x", "line 2"), ("# none", "names no host")):
        with pytest.raises(ConfigurationError, match=words):
            parse_hostfile(wrong)


def test_a_comment_in_a_hostfile_may_be_in_any_encoding(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_bytes(b"# gro\xdf\na slots=2\n")
    assert choose_hosts(None, None, hostfile) == [HostSpec("a", 2)]
    hostfile.write_bytes(b"gro\xdf slots=2\n")
    with pytest.raises(ConfigurationError, match="is not a host"):
        choose_hosts(None, None, hostfile)


def test_workers_fill_the_first_hosts(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\n")
    assert choose_hosts(3, None, hostfile) == [HostSpec("a", 2), HostSpec("b", 1)]
    assert choose_hosts(2, "a:2,b:2", None) == [HostSpec("a", 2)]
    assert choose_hosts(None, "a:2,b:2", None) == [HostSpec("a", 2), HostSpec("b", 2)]
    assert choose_hosts(3, None, None) == [HostSpec("localhost", 3)]
    with pytest.raises(ConfigurationError, match=r"4 places.*--hosts a:3"):
        choose_hosts(5, "a:2,b:2", None)
    with pytest.raises(ConfigurationError, match="Give one of them"):
        choose_hosts(2, "a:2", hostfile)


def test_network_interfaces_are_checked() -> None:
    check_interfaces("lo", [HostSpec("localhost", 2)])
    check_interfaces(None, [HostSpec("a", 1), HostSpec("b", 1)])
    with pytest.raises(ConfigurationError, match="this host has no 'nowhere0'"):
        check_interfaces("lo,nowhere0", [HostSpec("localhost", 2)])
    with pytest.raises(ConfigurationError, match="the hosts' names determine which network"):
        check_interfaces("lo", [HostSpec("a", 1), HostSpec("b", 1)])


def test_servers_go_where_the_workers_leave_room() -> None:
    places = "a:1,b:2,c:1"
    assert choose_hosts(1, places, None, others=2) == [HostSpec("a", 1), HostSpec("b", 2)]
    assert choose_hosts(4, places, None, others=2) == [HostSpec("a", 1), HostSpec("b", 2), HostSpec("c", 3)]
    assert choose_hosts(None, places, None, others=2) == [HostSpec("a", 1), HostSpec("b", 2), HostSpec("c", 3)]
    assert choose_hosts(2, None, None, others=3) == [HostSpec("localhost", 5)]
