"""Links of members that never come to a generation."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

from phalanx.cluster.member_links import MemberLinks
from phalanx.cluster.membership import Member
from phalanx.cluster.membership_messages import MESH, FormGeneration, MemberAddress
from phalanx.transport.handshake import Hello
from phalanx.transport.link import Link


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
    links.form(FormGeneration(2, [MemberAddress.of(own)]))
    assert all(link.closed for link in lost)
