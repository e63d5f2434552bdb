"""The exchange of local SGD: what replicas keep between two exchanges, and how it becomes common.

The formulas are at the top of `local_sgd.py`. All state is here, in arrays that are replaced and never changed in
place: an exchange that fails leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from phalanx.collectives.communicator import Array, Communicator, Handle
from phalanx.collectives.keyed_collectives import broadcast_named
from phalanx.compression import CompressedReducer, Compression
from phalanx.compression.base_compression import State, below
from phalanx.training.replica import Replica
from phalanx.training.steps.outer_optimizer import AverageOuterOptimizer, OuterOptimizer

Arrays = Sequence[Array]

_SHARED, _COMPRESSION = "shared/", "compression/"


class WeightExchange:
    """The common weights, and how this replica's weights become common.

    Args:
        outer: optimizer for the mean progress of the weights; that of layer state is taken as it is.
        compression: compresses the progress of the weights; None to send it as it is.

    Attributes:
        steps: number of steps since the last exchange began.
    """

    def __init__(self, outer: OuterOptimizer, compression: Compression | None = None) -> None:
        self._outer = outer
        self._reducer = None if compression is None else CompressedReducer(compression)
        self._weights = 0
        self._anchor: list[Array] = []  # weights, then layer state
        self._velocity: list[Array] = []
        self._start: list[Array] = []
        self._samples = 0
        self._underway: PendingExchange | None = None
        self.steps = 0

    @property
    def unmerged(self) -> bool:
        """Whether this replica has taken steps that the common weights do not contain."""
        return self.steps > 0 or self._underway is not None

    def begin(self, values: Arrays, weights: int) -> None:
        """An epoch begins with these values, the same on all replicas.

        Args:
            values: weights, then layer state.
            weights: how many of them are weights.
        """
        # Of 16-bit weights the anchor has more digits, unless a callback has set others.
        same = len(values) == len(self._anchor) and weights == self._weights
        kept = self._anchor if same else values
        self._anchor = [
            _wide(b if np.array_equal(b.astype(v.dtype), v) else v) for b, v in zip(kept, values, strict=True)
        ]
        if [v.shape for v in self._velocity] != [v.shape for v in self._anchor[:weights]]:
            self._velocity = []
        self._weights = weights
        self._start = self._anchor
        self._samples, self._underway, self.steps = 0, None, 0

    def took_step(self, samples: int) -> None:
        """The replicas have taken a step; this one's part had so many samples."""
        self.steps += 1
        self._samples += samples

    def run(self, values: Arrays, replica: Replica, *, overlap: bool) -> list[Array]:
        """Exchange weights; all replicas must call.

        Args:
            values: this replica's weights, then layer state.
            overlap: whether the exchange takes effect at the next one.

        Returns: the values to continue with.
        """
        # Nothing of `self` changes until the exchange is done: if it fails, the caller may repeat it.
        progress = [start - value for start, value in zip(self._start, values, strict=True)]
        anchor, velocity = self._anchor, self._velocity
        if (before := self._underway) is not None:
            anchor, velocity = self._stepped(anchor, velocity, before.wait(replica))
        underway = None
        own = PendingExchange(self._merge, progress, self._samples)
        if overlap:
            own.send(replica)
            underway = own
            local = [_wide(v) for v in values]
            if before is not None:
                local = [a - p for a, p in zip(anchor, progress, strict=True)]
        else:
            anchor, velocity = self._stepped(anchor, velocity, own.wait(replica))
            local = anchor
        self._anchor, self._velocity, self._start, self._underway = anchor, velocity, local, underway
        self._samples = self.steps = 0
        return [array.astype(value.dtype) for array, value in zip(local, values, strict=True)]

    def state(self) -> dict[str, Array]:
        """All state, by name: `own/...` belongs to this replica, `shared/...` to all. Waits for an exchange that is
        under way."""
        parts: dict[str, Arrays] = {"shared/anchor": self._anchor, "shared/velocity": self._velocity}
        if self._start is not self._anchor:
            parts["own/start"] = self._start
        if self._underway is not None and (arrived := self._underway.wait(None)) is not None:
            parts["shared/arrived"] = arrived
        found = {f"{name}/{index}": array for name, arrays in parts.items() for index, array in enumerate(arrays)}
        found["own/samples"] = np.array(self._samples, np.int64)
        found["shared/steps"] = np.array([self.steps, self._weights], np.int64)
        if self._reducer is not None:
            found |= {f"compression/{name}": array for name, array in self._reducer.state().items()}
        return found

    def pooled(self, communicator: Communicator) -> dict[str, Array]:
        """Right after an exchange that was not overlapped: the state of all ranks, pooled. All must call."""
        found = {name: array for name, array in self.state().items() if name.startswith(_SHARED)}
        if self._reducer is not None:
            found |= {_COMPRESSION + name: array for name, array in self._reducer.pooled(communicator).items()}
        return found

    def load_pooled(self, state: State, ranks: int) -> None:
        """Continue, on so many ranks, from what `pooled` returned."""
        self.load({name: array for name, array in state.items() if name.startswith(_SHARED)})
        if self._reducer is not None:
            self._reducer.load_pooled(below(_COMPRESSION, state), ranks)

    def synchronise(self, communicator: Communicator, *, take: bool) -> None:
        """Right after an exchange that was not overlapped: give ranks that join (`take`) what all have in common. All
        ranks must call."""
        own = {name: array for name, array in self.state().items() if name.startswith(_SHARED)}
        shared = broadcast_named(communicator, own)
        if take:
            self.load(shared)
        if self._reducer is not None:
            self._reducer.synchronise(communicator)

    def load(self, state: State) -> None:
        """Continue from what `state` returned; a replica that joins begins with the others' `shared/...` alone."""
        self._anchor, self._velocity = _listed("shared/anchor/", state), _listed("shared/velocity/", state)
        self._start = _listed("own/start/", state) or self._anchor
        arrived = _listed("shared/arrived/", state)
        self._underway = PendingExchange(self._merge, [], 0, arrived) if arrived else None
        self._samples = int(state.get("own/samples", np.array(0)))
        self.steps, self._weights = (int(number) for number in state["shared/steps"])
        if self._reducer is not None:
            self._reducer.load(below(_COMPRESSION, state))

    def _stepped(
        self, anchor: list[Array], velocity: list[Array], merged: Arrays | None
    ) -> tuple[list[Array], list[Array]]:
        if merged is None:
            return anchor, velocity
        count = self._weights
        weights, velocity = self._outer.step(anchor[:count], merged[:count], velocity)
        return [*weights, *AverageOuterOptimizer().step(anchor[count:], merged[count:], [])[0]], velocity

    def _merge(self, progress: Arrays, samples: int, replica: Replica) -> list[Array] | None:
        """The mean progress, weighted by samples; None if there were no samples."""
        counts = replica.gather(samples)
        if not sum(counts):
            return None
        scale = samples / sum(counts)
        out = [np.empty_like(array) for array in progress]
        compressed = self._compressed(progress)
        plain = [index for index in range(len(progress)) if index not in compressed]
        if self._reducer is not None and compressed:
            self._reducer.all_reduce(
                replica.communicator,
                [progress[i] for i in compressed],
                [scale] * len(compressed),
                [out[i] for i in compressed],
            )
        replica.all_reduce([progress[i] for i in plain], scale=scale, out=[out[i] for i in plain])
        if self._reducer is not None:
            self._reducer.commit()
        return out

    def _compressed(self, progress: Arrays) -> list[int]:
        if self._reducer is None:
            return []
        takes = self._reducer.compression.takes
        return [i for i, array in enumerate(progress[: self._weights]) if takes(array.shape, array.dtype)]


Merge = Callable[[Arrays, int, Replica], list[Array] | None]


class PendingExchange:
    """One replica's contribution to an exchange, whose result is wanted later."""

    def __init__(self, merge: Merge, progress: Arrays, samples: int, arrived: list[Array] | None = None) -> None:
        self._merge = merge
        self._progress = progress
        self._samples = samples
        self._arrived = arrived
        self._over = arrived is not None
        self._handle: Handle | None = None

    def send(self, replica: Replica) -> None:
        """Start the exchange in the background."""
        self._handle = replica.communicator.run_async(
            "the exchange of the weights", lambda: self._merge(self._progress, self._samples, replica)
        )

    def wait(self, replica: Replica | None) -> list[Array] | None:
        """The mean progress; merged now, among the present ranks, if it was not started or has failed."""
        if not self._over:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._arrived = handle.wait()
            else:
                assert replica is not None, "it was started"
                self._arrived = self._merge(self._progress, self._samples, replica)
            self._over = True
        return self._arrived


def _wide(array: Array) -> Array:
    """The array in at least 32 bits."""
    return array.astype(np.float32) if array.dtype.itemsize < np.dtype(np.float32).itemsize else array


def _listed(prefix: str, state: State) -> list[Array]:
    found = {int(name.removeprefix(prefix)): np.asarray(a) for name, a in state.items() if name.startswith(prefix)}
    return [found[index] for index in sorted(found)]
