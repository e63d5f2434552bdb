"""Detects the loss of a member while this process waits outside of Phalanx's collectives.

A computation that spans the devices of all processes waits inside the backend, which may detect a dead process after
minutes or never. The members' links close when their processes end, so a thread that watches only for closed links
detects the loss immediately.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

from phalanx.cluster.membership import Membership, Rank
from phalanx.errors import PeerLostError

CLOSE_CHECK_S = 0.5
"""Interval at which the thread checks whether to stop."""
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # Linux only


class LostPeerWatch:
    """A thread that waits for the end of any link of a membership. It reads nothing: others use the links.

    Args:
        membership: The watched membership. Members leave at the same time: a link that ends before `close` is a loss.
        activity: The activity that a loss interrupts, for the error message.
        on_loss: Function called once, in the thread, with the first loss.

    Attributes:
        loss: The first loss; None if no member was lost.
    """

    def __init__(self, membership: Membership, activity: str, on_loss: Callable[[PeerLostError], object]):
        self.loss: PeerLostError | None = None
        self._membership = membership
        self._activity = activity
        self._on_loss = on_loss
        self._is_closed = False
        self._has_lost = threading.Event()
        self._ranks: dict[int, Rank] = {link.fileno(): rank for rank, link in membership.links.items()}
        self._poller = select.poll()
        for fileno in self._ranks:
            self._poller.register(fileno, _PEER_CLOSED)  # not for reading: the data is for others
        self._thread = threading.Thread(target=self._run, name="phalanx-peer-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching, so that links may end. Call this before closing the links; safe to call twice."""
        self._is_closed = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def wait_for_loss(self, at_most_s: float) -> PeerLostError | None:
        """Wait at most `at_most_s` seconds for a loss and return it; None if there is none."""
        self._has_lost.wait(at_most_s)
        return self.loss

    def _run(self) -> None:
        while not self._is_closed:
            ended = [self._ranks[fileno] for fileno, _ in self._poller.poll(CLOSE_CHECK_S * 1000)]
            if ended and not self._is_closed:
                self.loss = self._membership.peer_lost_error(min(ended), self._activity)
                self._has_lost.set()
                self._on_loss(self.loss)
                return
