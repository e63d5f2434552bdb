"""Synchronizes the ranks of one host through counters in shared memory.

Each rank has a page with its counter. It *posts* by incrementing it, and waits until every other counter is as high.

Ordering. The counter is an aligned 8-byte word that CPython reads and writes with one instruction (a memoryview of
format `Q` copies 8 bytes of known size). On x86, stores become visible in order; on Arm they need not. `_fence()`
releases and re-acquires a lock that no other code takes: an atomic operation with release semantics followed by one
with acquire semantics, which no earlier store and no later load can cross, in any C library that implements locks. It
costs 60 ns. It is called between writing data and posting, between seeing a counter and reading data, and between a
store and a load in the protocol below.

Sleeping. A rank first spins on a counter, then lets its other threads run in between (and other processes, if there
are more ranks than cores), and then blocks in `Mesh.pause`, where it also detects events on the links. Before it
blocks, it stores whom it waits for in its page, fences, and checks the counter once more. A rank that posts fences
after the store, checks whether a peer waits for it, and sends that peer a packet. One of the two sees the other's store
(Dekker 1965). Each wait is nevertheless bounded.

Failure. A rank that gives up while it waits withdraws its posts. A rank that arrives later then waits for it, checks
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
"""How long to spin on a counter before yielding: longer than a chunk takes, so that synchronous ranks never sleep."""
YIELD_S = 1e-3
"""How long to spin while letting others run, before sleeping. Waking up takes about 50 us."""

PAGE_BYTES = 4096
SIGNATURES = 4
"""Number of signatures that each rank keeps, of its last posts."""
_WORDS_PER_PAGE = PAGE_BYTES // 8
# The words of a rank's page. The signatures share the counter's cache line, so that one transfer brings both. The word
# that others read at each post, and that its owner rarely writes, has its own line.
_COUNTER = 0
_FIRST_SIGNATURE = 1
_WAITS_FOR = 8


class SharedCounters:
    """Counters of `ranks`, as seen by one of them.

    Args:
        mesh: Mesh in which a rank sleeps.
        ranks: Members of the group, in order of their pages.
        pages: Memory of `PAGE_BYTES` per rank, initially zeros.
        spin: Whether there is a core for every rank, so that a spinning rank does not delay others.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[Rank], pages: memoryview, *, spin: bool):
        own = mesh.membership.rank
        self._mesh = mesh
        self._words = pages.cast("Q")
        self._spin_s = SPIN_S if spin else 0.0
        self._page = ranks.index(own) * _WORDS_PER_PAGE
        self._peers = [(rank, position * _WORDS_PER_PAGE) for position, rank in enumerate(ranks) if rank != own]
        self._waits_for_me = own + 1  # ranks are stored plus one; 0 means that a rank waits for none
        self._posted = 0  # value of this rank's counter, unless it has failed
        self._completed = 0  # number of posts that all others are known to have matched
        lock = threading.Lock()  # protects nothing: see "Ordering" above
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def synchronize(self, call: CollectiveCall) -> None:
        """Post, and return when all other ranks have posted as many times."""
        self.wait(call, self.post(call))

    def post(self, call: CollectiveCall) -> int:
        """Announce that this rank's data is complete, and return the number of the post."""
        words, page = self._words, self._page
        self._posted = count = self._posted + 1
        words[page + _FIRST_SIGNATURE + count % SIGNATURES] = call.signature
        self._fence()  # values and signature before the counter, which announces them
        words[page + _COUNTER] = count
        self._fence()  # the counter before the check of waiting ranks: see "Sleeping"
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
        # The word still belongs to post `count`: a peer makes post count + 4 only after it has seen this rank's
        # count + 2, and this rank returns from here before that.
        which = _FIRST_SIGNATURE + count % SIGNATURES
        for _, peer in self._peers:
            if words[peer + which] != signature:
                self._mesh.mismatch()
        self._completed = count

    def fail(self) -> None:
        """Withdraw the posts that some others have not matched."""
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
