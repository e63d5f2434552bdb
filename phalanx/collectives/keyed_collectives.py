"""Collectives over named arrays. Ranks may have different names."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from phalanx.collectives.communicator import Array, Communicator
from phalanx.transport.decoding import decode_message

Named = Mapping[str, Array]


def broadcast_named(communicator: Communicator, arrays: Named, root: int = 0) -> dict[str, Array]:
    """Return the arrays of rank `root` on every rank. All ranks must call this."""
    described = _decoded(communicator.broadcast_bytes(_described(arrays), root))
    if not described:
        return {}
    is_root = communicator.rank == root
    own = [arrays[name] if is_root else np.empty(shape, dtype) for name, (shape, dtype) in described.items()]
    return dict(zip(described, communicator.broadcast(own, root), strict=True))


def sum_named(communicator: Communicator, arrays: Named) -> dict[str, Array]:
    """Sum the arrays of each name over all ranks. Arrays of one name must have the same shape and dtype. All ranks must
    call this."""
    described: dict[str, tuple[tuple[int, ...], str]] = {}
    for content in communicator.all_gather_bytes(_described(arrays)):
        described |= _decoded(content)
    if not described:
        return {}
    own = [arrays.get(name, np.zeros(shape, dtype)) for name, (shape, dtype) in described.items()]
    return dict(zip(described, communicator.all_reduce(own), strict=True))


def _described(arrays: Named) -> bytes:
    return msgspec.msgpack.encode({name: (array.shape, array.dtype.name) for name, array in sorted(arrays.items())})


def _decoded(content: bytes) -> dict[str, tuple[tuple[int, ...], str]]:
    return decode_message(content, dict[str, tuple[tuple[int, ...], str]])
