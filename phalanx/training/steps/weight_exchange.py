"""The exchange of local SGD: what replicas keep between two exchanges, and how it is merged.

The formulas are at the top of `local_sgd.py`. All state is kept here, in arrays that are replaced and never changed in
place, so an exchange that fails leaves it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from phalanx.collectives.communicator import Array, Communicator, Handle
from phalanx.collectives.keyed_collectives import broadcast_named
from phalanx.compression import CompressedReducer, Compression
from phalanx.compression.base_compression import State, strip_prefix
from phalanx.training.replica import Replica
from phalanx.training.steps.outer_optimizer import OuterOptimizer

Arrays = Sequence[Array]

_ANCHOR, _VELOCITY, _WEIGHTS, _COMPRESSION = "anchor/", "velocity/", "weights", "compression/"


class WeightExchange:
    """The common weights, and the exchange that merges this replica's weights into them.

    Args:
        outer: Optimizer for the mean progress of the weights; the progress of layer state is applied directly.
        compression: Compresses the progress of the weights; None to send it unchanged.

    Attributes:
        steps: Number of steps since the last exchange began.
    """

    def __init__(self, outer: OuterOptimizer, compression: Compression | None = None) -> None:
        self._outer = outer
        self._reducer = None if compression is None else CompressedReducer(compression)
        self._weights = 0
        # At least float32: an outer step on 16-bit weights would be lost to rounding.
        self._anchor: list[Array] = []  # weights, then layer state
        self._velocity: list[Array] = []
        # Where this replica started the steps that no exchange contains: the anchor, or its own weights while an
        # exchange is in progress.
        self._start: list[Array] = []
        self._samples = 0
        self._in_flight: PendingExchange | None = None
        self.steps = 0

    @property
    def unmerged(self) -> bool:
        """Whether this replica has taken steps that the common weights do not contain."""
        return self.steps > 0 or self._in_flight is not None

    def begin(self, values: Arrays, weights: int) -> None:
        """Begin an epoch with these values, the same on all replicas.

        Args:
            values: Weights, then layer state.
            weights: Number of values that are weights.
        """
        # For 16-bit weights the anchor is more precise, unless a callback has set others.
        same = len(values) == len(self._anchor) and weights == self._weights
        kept = self._anchor if same else values
        self._anchor = [
            _at_least_float32(b if np.array_equal(b.astype(v.dtype), v) else v)
            for b, v in zip(kept, values, strict=True)
        ]
        if [v.shape for v in self._velocity] != [v.shape for v in self._anchor[:weights]]:
            self._velocity = []
        self._weights = weights
        self._start = self._anchor
        self._samples, self._in_flight, self.steps = 0, None, 0

    def record_step(self, samples: int) -> None:
        """Record a step of all replicas, and the number of samples in this replica's part."""
        self.steps += 1
        self._samples += samples

    def run(self, values: Arrays, replica: Replica, *, overlap: bool) -> list[Array]:
        """Exchange weights; all replicas must call.

        Args:
            values: This replica's weights, then layer state.
            overlap: Whether the exchange takes effect at the next one.

        Returns: the values to continue with.
        """
        # `self` does not change until the exchange succeeds: if it fails, the caller may repeat it.
        progress = [start - value for start, value in zip(self._start, values, strict=True)]
        anchor, velocity = self._anchor, self._velocity
        # First the exchange that was sent at the end of the last period, among the ranks of that time, then the new.
        if (before := self._in_flight) is not None:
            anchor, velocity = self._outer_step(anchor, velocity, before.wait(replica))
        in_flight = None
        own = PendingExchange(self._merge, progress, self._samples)
        if overlap:
            own.send(replica)
            in_flight = own
            # After the first exchange there is no result yet: the replica continues from where it is.
            local = [_at_least_float32(v) for v in values]
            if before is not None:
                local = [a - p for a, p in zip(anchor, progress, strict=True)]
        else:
            anchor, velocity = self._outer_step(anchor, velocity, own.wait(replica))
            local = anchor
        self._anchor, self._velocity, self._start, self._in_flight = anchor, velocity, local, in_flight
        self._samples = self.steps = 0
        return [array.astype(value.dtype) for array, value in zip(local, values, strict=True)]

    # Right after an exchange without overlap, nothing is in progress and this replica has no unmerged steps: its state
    # is the same on all ranks, except what a compression keeps.

    def combined_state(self, communicator: Communicator) -> dict[str, Array]:
        """Return the state of all ranks, combined, right after an exchange without overlap. All must call."""
        found = self._shared()
        if self._reducer is not None:
            found |= {_COMPRESSION + name: array for name, array in self._reducer.pooled(communicator).items()}
        return found

    def load_combined(self, state: State, ranks: int) -> None:
        """Continue from what `combined_state` returned, on this number of ranks."""
        self._adopt(state)
        if self._reducer is not None:
            self._reducer.load_pooled(strip_prefix(_COMPRESSION, state), ranks)

    def synchronize(self, communicator: Communicator, *, adopt: bool) -> None:
        """Send the common state to ranks that join (`adopt`), right after an exchange without overlap; collective."""
        shared = broadcast_named(communicator, self._shared())
        if adopt:
            self._adopt(shared)
        if self._reducer is not None:
            self._reducer.synchronize(communicator)

    def _shared(self) -> dict[str, Array]:
        assert not self.unmerged, "replicas have state of their own between two exchanges"
        parts = {_ANCHOR: self._anchor, _VELOCITY: self._velocity}
        found = {f"{prefix}{index}": array for prefix, arrays in parts.items() for index, array in enumerate(arrays)}
        return {**found, _WEIGHTS: np.array(self._weights, np.int64)}

    def _adopt(self, shared: State) -> None:
        self._anchor, self._velocity = _listed(_ANCHOR, shared), _listed(_VELOCITY, shared)
        self._start, self._weights = self._anchor, int(shared[_WEIGHTS])
        self._samples, self._in_flight, self.steps = 0, None, 0

    def _outer_step(
        self, anchor: list[Array], velocity: list[Array], merged: Arrays | None
    ) -> tuple[list[Array], list[Array]]:
        if merged is None:
            return anchor, velocity
        count = self._weights
        weights, velocity = self._outer.step(anchor[:count], merged[:count], velocity)
        return [*weights, *(a - p for a, p in zip(anchor[count:], merged[count:], strict=True))], velocity

    def _merge(self, progress: Arrays, samples: int, replica: Replica) -> list[Array] | None:
        """Return the mean progress, weighted by samples; None if there were no samples."""
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
    """One replica's contribution to an exchange, whose result is needed later."""

    def __init__(self, merge: Merge, progress: Arrays, samples: int) -> None:
        self._merge = merge
        self._progress = progress
        self._samples = samples
        self._handle: Handle | None = None

    def send(self, replica: Replica) -> None:
        """Start the exchange in the background."""
        self._handle = replica.communicator.run_async(
            "the exchange of the weights", lambda: self._merge(self._progress, self._samples, replica)
        )

    def wait(self, replica: Replica) -> list[Array] | None:
        """Return the mean progress; merge it now, among the current ranks, if it was not started."""
        if self._handle is None:
            return self._merge(self._progress, self._samples, replica)
        merged: list[Array] | None = self._handle.wait()
        return merged


def _at_least_float32(array: Array) -> Array:
    """Convert the array to at least 32 bits."""
    return array.astype(np.float32) if array.dtype.itemsize < np.dtype(np.float32).itemsize else array


def _listed(prefix: str, state: State) -> list[Array]:
    found = {int(name.removeprefix(prefix)): np.asarray(a) for name, a in state.items() if name.startswith(prefix)}
    return [found[index] for index in sorted(found)]
