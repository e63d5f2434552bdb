"""Links of members: which are kept from one generation to the next, and which come too late."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster import member_links
from phalanx.cluster.member_links import GenerationNotFormedError, MemberLinks
from phalanx.cluster.membership import Member
from phalanx.cluster.membership_messages import MESH, FormGeneration, MemberAddress
from phalanx.errors import LinkClosedError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link


class Process:
    """A process that reaches others in this one without a port.

    Args:
        index: of its task.
        alive: the processes that can be reached, by task; this one is added.
    """

    def __init__(self, index: int, alive: dict[str, Process]) -> None:
        self.member = Member(index, f"worker/{index}", "host", f"127.0.0.1:{index + 1}", 7, f"incarnation {index}")
        description = SimpleNamespace(incarnation=self.member.incarnation, as_member=lambda rank: self.member)
        identity: Any = SimpleNamespace(description=description, dial_address=self.dial)
        self.links = MemberLinks(identity)
        self._alive = alive
        alive[self.member.task] = self

    def address(self, completed: int = -1) -> MemberAddress:
        return MemberAddress.of(self.member, completed)

    def dial(self, address: object, task: str, purpose: str, details: bytes, **_: object) -> tuple[Link, Welcome]:
        if task not in self._alive:
            raise LinkClosedError(f"nothing listens at {address}")
        mine, other = socket.socketpair()
        own = self.member
        hello = Hello(purpose=purpose, task=own.task, peer=task, incarnation=own.incarnation, details=details)
        self._alive[task].links.adopt(hello, Link(other, own.task))
        return Link(mine, task), Welcome()


def test_a_link_of_a_generation_that_was_given_up_serves_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dialer keeps it, and so does not dial again."""
    monkeypatch.setattr(member_links, "LINK_UP_S", 0.5)
    alive: dict[str, Process] = {}
    chief, killed, last = (Process(index, alive) for index in range(3))
    del alive[killed.member.task]
    first = FormGeneration(1, [process.address() for process in (chief, killed, last)])
    with pytest.raises(GenerationNotFormedError, match="worker/1 cannot be reached"):
        last.links.connect(first)  # has dialled the chief by then
    chief.links.generation_ended(1)
    with pytest.raises(GenerationNotFormedError, match="another member"):
        chief.links.connect(first)  # has waited for the killed member, and not looked at the link of the last one
    second = FormGeneration(2, [process.address(completed=0) for process in (chief, last)])
    last.links.connect(second)
    chief.links.connect(second)
    chief.links.membership.links[1].send(b"to rank 1", deadline=time.monotonic() + 5)
    assert last.links.membership.links[0].receive(deadline=time.monotonic() + 5)[0] == b"to rank 1"
    for process in (chief, last):
        process.links.close()


def test_the_end_of_an_earlier_generation_that_is_heard_late_hides_no_later_one() -> None:
    """Each lost task is noticed by a thread of its own."""
    alive: dict[str, Process] = {}
    chief, other = Process(0, alive), Process(1, alive)
    chief.links.generation_ended(2)
    chief.links.generation_ended(1)
    with pytest.raises(GenerationNotFormedError, match="another member of the generation was lost"):
        chief.links.connect(FormGeneration(2, [chief.address(), other.address()]))


def test_a_link_of_a_process_that_was_lost_before_it_became_a_member_is_closed() -> None:
    own = Member(0, "worker/0", "host", "127.0.0.1:1", 7, "own")
    identity: Any = SimpleNamespace(description=SimpleNamespace(incarnation="own", as_member=lambda rank: own))
    links = MemberLinks(identity)
    lost = []
    for incarnation in ("first", "second"):
        mine, other = socket.socketpair()
        link = Link(mine, "worker/1")
        links.adopt(Hello(purpose=MESH, task="worker/1", peer="worker/0", incarnation=incarnation, details=b"1"), link)
        other.close()
        lost.append(link)
    links.connect(FormGeneration(2, [MemberAddress.of(own)]))
    assert all(link.closed for link in lost)
