"""How the ranks of one host synchronize through counters in shared memory.

Each rank has a page with its counter. It *posts* by adding one to it, and waits until every other counter is as high.

Ordering. The counter is an aligned 8-byte word that CPython reads and writes with one instruction (a memoryview of
format `Q` copies 8 bytes of known size). On x86, stores become visible in order; on Arm they need not. `_fence()`
releases and re-acquires a lock that no other code takes: an atomic operation with release semantics followed by one
with acquire semantics, which no earlier store and no later load can cross, in any C library that implements locks at
all. It costs 60 ns. It stands between writing data and posting, between seeing a counter and reading data, and between
a store and a load in the protocol below.

Sleeping. A rank first spins on a counter, then lets its other threads run in between (and other processes, if there
are more ranks than cores), and then blocks in `Mesh.pause`, where it also notices what happens on the links. Before it
blocks, it stores whom it waits for in its page, fences, and looks at the counter once more. A rank that posts fences
after the store, looks whether a peer waits for it, and sends that peer a packet. One of the two sees the other's store
(Dekker 1965). Each wait is bounded nevertheless.

Failure. A rank that gives up while it waits takes back its posts. A rank that comes later then waits for it, looks at
its links, and finds the reason there. A rank that has not yet seen the previous post can still finish what was
complete.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from phalanx.cluster.membership import Rank
from phalanx.collectives.host.link_poller import let_threads_run
from phalanx.collectives.host.mesh import Mesh
from phalanx.collectives.operation import CollectiveCall
from phalanx.monitoring import timeline

SPIN_S = 100e-6
"""How long to look at a counter before yielding: longer than a chunk takes, so that ranks in step never sleep."""
YIELD_S = 1e-3
"""How long to look while letting others run, before sleeping. Waking from sleep takes some 50 us."""

PAGE_BYTES = 4096
SIGNATURES = 4
"""Signatures that each rank keeps: those of its last posts."""
_WORDS_PER_PAGE = PAGE_BYTES // 8
# The words of a rank's page. The signatures share the counter's cache line, so that one transfer brings both. The word
# that others read at each post, and that its owner rarely writes, has a line of its own.
_COUNTER = 0
_FIRST_SIGNATURE = 1
_WAITS_FOR = 8


class SharedCounters:
    """The counters of `ranks`, seen from one of them.

    Args:
        mesh: Where a rank waits once it sleeps.
        ranks: The members of the group, in the order of their pages.
        pages: `PAGE_BYTES` for each rank, zeros at first.
        spin: Whether there is a core for every rank, so that a spinning rank keeps no other from arriving.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[Rank], pages: memoryview, *, spin: bool):
        own = mesh.membership.rank
        self._mesh = mesh
        self._words = pages.cast("Q")
        self._spin_s = SPIN_S if spin else 0.0
        self._page = ranks.index(own) * _WORDS_PER_PAGE
        self._peers = [(rank, position * _WORDS_PER_PAGE) for position, rank in enumerate(ranks) if rank != own]
        self._waits_for_me = own + 1  # ranks are stored plus one; 0 is a rank that waits for none
        self._posted = 0  # what this rank's counter says, unless it has failed
        self._completed = 0  # posts that all others have been seen to match
        lock = threading.Lock()  # Protects nothing: see "Ordering" above.
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def synchronize(self, call: CollectiveCall) -> None:
        """Post, and return when all other ranks have posted as often."""
        self.wait(call, self.post(call))

    def post(self, call: CollectiveCall) -> int:
        """Tell the others that what this rank has written is complete; returns the number of the post."""
        words, page = self._words, self._page
        self._posted = count = self._posted + 1
        words[page + _FIRST_SIGNATURE + count % SIGNATURES] = call.signature
        self._fence()  # values and signature before the counter, which says that they are there
        words[page + _COUNTER] = count
        self._fence()  # the counter before the look at the waiting ranks: see "Sleeping"
        for rank, peer in self._peers:
            if words[peer + _WAITS_FOR] == self._waits_for_me:
                self._mesh.notify(rank)
        return count

    def wait(self, call: CollectiveCall, count: int) -> None:
        """Return when all other ranks have made post `count`, for the same operation."""
        words, signature = self._words, call.signature
        for rank, peer in self._peers:
            if words[peer + _COUNTER] < count:
                if timeline.current.on:
                    with timeline.current.span(self._mesh.track, "wait", {"for": rank}):
                        self._wait_for_peer(rank, peer + _COUNTER, count)
                else:
                    self._wait_for_peer(rank, peer + _COUNTER, count)
        self._fence()
        # The word is still that of post `count`: a peer makes post count + 4 only when it has seen this rank's
        # count + 2, and before that this rank returns from here.
        which = _FIRST_SIGNATURE + count % SIGNATURES
        for _, peer in self._peers:
            if words[peer + which] != signature:
                self._mesh.mismatch()
        self._completed = count

    def fail(self) -> None:
        """Take back the posts that not all others have matched."""
        self._words[self._page + _COUNTER] = self._completed

    def close(self) -> None:
        """Release the pages."""
        self._words.release()

    def _fence(self) -> None:
        """Order all loads and stores before it with all after it; see "Ordering" above."""
        self._release()
        self._acquire()

    def _wait_for_peer(self, rank: Rank, word: int, count: int) -> None:
        words = self._words
        until = time.perf_counter() + self._spin_s
        while time.perf_counter() < until:
            for _ in range(16):
                if words[word] >= count:
                    return
        until += YIELD_S
        while time.perf_counter() < until:
            if words[word] >= count:
                return
            let_threads_run()
            if not self._spin_s:  # the peer may need this very core
                os.sched_yield()
        waits_for = self._page + _WAITS_FOR
        while True:
            words[waits_for] = rank + 1
            self._fence()
            if words[word] >= count:
                break
            self._mesh.pause(lambda: [each for each, page in self._peers if words[page + _COUNTER] < count])
        words[waits_for] = 0
