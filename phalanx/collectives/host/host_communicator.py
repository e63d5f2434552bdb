"""The communicator for arrays in host memory: arguments and results of each collective.

One class serves all algorithms, so that arguments, results, errors and asynchronous calls are the same whether values
are sent through shared memory, links or both. `argument_checks` checks arguments, `CollectiveRunner` orders the calls,
and a `CollectiveAlgorithm` moves the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from phalanx.cluster.membership import Membership
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.fusion_layout import byte_view
from phalanx.collectives.host.algorithm import CollectiveAlgorithm, broadcast, exchange_sizes
from phalanx.collectives.host.argument_checks import (
    check_all_to_all,
    check_root,
    native,
    native_without_objects,
    output_arrays,
    prepare_reduction,
)
from phalanx.collectives.host.collective_runner import CollectiveRunner
from phalanx.collectives.host.collective_thread import PendingHandle
from phalanx.collectives.host.mesh import Mesh
from phalanx.collectives.operation import CollectiveCall, kinds_of, prepare, varying_kind
from phalanx.collectives.reduction import cast, check_reducible, merge_rows, wire_dtype
from phalanx.errors import ConfigurationError
from phalanx.runtime.traffic_account import Traffic

T = TypeVar("T")


class HostCommunicator:
    """See `communicator.Communicator` for the contract. Created by `phalanx.collectives.connect`.

    A context manager. Several threads may use it if they ensure that all ranks call in the same order.

    Attributes:
        kind: How values are sent: `single`, `shared memory`, `ring` or `hierarchical`.
        runner: Runner of the collectives, one at a time.
    """

    def __init__(self, mesh: Mesh, algorithm: CollectiveAlgorithm, kind: str, timeout_s: float):
        self.kind = kind
        self.runner = CollectiveRunner(mesh, algorithm, timeout_s)

    @property
    def membership(self) -> Membership:
        return self.runner.mesh.membership

    @property
    def rank(self) -> int:
        return self.runner.mesh.membership.rank

    @property
    def world_size(self) -> int:
        return self.runner.mesh.membership.world_size

    @property
    def statistics(self) -> Traffic:
        """See `Communicator.statistics`."""
        mesh = self.runner.mesh
        on_links = mesh.bytes_sent
        return Traffic(on_links + mesh.bytes_shared, on_links, self.runner.waited_s, self.runner.started)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in collectives, including the running one. May be read from any thread."""
        return self.runner.waited_s

    def __repr__(self) -> str:
        return f"<{self.kind} communicator, rank {self.rank} of {self.world_size}>"

    def __enter__(self) -> HostCommunicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """See `Communicator.all_reduce`.

        Raises:
            ConfigurationError: An argument is invalid. Nothing was sent.
            CollectiveMismatchError, PeerLostError, CollectiveTimeoutError: See `Communicator`. The contents of `out`
                are then undefined.
        """
        operation, reduction, results = prepare_reduction(arrays, op, scale, out, self.world_size)
        self.runner.run(operation, lambda call: self.runner.algorithm.all_reduce(call, reduction))
        return results

    def run_async(self, name: str, body: Callable[[], T]) -> PendingHandle:
        """See `Communicator.run_async`."""
        return self.runner.submit(name, body)

    def reduce_scatter(self, array: Array, op: ReduceOp = ReduceOp.SUM) -> Array:
        """See `Communicator.reduce_scatter`.

        Each rank receives its row from every rank and merges these rows in rank order. No algorithm can move fewer
        bytes (Thakur, Rabenseifner and Gropp 2005 call this pairwise exchange).
        """
        source = np.ascontiguousarray(native(array))
        check_reducible(source.dtype, op)
        ranks = self.world_size
        if np.ndim(array) == 0 or source.shape[0] != ranks:
            raise ConfigurationError(
                f"reduce_scatter got an array of shape {np.shape(array)}; its first dimension must be the number "
                f"of ranks, {ranks}: row r goes to rank r."
            )
        rows = np.empty_like(source)
        sizes = [[source.nbytes // ranks] * ranks] * ranks
        outgoing, incoming = ([[byte_view(each[r : r + 1])] for r in range(ranks)] for each in (source, rows))
        self.runner.run(
            prepare("reduce_scatter", f"op={op.value}", kinds_of([source]), source.nbytes),
            lambda call: self.runner.algorithm.all_to_all(call, outgoing, incoming, sizes),
        )
        result = np.empty(source.shape[1:], source.dtype)
        wire = wire_dtype(source.dtype)
        with np.errstate(all="ignore"):  # as in the runner, which has finished
            wide = [cast(row.reshape(-1), wire) for row in rows]
            merge_rows(wide, result.reshape(-1), op, ranks if op is ReduceOp.MEAN else 1)
        return result

    def broadcast(self, arrays: Sequence[Array], root: int = 0, *, out: Sequence[Array] | None = None) -> list[Array]:
        """See `Communicator.broadcast`."""
        check_root(root, self.world_size)
        arrays = native_without_objects("broadcast", arrays)
        nbytes = sum(array.nbytes for array in arrays)
        operation = prepare("broadcast", f"root={root}", kinds_of(arrays), nbytes)
        results = output_arrays("broadcast", arrays, out)
        if root == self.rank:  # the root sends its results, so it needs them too
            for source, target in zip(arrays, results, strict=True):
                np.copyto(target, source)
        buffers = [byte_view(array) for array in results]
        self.runner.run(operation, lambda call: broadcast(self.runner.algorithm, call, buffers, root))
        return results

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        """See `Communicator.broadcast_bytes`."""
        check_root(root, self.world_size)

        def body(call: CollectiveCall) -> bytes:
            length = np.array([len(payload)], np.int64)
            broadcast(self.runner.algorithm, call, [byte_view(length)], root)
            content = bytearray(payload) if self.rank == root else bytearray(int(length[0]))
            broadcast(self.runner.algorithm, call, [memoryview(content)], root)
            return bytes(content)

        return self.runner.run(prepare("broadcast_bytes", f"root={root}"), body, len(payload))

    def all_gather(self, array: Array) -> list[Array]:
        """See `Communicator.all_gather`."""
        (array,) = native_without_objects("all_gather", [array])

        # Sizes and values in one collective: within a call, packets of a peer arrive in the order of `expect`.
        def body(call: CollectiveCall) -> list[Array]:
            # 0-d arrays have no first dimension; reshaped, they count as one row.
            counts = exchange_sizes(self.runner.algorithm, call, self.rank, [array.shape[0] if array.ndim else 1])
            results = [np.empty((count, *array.shape[1:]), array.dtype) for (count,) in counts]
            results[self.rank][...] = array
            self.runner.algorithm.all_gather(call, [[byte_view(result)] for result in results])
            return results if array.ndim else [result.reshape(()) for result in results]

        return self.runner.run(prepare("all_gather", "", (varying_kind(array),)), body, array.nbytes)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Communicator.all_gather_bytes`."""

        def body(call: CollectiveCall) -> list[bytes]:
            contents = [
                bytearray(length)
                for (length,) in exchange_sizes(self.runner.algorithm, call, self.rank, [len(payload)])
            ]
            contents[self.rank][:] = payload
            self.runner.algorithm.all_gather(call, [[memoryview(content)] for content in contents])
            return [bytes(content) for content in contents]

        return self.runner.run(prepare("all_gather_bytes"), body, len(payload))

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """See `Communicator.all_to_all`."""
        arrays = native_without_objects("all_to_all", arrays)
        check_all_to_all(arrays, self.world_size)
        first = arrays[0]

        def body(call: CollectiveCall) -> list[Array]:
            counts = exchange_sizes(self.runner.algorithm, call, self.rank, [array.shape[0] for array in arrays])
            row_bytes = math.prod(first.shape[1:]) * first.itemsize
            sizes = [[count * row_bytes for count in row] for row in counts]
            results = [np.empty((row[self.rank], *first.shape[1:]), first.dtype) for row in counts]
            outgoing, incoming = ([[byte_view(array)] for array in each] for each in (arrays, results))
            self.runner.algorithm.all_to_all(call, outgoing, incoming, sizes)
            return results

        nbytes = sum(array.nbytes for array in arrays)
        return self.runner.run(prepare("all_to_all", "", (varying_kind(first),)), body, nbytes)

    def barrier(self, what: str = "", nbytes: int = 0) -> None:
        """See `Communicator.barrier`."""
        nothing: list[list[memoryview]] = [[]] * self.world_size
        self.runner.mesh.bytes_shared += nbytes
        self.runner.run(prepare("barrier", what), lambda call: self.runner.algorithm.all_gather(call, nothing), nbytes)

    def close(self) -> None:
        """See `Communicator.close`. Cancels a collective that runs in the background."""
        self.runner.close()
