"""The communicator of an elastic job: runs each collective in the current generation of an `ElasticGroup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.cluster.membership import Membership
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.host.collective_thread import PendingHandle
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.elastic.elastic_group import ElasticGroup, copy_result
from phalanx.runtime.traffic_account import Traffic


class ElasticCommunicator:
    """Implements `communicator.Communicator`. In addition, if the members change, all of them raise
    `MembershipChangedError` at the same collective and can then call it again; see `elastic_group`.

    The caller must not modify `out` until the next collective is over: another member may still need its content, and a
    copy would cost a pass over all gradients in each step.

    Attributes:
        group: This process's participation in the generations of the job.
    """

    def __init__(self, group: ElasticGroup):
        self.group = group

    @property
    def membership(self) -> Membership:
        return self.group.inner.membership

    @property
    def kind(self) -> str:
        return self.group.inner.kind

    @property
    def rank(self) -> int:
        return self.group.inner.rank

    @property
    def world_size(self) -> int:
        return self.group.inner.world_size

    @property
    def statistics(self) -> Traffic:
        """The sum over all generations; see `Communicator.statistics`."""
        return self.group.statistics

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        return self.group.run(
            lambda inner: inner.all_reduce(arrays, op, scale=scale, out=out), _copier_to(out), _kept_result(out)
        )

    def run_async(self, name: str, body: Callable[[], Any]) -> PendingHandle:
        """Run `body` synchronously, since a call that may have to be repeated cannot run in the background."""
        handle = PendingHandle(name)
        handle.finish(body())
        return handle

    # A rank may finish a broadcast before the others. The barrier keeps all within one collective.

    def broadcast(self, arrays: Sequence[Array], root: int = 0, *, out: Sequence[Array] | None = None) -> list[Array]:
        def call(inner: HostCommunicator) -> list[Array]:
            result = inner.broadcast(arrays, root, out=out)
            inner.barrier()
            return result

        return self.group.run(call, _copier_to(out), _kept_result(out))

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        def call(inner: HostCommunicator) -> bytes:
            result = inner.broadcast_bytes(payload, root)
            inner.barrier()
            return result

        return self.group.run(call)

    def all_gather(self, array: Array) -> list[Array]:
        return self.group.run(lambda inner: inner.all_gather(array))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return self.group.run(lambda inner: inner.all_gather_bytes(payload))

    def reduce_scatter(self, array: Array, op: ReduceOp = ReduceOp.SUM) -> Array:
        return self.group.run_with_barrier(lambda inner: inner.reduce_scatter(array, op))

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        return self.group.run_with_barrier(lambda inner: inner.all_to_all(arrays))

    def barrier(self, what: str = "", nbytes: int = 0) -> None:
        return self.group.run(lambda inner: inner.barrier(what, nbytes))

    def close(self) -> None:
        self.group.inner.close()


def _copier_to(out: Sequence[Array] | None) -> Callable[[list[Array]], list[Array]]:
    """Return a function that copies arrays handed over by another member into `out`."""

    def copy(result: list[Array]) -> list[Array]:
        if out is None:
            return copy_result(result)  # type: ignore[no-any-return]
        for target, array in zip(out, result, strict=True):
            target[...] = array
        return list(out)

    return copy


def _kept_result(out: Sequence[Array] | None) -> Callable[[list[Array]], list[Array]]:
    """Return a function that extracts the part of a result to keep for members that may lack it."""
    return copy_result if out is None else lambda result: result
