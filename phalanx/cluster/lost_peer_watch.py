"""Notices the loss of a member while this process waits for something else than a collective of Phalanx.

A computation that spans the devices of all processes waits inside the backend, which may notice a dead process after
minutes or never. The members' links end with their processes, so a thread that looks at nothing but their ends knows
at once.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

from phalanx.cluster.membership import Membership, Rank
from phalanx.errors import PeerLostError

CLOSE_CHECK_S = 0.5
"""How often the thread looks whether it is to end."""
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # Linux only


class LostPeerWatch:
    """A thread that waits for the end of any link of a membership. It reads nothing: others use the links.

    Args:
        membership: all members leave together; a link that ends before `close` is a loss.
        activity: what a loss interrupts, for the error's message.
        on_loss: called once, in the thread, with the first loss.

    Attributes:
        loss: the first loss; None as long as there is none.
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
            self._poller.register(fileno, _PEER_CLOSED)  # not for reading: what arrives is for others
        self._thread = threading.Thread(target=self._run, name="phalanx-peer-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """From now on the end of a link means nothing; safe to call twice, and before the links are closed."""
        self._is_closed = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def wait_for_loss(self, at_most_s: float) -> PeerLostError | None:
        """The loss, if there is one or one comes within so many seconds."""
        self._has_lost.wait(at_most_s)
        return self.loss

    def _run(self) -> None:
        while not self._is_closed:
            ended = [self._ranks[fileno] for fileno, _ in self._poller.poll(CLOSE_CHECK_S * 1000)]
            if ended and not self._is_closed:
                self.loss = self._membership.peer_lost(min(ended), self._activity)
                self._has_lost.set()
                self._on_loss(self.loss)
                return
