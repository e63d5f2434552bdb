"""What a host discovery script prints, and what happens if that is not a list of hosts."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from phalanx.errors import ConfigurationError
from phalanx.launcher.elastic_hosts.host_discovery import DiscoveryScript, HostDiscovery
from phalanx.launcher.elastic_hosts.host_discovery_poller import DiscoveryAnswer
from phalanx.launcher.host_slots import HostSpec, find_local_name, parse_discovered
from tests.launcher.conftest import Launcher, wait_until


def test_lines_are_hosts() -> None:
    text = "# all:9\na:2\n\n  me@b.example.org  # mine\n[fe80::1]:3\nlocalhost:1\ngone:0\na:2\n"
    assert parse_discovered(text, 4) == [
        HostSpec("a", 2),
        HostSpec("b.example.org", 4, "me"),
        HostSpec("[fe80::1]", 3),
        HostSpec("localhost", 1),
    ]
    assert parse_discovered("", 1) == []


def test_the_names_of_this_host_are_one_host() -> None:
    text = f"localhost:1\n127.0.0.1:1\n[::1]:1\n{socket.gethostname()}:1\n"
    assert parse_discovered(text, 1) == [HostSpec("localhost", 1)]


@pytest.mark.parametrize(
    "text",
    [
        "a:2\nTraceback (most recent call last):\n",
        "a:two",
        "-oProxyCommand=x",
        "a:1\na:2",
        "localhost:1\n127.0.0.1:2",
        "a:819200",
    ],
)
def test_lines_that_are_none_are_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a host|is listed twice"):
        parse_discovered(text, 1)


def test_an_own_name_is_one_that_others_reach() -> None:
    assert find_local_name([HostSpec("127.0.0.2", 1)])
    assert find_local_name([]) != "localhost"


class Told:
    """A discovery that is not started, the hosts that it has reported, and its log."""

    def __init__(self) -> None:
        self.found: list[list[HostSpec]] = []
        self.said: list[str] = []
        script = DiscoveryScript("script", slots=1, every_s=1, timeout_s=1)
        self.discovery = HostDiscovery(script, on_change=self.found.append, log=self.said.append)


def test_an_answer_is_told_when_it_is_another_one() -> None:
    told = Told()
    for text in ("a\n", "a\n", "a\nb\n", "", ""):
        told.discovery.handle(DiscoveryAnswer(text))
    assert [[host_spec.name for host_spec in host_specs] for host_specs in told.found] == [["a"], ["a", "b"], []]
    assert told.said == []


def test_what_an_answer_takes_away_goes_when_the_next_one_does_too() -> None:
    """A file that is being rewritten is read incomplete, or empty, once."""
    told = Told()
    for text in ("a:2\nb:1\n", "a:2\n", "a:2\nb:1\n", "", "b:1\n", "b:1\nc:1\n"):
        told.discovery.handle(DiscoveryAnswer(text))
    assert [{host_spec.name: host_spec.workers for host_spec in host_specs} for host_specs in told.found] == [
        {"a": 2, "b": 1},
        {"b": 1},
        {"b": 1, "c": 1},
    ]


def test_what_is_wrong_is_told_once_and_the_last_answer_holds() -> None:
    told = Told()
    told.discovery.handle(DiscoveryAnswer(problem="it ended with exit code 1"))
    told.discovery.handle(DiscoveryAnswer("a\n"))
    for _ in range(3):
        told.discovery.handle(DiscoveryAnswer(problem="it has not ended within 1 s"))
    told.discovery.handle(DiscoveryAnswer("one two\n"))
    told.discovery.handle(DiscoveryAnswer("a\n"))
    assert len(told.found) == 1
    assert len(told.said) == 5
    assert told.said[0].endswith("it ended with exit code 1; no hosts are known yet")
    assert told.said[1].endswith("recovered")
    assert told.said[2].endswith("it has not ended within 1 s; the known hosts are kept")
    assert "'one two' is not a host" in told.said[3]


def test_an_answer_that_is_cut_off_is_none() -> None:
    """The process that runs the script was killed while it wrote."""
    told = Told()
    stdout = io.BytesIO(b'{"text":"a","problem":""}\n{"text":"a')
    told.discovery._process = SimpleNamespace(stdout=stdout)  # type: ignore[assignment]
    told.discovery._receive()
    assert [[host_spec.name for host_spec in host_specs] for host_specs in told.found] == [["a"]]
    assert told.said == ["the process that runs the host discovery script was killed; the known hosts are kept"]


PROGRAM = """
import sys, time
from phalanx.launcher.elastic_hosts.host_discovery import DiscoveryScript, HostDiscovery
script = DiscoveryScript(sys.argv[1], slots=1, every_s=0.05, timeout_s=float(sys.argv[2]))
discovery = HostDiscovery(
    script,
    on_change=lambda shares: print("found", *(f"{s.name}:{s.workers}" for s in shares), flush=True),
    log=lambda text: print("said", text, flush=True),
)
discovery.start()
sys.stdin.read()
discovery.close()
"""


@pytest.fixture
def ask(launcher: Launcher) -> Callable[..., object]:
    def start(command: str, timeout_s: float = 30.0) -> object:
        return launcher.start("-c", PROGRAM, command, str(timeout_s), stdin=-1)

    return start


def test_a_script_is_asked_again_and_again(ask: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a:2\n")
    process = ask("echo x >> asked; cat hosts")
    assert process.stdout.readline() == "found a:2\n"  # type: ignore[attr-defined]
    wait_until(lambda: len((tmp_path / "asked").read_text()) > 6)
    (tmp_path / "hosts").unlink()
    assert "it ended with exit code 1: cat: hosts:" in process.stdout.readline()  # type: ignore[attr-defined]
    process.communicate("")  # type: ignore[attr-defined]


def test_a_script_that_prints_without_end_is_ended(ask: Callable[..., object], launcher: Launcher) -> None:
    process = ask("yes")
    assert "it prints more than 100000 bytes; no hosts are known yet" in process.stdout.readline()  # type: ignore[attr-defined]
    process.communicate("")  # type: ignore[attr-defined]
    launcher.assert_all_gone()


def test_complaints_without_end_take_no_longer_than_allowed(ask: Callable[..., object], launcher: Launcher) -> None:
    process = ask("yes >&2", 0.2)
    assert "it has not ended within 0.2 s" in process.stdout.readline()  # type: ignore[attr-defined]
    process.communicate("")  # type: ignore[attr-defined]
    launcher.assert_all_gone()


@pytest.mark.parametrize("end", ["told", "killed"])
def test_a_script_that_hangs_is_ended_with_all_it_has_started(
    end: str, ask: Callable[..., object], launcher: Launcher
) -> None:
    process = ask("sleep 1000 & sleep 1000", 0.2 if end == "told" else 1000.0)
    if end == "told":
        assert "it has not ended within 0.2 s" in process.stdout.readline()  # type: ignore[attr-defined]
        process.communicate("")  # type: ignore[attr-defined]
    else:
        wait_until(lambda: sum("sleep" in p.name() for p in launcher.processes()) == 2)
        psutil.Process(process.pid).kill()  # type: ignore[attr-defined]
        process.communicate()  # type: ignore[attr-defined]
    launcher.assert_all_gone()
