"""A worker's connection to the server that leads one group of shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.arrays import allocation
from phalanx.collectives.host.shared_segment import SegmentOffer
from phalanx.errors import LinkTimeoutError
from phalanx.parameter_server.server_messages import PushGradients, Request, Response, Values
from phalanx.parameter_server.shard_packing import Kind, nbytes_of
from phalanx.parameter_server.shared_memory_channel import SharedMemoryChannel, region_bytes
from phalanx.transport.decoding import Decoder
from phalanx.transport.link import Link

Array = np.ndarray[Any, Any]
RequestArrays = tuple[Request, Sequence[Array]]
"""A request and its arrays."""

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks of the links to other servers, while one server's response is awaited."""
MAX_BUFFER_SETS = 2
"""Number of buffer sets kept for a server without shared memory: steps that request something before they push
alternate between two."""

_RESPONSES = Decoder(Response)
_encode = msgspec.msgpack.Encoder().encode


class ServerConnection:
    """A connection with at most one request in flight.

    Args:
        group: Number of the shard group.
        link: Link to the server that leads it.
        leader: Number of that server.
        host: Identity of that server's host.

    Attributes:
        pending: The unanswered request; it is repeated if the link breaks.
        is_unreplicated: Whether the group's replica cannot take over.
        bytes_sent: Bytes of all requests, including those through shared memory.
        bytes_received: Bytes of all responses, likewise.
    """

    def __init__(self, group: int, link: Link, leader: int, host: str):
        self.group = group
        self.link = link
        self.leader = leader
        self.host = host
        self.pending: RequestArrays | None = None
        self.is_unreplicated = False
        self.bytes_sent = self.bytes_received = 0
        self.channel: SharedMemoryChannel | None = None  # from `share_memory` until the link breaks
        self._buffers: dict[tuple[Kind, ...], list[Array]] = {}  # results of `send_buffers`, by kinds

    def send_buffers(self, kinds: tuple[Kind, ...]) -> list[Array]:
        """See `ParameterServerClient.send_buffers`."""
        shared = self.channel.send_buffers(kinds) if self.channel is not None else None
        if shared is not None:
            return shared
        if kinds not in self._buffers:
            if len(self._buffers) >= MAX_BUFFER_SETS:
                self._buffers.clear()
            self._buffers[kinds] = [allocation.zeros_aligned(shape, dtype) for shape, dtype in kinds]
        return self._buffers[kinds]

    def send(self, request: Request, buffers: Sequence[Array], timeout_s: float) -> None:
        """Send a request; gradients in shared memory stay there."""
        channel = self.channel
        # Recognized by identity: only the last result of `send_buffers` is in shared memory. A push repeated after the
        # channel was closed is sent from the same arrays, over the link.
        if channel is not None and isinstance(request, PushGradients) and (lengths := channel.lengths_of(buffers)):
            request, buffers = msgspec.structs.replace(request, lengths=lengths), ()
            self.bytes_sent += sum(lengths)
        header, arrays = _encode(request), [np.ascontiguousarray(buffer) for buffer in buffers]
        self.bytes_sent += len(header) + sum(array.nbytes for array in arrays)
        self.link.send(header, arrays, deadline=time.monotonic() + timeout_s)

    def receive(
        self, timeout_s: float, check: Callable[[float], None] | None = None
    ) -> tuple[Response, list[memoryview]]:
        """The next response; `check` is called periodically with the number of seconds waited so far."""
        requested_at = time.monotonic()
        deadline = requested_at + timeout_s
        while True:
            until = min(deadline, time.monotonic() + CHECK_INTERVAL_S) if check else deadline
            try:
                header, buffers = self.link.receive(deadline=until)
                break
            except LinkTimeoutError:  # the link keeps what has arrived
                if check is None or until == deadline:
                    raise
                check(time.monotonic() - requested_at)
        self.bytes_received += len(header) + sum(buffer.nbytes for buffer in buffers)
        response = _RESPONSES.decode(header)
        if isinstance(response, Values):
            if self.pending is not None and isinstance(self.pending[0], PushGradients):  # other responses do not tell
                self.is_unreplicated = response.is_unreplicated
            if response.lengths:
                assert self.channel is not None, "the server writes to memory that it has mapped"
                self.bytes_received += sum(response.lengths)
                return response, self.channel.read(response.memory_region, response.lengths)
        return response, buffers

    def share_memory(self, host: str, kinds: Sequence[Kind], accepts: Callable[[SegmentOffer], bool]) -> None:
        """Send and receive arrays of these kinds through shared memory, if the server is on this host and `accepts`."""
        need = region_bytes([nbytes_of(kind) for kind in kinds])
        if self.host != host or (self.channel is not None and self.channel.region_bytes >= need):
            return
        self.channel = SharedMemoryChannel.offer(need, accepts) or self.channel

    def close_channel(self) -> None:
        """Stop using shared memory; the next `fit` offers new memory."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        """Safe to call twice."""
        self.link.close()
        self.close_channel()
