"""The batches of the open epoch: which are issued, and which were returned because their worker was lost. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field


@dataclass
class EpochBatches:
    """Issues the batches of one epoch in order. Protected by the schedule's lock.

    Attributes:
        number: Number of the epoch in its `fit`.
        steps: Number of batches; None while unknown.
        next_unissued: First batch that was never issued.
        returned: Batches whose worker was lost, in order; they are issued again first.
    """

    number: int
    steps: int | None
    next_unissued: int = 0
    returned: list[int] = field(default_factory=list)

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches are issued."""
        return not self.returned and self.steps is not None and self.next_unissued >= self.steps

    @property
    def count(self) -> int:
        """Number of issued batches that the epoch contains."""
        return self.next_unissued if self.steps is None else min(self.next_unissued, self.steps)

    def draw(self) -> int | None:
        """The next batch to train on; None if there is none left."""
        if self.returned:
            return self.returned.pop(0)
        if self.is_exhausted:
            return None
        self.next_unissued += 1
        return self.next_unissued - 1

    def put_back(self, batch: int) -> None:
        """Return a batch, to be issued again."""
        if batch not in self.returned:
            bisect.insort(self.returned, batch)

    def reclaim(self, batch: int) -> bool:
        """Take back a batch that was returned. Returns whether it was still here."""
        if batch not in self.returned:
            return False
        self.returned.remove(batch)
        return True

    def truncate(self, steps: int) -> None:
        """End the epoch after this many batches, where the data ends."""
        self.steps = steps if self.steps is None else min(self.steps, steps)
        self.returned = [batch for batch in self.returned if batch < self.steps]

    def close(self) -> int:
        """Issue no more batches. Returns the epoch's number of batches."""
        self.steps, self.returned = self.count, []
        return self.steps


@dataclass
class LostBatches:
    """Issued batches of a `fit` that no worker is known to have trained on.

    Attributes:
        count: Number of these batches.
        reported_count: Number of them that the chief knows about.
    """

    count: int = 0
    reported_count: int = 0

    def describe(self) -> str:
        """A note for the chief, if more batches are lost than it knows about; otherwise empty."""
        if self.count <= self.reported_count:
            return ""
        self.reported_count = self.count
        return f"{self.count} {'batch' if self.count == 1 else 'batches'} of this fit() lost with workers or a server"
