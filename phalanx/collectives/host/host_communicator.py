"""The communicator: checks, order, results and failure. How values move is left to its engine.

One class serves all kinds, so that arguments, results, errors and asynchronous calls are the same whether
the values go through shared memory, links or both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from phalanx.cluster.membership import Membership
from phalanx.collectives.collective_thread import CollectiveThread, PendingHandle
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.fusion_layout import byte_view, group_by_dtype
from phalanx.collectives.host.algorithm import CollectiveAlgorithm, Reduction
from phalanx.collectives.host.mesh import FLUSH_S, POLL_S, Mesh
from phalanx.collectives.operation import CollectiveCall, CollectiveDescription, Operation
from phalanx.collectives.reduction import cast, check_reducible, is_float, merge_rows, wire_dtype
from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.monitoring import timeline

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_OPERATIONS = 256
"""Kinds of calls that are kept prepared: a training loop has a handful; varying batches make new ones for
ever."""


class HostCommunicator:
    """See `communicator.Communicator` for the contract. Made by `phalanx.collectives.connect`.

    A context manager. Threads may share it, but then they must make sure themselves that all ranks call in
    the same order.

    Attributes:
        kind: how values move: `single`, `shared memory`, `ring` or `hierarchical`.
    """

    def __init__(self, mesh: Mesh, algorithm: CollectiveAlgorithm, kind: str, timeout_s: float):
        self.kind = kind
        self._mesh = mesh
        self._algorithm = algorithm
        self._timeout_s = timeout_s
        self._turn = threading.Lock()  # Held while a collective runs: one at a time.
        self._number = 0
        self._waited_s = 0.0
        self._began: float | None = None  # the collective that runs
        self._operations: OrderedDict[Hashable, Operation] = OrderedDict()
        self._worker: CollectiveThread | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def membership(self) -> Membership:
        return self._mesh.membership

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def world_size(self) -> int:
        return self.membership.world_size

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent in collectives until now, those through shared memory included."""
        return self._mesh.bytes_sent + self._mesh.bytes_shared

    @property
    def bytes_on_links(self) -> int:
        """Those of `bytes_sent` that went over the network, packet headers included."""
        return self._mesh.bytes_sent

    @property
    def collectives(self) -> int:
        """How many collectives this rank has begun."""
        return self._number

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in collectives until now, the present one included. May be asked for from
        any thread."""
        began = self._began
        return self._waited_s + (0.0 if began is None else time.monotonic() - began)

    def __repr__(self) -> str:
        return f"<{self.kind} communicator, rank {self.rank} of {self.world_size}>"

    def __enter__(self) -> HostCommunicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -------------------------------------------------------------- reductions

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
            ConfigurationError: an argument is wrong. Nothing was sent.
            CollectiveMismatchError, PeerLostError, CollectiveTimeoutError: see `Communicator`. What `out`
                holds is then undefined.
        """
        operation, reduction, results = self._prepare(arrays, op, scale, out)
        self._run(operation, lambda call: self._algorithm.all_reduce(call, reduction))
        return results

    def all_reduce_async(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> PendingHandle:
        """See `Communicator.all_reduce_async`. The arguments are checked at once."""
        operation, reduction, results = self._prepare(arrays, op, scale, out)

        def body() -> list[Array]:
            self._run_now(operation, lambda call: self._algorithm.all_reduce(call, reduction))
            return results

        return self._submit(str(operation.description), body)

    def run_async(self, name: str, body: Callable[[], T]) -> PendingHandle:
        """Run a function in the background, in its turn among this rank's collectives, of which it may call several.

        All ranks must call this in the same order among their collectives, and blocking ones wait until it is over.

        Args:
            name: what it is, for messages.
        """
        return self._submit(name, body)

    def _submit(self, name: str, body: Callable[[], Any]) -> PendingHandle:
        self._check_usable()
        if self._worker is None:
            self._worker = CollectiveThread(f"phalanx-collectives-{self.rank}")
        return self._worker.submit(name, body)

    def reduce_scatter(self, array: Array, op: ReduceOp = ReduceOp.SUM) -> Array:
        """See `Communicator.reduce_scatter`.

        Each rank gets every rank's row for it and merges them in rank order. That moves as few bytes as
        any algorithm can (Thakur, Rabenseifner and Gropp 2005 call it pairwise exchange).
        """
        array = native(array)
        check_reducible(array.dtype, op)
        if array.ndim == 0 or array.shape[0] != self.world_size:
            raise ConfigurationError(
                f"reduce_scatter got an array of shape {array.shape}; its first dimension must be the number "
                f"of ranks, {self.world_size}: row r goes to rank r."
            )
        operation = self._operation(
            ("reduce_scatter", op, array.dtype, array.shape),
            lambda: CollectiveDescription("reduce_scatter", f"op={op.value}", (_describe(array),)),
            array.nbytes,
        )
        source = np.ascontiguousarray(array)
        rows = np.empty_like(source)
        size = source.nbytes // self.world_size

        def parts(array: Array) -> list[Array]:  # views also where a row is a single number
            return [array[rank : rank + 1] for rank in range(self.world_size)]

        sizes = [[size] * self.world_size] * self.world_size

        def body(call: CollectiveCall) -> None:
            self._algorithm.all_to_all(
                call, [[byte_view(row)] for row in parts(source)], [[byte_view(row)] for row in parts(rows)], sizes
            )

        self._run(operation, body)
        result = np.empty(array.shape[1:], array.dtype)
        wire = wire_dtype(array.dtype)
        with np.errstate(all="ignore"):
            merge_rows(
                [cast(row.reshape(-1), wire) for row in rows],
                result.reshape(-1),
                op,
                self.world_size if op is ReduceOp.MEAN else 1,
            )
        return result

    # -------------------------------------------------------------- broadcasts

    def broadcast(self, arrays: Sequence[Array], root: int = 0, *, out: Sequence[Array] | None = None) -> list[Array]:
        """See `Communicator.broadcast`."""
        self._check_root(root)
        arrays = [native(array) for array in arrays]
        _check_plain("broadcast", arrays)
        operation = self._operation(
            ("broadcast", root, *((array.dtype, array.shape) for array in arrays)),
            lambda: CollectiveDescription("broadcast", f"root={root}", tuple(map(_describe, arrays))),
            sum(array.nbytes for array in arrays),
        )
        results = _outputs("broadcast", arrays, out)
        if root == self.rank:
            for source, target in zip(arrays, results, strict=True):
                np.copyto(target, source)
        buffers = [byte_view(array) for array in results]
        self._run(operation, lambda call: self._algorithm.broadcast(call, buffers, root))
        return results

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        """See `Communicator.broadcast_bytes`."""
        self._check_root(root)
        operation = self._operation(
            ("broadcast_bytes", root), lambda: CollectiveDescription("broadcast_bytes", f"root={root}")
        )

        def body(call: CollectiveCall) -> bytes:
            length = np.array([len(payload)], np.int64)
            self._algorithm.broadcast(call, [byte_view(length)], root)
            content = bytearray(payload) if self.rank == root else bytearray(int(length[0]))
            self._algorithm.broadcast(call, [memoryview(content)], root)
            return bytes(content)

        return self._run(operation, body, len(payload))

    # --------------------------------------------------------------- exchanges

    def all_gather(self, array: Array) -> list[Array]:
        """See `Communicator.all_gather`."""
        array = native(array)
        _check_plain("all_gather", [array])
        operation = self._operation(
            ("all_gather", array.dtype, array.ndim, array.shape[1:]),
            lambda: CollectiveDescription("all_gather", "", (_describe(array, varying=True),)),
        )

        def body(call: CollectiveCall) -> list[Array]:
            # 0-d arrays have no first dimension; reshaped, they count as one row.
            rows = array.shape[0] if array.ndim else 1
            counts = self._exchange_sizes(call, [rows])
            results = [np.empty((count, *array.shape[1:]), array.dtype) for (count,) in counts]
            self._algorithm.all_gather(call, [byte_view(array)], [[byte_view(result)] for result in results])
            return results if array.ndim else [result.reshape(()) for result in results]

        return self._run(operation, body, array.nbytes)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Communicator.all_gather_bytes`."""
        operation = self._operation(("all_gather_bytes",), lambda: CollectiveDescription("all_gather_bytes"))

        def body(call: CollectiveCall) -> list[bytes]:
            lengths = self._exchange_sizes(call, [len(payload)])
            contents = [bytearray(length) for (length,) in lengths]
            self._algorithm.all_gather(
                call, [memoryview(payload).cast("B")], [[memoryview(content)] for content in contents]
            )
            return [bytes(content) for content in contents]

        return self._run(operation, body, len(payload))

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """See `Communicator.all_to_all`."""
        arrays = [native(array) for array in arrays]
        _check_plain("all_to_all", arrays)
        if len(arrays) != self.world_size:
            raise ConfigurationError(
                f"all_to_all got {len(arrays)} arrays; it takes one for each of the {self.world_size} ranks."
            )
        kinds = {(array.dtype, array.ndim, array.shape[1:]) for array in arrays}
        if len(kinds) > 1 or arrays[0].ndim == 0:
            raise ConfigurationError(
                f"all_to_all got arrays {', '.join(map(_describe, arrays))}; they must have one dtype, at "
                f"least one dimension, and may differ in the first one only."
            )
        first = arrays[0]
        operation = self._operation(
            ("all_to_all", first.dtype, first.ndim, first.shape[1:]),
            lambda: CollectiveDescription("all_to_all", "", (_describe(first, varying=True),)),
        )

        def body(call: CollectiveCall) -> list[Array]:
            counts = self._exchange_sizes(call, [array.shape[0] for array in arrays])
            row_bytes = int(np.prod(first.shape[1:], dtype=np.int64)) * first.itemsize
            sizes = [[count * row_bytes for count in row] for row in counts]
            results = [np.empty((row[self.rank], *first.shape[1:]), first.dtype) for row in counts]
            self._algorithm.all_to_all(
                call,
                [[byte_view(array)] for array in arrays],
                [[byte_view(result)] for result in results],
                sizes,
            )
            return results

        return self._run(operation, body, sum(array.nbytes for array in arrays))

    def barrier(self, what: str = "", nbytes: int = 0) -> None:
        """See `Communicator.barrier`."""
        operation = self._operation(("barrier", what), lambda: CollectiveDescription("barrier", what))
        nothing: list[list[memoryview]] = [[]] * self.world_size
        self._mesh.bytes_shared += nbytes
        self._run(operation, lambda call: self._algorithm.all_gather(call, [], nothing), nbytes)

    # --------------------------------------------------------------- life time

    def watch_stalls(self, after_s: float, tell: Callable[[Sequence[int]], None]) -> None:
        """Have `tell` called with the ranks that have not come, once for each collective that waits so long."""
        self._mesh.stall_s, self._mesh.on_stall = after_s, tell

    def warn_of_stalls(self, after_s: float) -> None:
        """Have a warning name the ranks that have not come, once for each collective that waits so long."""

        def warn(missing: Sequence[int]) -> None:
            present = set(range(self.world_size)) - set(missing)
            if self.rank == min(present, default=self.rank):
                _log.warning(
                    "stalled for more than %g s: %s waits for %s. The job ends after %g s "
                    "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, PHALANX_TIMEOUT).",
                    after_s,
                    self._mesh.call,
                    self._mesh.names(missing),
                    self._timeout_s,
                )

        self.watch_stalls(after_s, warn)

    def on_track(self, track: str) -> None:
        """Have this communicator's collectives in a track of their own in the timeline."""
        self._mesh.track = track

    def interrupt(self) -> None:
        """Make a collective that waits in another thread give up with a PhalanxError; the other ranks are told."""
        self._mesh.interrupt()

    def close(self) -> None:
        """See `Communicator.close`. A collective that still runs in the background is cut short."""
        if self._closed:
            return
        self._closed = True
        stopped = True
        if self._worker is not None:
            self._mesh.interrupt()
            stopped = self._worker.stop(timeout_s=10 * POLL_S + FLUSH_S)
        if not stopped:
            _log.warning("rank %d: a collective is still running; its memory is not freed.", self.rank)
            return
        if self._failure is None:
            self._mesh.leave()
        self._algorithm.close()
        self._operations.clear()

    def adopt(self, algorithm: CollectiveAlgorithm, kind: str) -> None:
        """Go on with another engine, to which all ranks change at the same point. Used while connecting."""
        self._algorithm, self.kind = algorithm, kind

    # ------------------------------------------------------------------ inside

    def _run(self, operation: Operation, body: Callable[[CollectiveCall], T], nbytes: int = 0) -> T:
        """Run a collective after all that were submitted before.

        Args:
            nbytes: what this rank brings, where `operation` does not say it.
        """
        if self._worker is not None:
            self._worker.drain()
        return self._run_now(operation, body, nbytes)

    def _run_now(self, operation: Operation, body: Callable[[CollectiveCall], T], nbytes: int = 0) -> T:
        with self._turn:
            self._check_usable()
            self._number += 1
            now = self._began = time.monotonic()
            call = CollectiveCall(self._number, operation, now, now + self._timeout_s)
            self._mesh.begin(call)
            try:
                # Infinities and NaN are values here, not mistakes: overflow is found where gradients are
                # unscaled.
                with np.errstate(all="ignore"):
                    return self._recorded(call, body, nbytes) if timeline.current.on else body(call)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._began = None
                self._waited_s += time.monotonic() - now

    def _recorded(self, call: CollectiveCall, body: Callable[[CollectiveCall], T], nbytes: int) -> T:
        """Run a collective, and note it in the timeline."""
        operation, sent, started = call.operation, self.bytes_sent, timeline.now()
        try:
            return body(call)
        finally:
            args = {
                "bytes": nbytes or operation.nbytes,
                "sent": self.bytes_sent - sent,
                "algorithm": self._algorithm.name,
                "arrays": len(operation.description.arrays),
                "detail": operation.description.detail,
                "number": call.number,
            }
            timeline.current.complete(self._mesh.track, operation.description.name, started, args)

    def give_up(self, error: BaseException) -> None:
        """Let this communicator fail, if it has not yet, and tell the others: in the next collective, not in one that
        they may still finish."""
        if self._failure is None and not self._closed:
            with self._turn:
                self._number += 1
                now = time.monotonic()
                self._mesh.begin(
                    CollectiveCall(
                        self._number, Operation(CollectiveDescription("barrier")), now, now + self._timeout_s
                    )
                )
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A collective failed here: no rank may take it for done."""
        self._failure = error
        self._algorithm.fail()
        self._mesh.abort(error)
        _log.debug("rank %d: %s", self.rank, error)

    def _check_usable(self) -> None:
        if self._closed:
            raise PhalanxError(f"the communicator of rank {self.rank} is closed; make a new one.")
        if self._failure is not None:
            # The same class, so that whoever runs into it late sees the cause, and the exit code tells it.
            raise self._failure

    def _operation(self, key: Hashable, describe: Callable[[], CollectiveDescription], nbytes: int = 0) -> Operation:
        operation = self._operations.get(key)
        if operation is None:
            operation = self._remember(key, Operation(describe(), nbytes=nbytes))
        return operation

    def _remember(self, key: Hashable, operation: Operation) -> Operation:
        self._operations[key] = operation
        if len(self._operations) > MAX_OPERATIONS:
            self._operations.popitem(last=False)
        return operation

    def _prepare(
        self,
        arrays: Sequence[Array],
        op: ReduceOp,
        scale: float | Sequence[float],
        out: Sequence[Array] | None,
    ) -> tuple[Operation, Reduction, list[Array]]:
        arrays = [native(array) for array in arrays]
        key = (op, *[(array.dtype, array.shape) for array in arrays])
        operation = self._operations.get(key)
        if operation is None:
            for array in arrays:
                check_reducible(array.dtype, op)
            operation = Operation(
                CollectiveDescription("all_reduce", f"op={op.value}", tuple(map(_describe, arrays))),
                group_by_dtype([array.dtype for array in arrays], [array.size for array in arrays]),
                nbytes=sum(array.nbytes for array in arrays),
            )
            self._remember(key, operation)
        results = _outputs("all_reduce", arrays, out)
        reduction = Reduction(
            operation.layouts,
            [array.ravel() for array in arrays],  # Copies those that are not contiguous.
            [array.ravel() for array in results],
            _scales(arrays, op, scale),
            op,
            self.world_size if op is ReduceOp.MEAN else 1,
        )
        return operation, reduction, results

    def _exchange_sizes(self, call: CollectiveCall, own: Sequence[int]) -> list[list[int]]:
        """Every rank's `own` (as many numbers on each), in rank order."""
        table = np.empty((self.world_size, len(own)), np.int64)
        mine = np.array(own, np.int64)
        self._algorithm.all_gather(call, [byte_view(mine)], [[byte_view(row)] for row in table])
        return [[int(number) for number in row] for row in table]

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ConfigurationError(f"root is {root}; the ranks are 0 to {self.world_size - 1}.")


def _scales(arrays: Sequence[Array], op: ReduceOp, scale: float | Sequence[float]) -> list[float]:
    if isinstance(scale, (int, float, np.number)):
        if scale == 1.0:
            return [1.0] * len(arrays)
        scales = [float(scale)] * len(arrays)
    else:
        scales = [float(factor) for factor in scale]
    if len(scales) != len(arrays):
        raise ConfigurationError(f"scale has {len(scales)} factors for {len(arrays)} arrays.")
    if op is not ReduceOp.SUM and any(factor != 1.0 for factor in scales):
        raise ConfigurationError(f"scale needs op SUM, not {op.name}.")
    return [
        factor if factor == 0.0 or is_float(array.dtype) else 1.0 for factor, array in zip(scales, arrays, strict=True)
    ]


def _outputs(name: str, arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
    if out is None:
        return [np.empty(array.shape, array.dtype) for array in arrays]
    if len(out) != len(arrays):
        raise ConfigurationError(f"{name} got {len(out)} arrays in out for {len(arrays)} inputs.")
    for index, (target, array) in enumerate(zip(out, arrays, strict=True)):
        if target.shape != array.shape or target.dtype != array.dtype:
            raise ConfigurationError(
                f"{name} got out[{index}] of {_describe(target)} for an input of {_describe(array)}; "
                f"they must be equal."
            )
        if not target.flags.carray:
            raise ConfigurationError(
                f"{name} got out[{index}] that is not contiguous or not writeable. Pass an array made with "
                f"np.empty, or none."
            )
    return list(out)


def native(array: Any) -> Array:
    """In this host's byte order: ranks compare dtypes by their names, and backends know no other order."""
    own: Array = np.asarray(array)
    return own if own.dtype.isnative else own.astype(own.dtype.newbyteorder("="))


def _check_plain(name: str, arrays: Sequence[Array]) -> None:
    for array in arrays:
        if array.dtype.hasobject:
            raise ConfigurationError(
                f"{name} got an array of Python objects; nothing is pickled between tasks. Use arrays of "
                f"numbers, or the _bytes methods."
            )


def _describe(array: Array, *, varying: bool = False) -> str:
    """Dtype and shape, for example `float32 (10, 4)`; with `varying` the first dimension is left open."""
    shape: Sequence[Any] = array.shape
    if varying and array.ndim:
        shape = ("*", *array.shape[1:])
    return f"{array.dtype.name} ({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
