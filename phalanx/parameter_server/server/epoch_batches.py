"""The batches of the open epoch: which are handed out, and which came back because their worker was lost. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field


@dataclass
class EpochBatches:
    """Hands out the batches of one epoch in order. The schedule's lock protects it.

    Attributes:
        number: Number of the epoch in its `fit`.
        steps: Number of batches; None while unknown.
        next: The first batch that was never handed out.
        returned: Batches whose worker was lost, in order; they are handed out again first.
    """

    number: int
    steps: int | None
    next: int = 0
    returned: list[int] = field(default_factory=list)

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches are handed out."""
        return not self.returned and self.steps is not None and self.next >= self.steps

    @property
    def count(self) -> int:
        """Number of batches handed out, as far as the epoch contains them."""
        return self.next if self.steps is None else min(self.next, self.steps)

    def draw(self) -> int | None:
        """The next batch to train on; None if there is none left."""
        if self.returned:
            return self.returned.pop(0)
        if self.is_exhausted:
            return None
        self.next += 1
        return self.next - 1

    def put_back(self, batch: int) -> None:
        """Hand a batch out again."""
        if batch not in self.returned:
            bisect.insort(self.returned, batch)

    def reclaim(self, batch: int) -> bool:
        """Keep a batch that was put back from being handed out again; whether it was still here."""
        if batch not in self.returned:
            return False
        self.returned.remove(batch)
        return True

    def truncate(self, steps: int) -> None:
        """The data end after this many batches."""
        self.steps = steps if self.steps is None else min(self.steps, steps)
        self.returned = [batch for batch in self.returned if batch < self.steps]

    def close(self) -> int:
        """Hand out no more batches; returns how many the epoch has now."""
        self.steps, self.returned = self.count, []
        return self.steps


@dataclass
class LostBatches:
    """Batches of a `fit` that were handed out and that no worker is known to have trained on.

    Attributes:
        count: Their number.
        described: How many of them the chief knows of.
    """

    count: int = 0
    described: int = 0

    def describe(self) -> str:
        """A note for the chief, if more batches are lost than it knows of; otherwise empty."""
        if self.count <= self.described:
            return ""
        self.described = self.count
        return f"{self.count} {'batch' if self.count == 1 else 'batches'} of this fit() lost with workers or a server"
