"""Transfer of a model's arrays to the servers and back: gradients are cut into shards, and values joined again.

Every copy matters here: gradients are copied once, to the buffers they are sent from, and values stay in the memory
where they were received.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.parameter_server.client.parameter_client import ParameterServerClient, ResponseArrays
from phalanx.parameter_server.client.placed_variables import PlacedVariables
from phalanx.parameter_server.server_messages import Values, arrays_of
from phalanx.parameter_server.shard_packing import Kind, kind_of
from phalanx.parameter_server.shard_placement import rows_of_shard
from phalanx.parameter_server.table_rows import TableRows

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class ShardTransfer:
    """Transfer of the shards during one `fit`.

    Args:
        client: Connections to the servers.
        placed: Placement of the variables' shards.
        wire: Dtype in which gradients are sent; None to keep theirs.

    Attributes:
        placed: See above.
        values: The variables' values as last received, None for tables; a new list whenever some are new.
        versions: Versions of the values, by server.
    """

    def __init__(self, client: ParameterServerClient, placed: PlacedVariables, wire: np.dtype[Any] | None):
        self._client = client
        self._wire = wire
        self.placed = placed
        self.values: list[Array | None] = []
        self.versions = [-1] * client.num_servers
        for server, groups in enumerate(placed.groups):
            of_tables = [placed.kind(shard) for shard in placed.table_shards_by_server[server]]
            client.share_memory(server, [*groups.kinds, *of_tables])
        # Kinds of the gradients sent to each server, tables excepted.
        self._kinds = [tuple(map(self._wire_kind, groups.kinds)) for groups in placed.groups]
        # Views of the shards in arrays that are reused from step to step, with these arrays: send buffers by server,
        # and received arrays by server and place.
        self._send_views: dict[int, tuple[Sequence[Array], list[Array]]] = {}
        self._receive_views: dict[tuple[int, int], tuple[Sequence[memoryview], list[Array]]] = {}

    def _wire_kind(self, kind: Kind) -> Kind:
        """Return the kind in which gradients of this kind are sent."""
        shape, dtype = kind
        return kind if self._wire is None or dtype.itemsize <= self._wire.itemsize else (shape, self._wire)

    def fill(
        self, server: int, gradients: Sequence[Array | TableRows], more: Sequence[Array]
    ) -> tuple[list[Array], int]:
        """Copy the arrays for a server to the buffers where they stay until it responds.

        Args:
            server: Number of the server.
            gradients: Gradients of all variables; empty if none are sent.
            more: Arrays that follow the server's part of the gradients.

        Returns: the arrays, and how many of them are gradients.
        """
        placed = self.placed
        parts = placed.split_tables(gradients, server) if placed.tables and gradients else []
        kinds = self._kinds[server] if gradients else ()
        of_tables = [kind for part in parts for kind in (kind_of(part.numbers), self._wire_kind(kind_of(part.values)))]
        buffers = self._client.send_buffers(server, (*kinds, *of_tables, *map(kind_of, more)))
        if gradients:
            views = self._send_views.get(server)
            # The client returns the same buffers as long as the kinds are the same; others mean a new channel or other
            # arrays.
            if views is None or views[0] is not buffers:
                views = self._send_views[server] = buffers, placed.groups[server].unpack(buffers[: len(kinds)])
            for view, shard in zip(views[1], placed.dense_shards_by_server[server], strict=True):
                gradient = gradients[shard.variable]
                assert not isinstance(gradient, TableRows), "of a table"
                np.copyto(view, rows_of_shard(gradient, shard), casting="unsafe")
        following = [*(array for part in parts for array in part), *more]
        for buffer, array in zip(buffers[len(kinds) :], following, strict=True):
            np.copyto(buffer, array, casting="unsafe")
        return buffers, len(kinds) + len(of_tables)

    def receive(self, responses: Sequence[ResponseArrays]) -> tuple[list[list[Array]], list[Array]]:
        """Store the values of the servers' responses; return the rows of tables by server, and the merged extras."""
        parts, rows, extras = [], [], []
        for server, (response, buffers) in enumerate(responses):
            assert isinstance(response, Values)
            if response.note:
                logger.warning("An update of this worker: %s.", response.note)
            if response.shards or not self.placed.dense_shards_by_server[server]:  # otherwise newer ones will follow
                self.versions[server] = response.version
            parts.append(self._shards_in(server, response, buffers) if response.shards else [])
            more = arrays_of(buffers[response.shards :], response.dtypes[response.shards :])
            rows.append(more[: response.rows])
            extras += more[response.rows :]
        self._keep(parts)
        return rows, extras

    def _shards_in(self, server: int, response: Values, buffers: Sequence[memoryview]) -> list[Array]:
        """Return the server's shards, tables excepted."""
        known = self._receive_views.get((server, response.memory_region))
        if known is None or known[0] is not buffers:
            arrays = arrays_of(buffers[: response.shards], response.dtypes[: response.shards])
            known = buffers, self.placed.groups[server].unpack(arrays)
            if response.lengths:
                self._receive_views[server, response.memory_region] = known
        return known[1]

    def _keep(self, parts: list[list[Array]]) -> None:
        placed = self.placed
        if all(len(part) == len(shards) for part, shards in zip(parts, placed.dense_shards_by_server, strict=True)):
            self.values = placed.merge_shards(parts)
        # A server may send none: it has nothing newer, or newer values will follow.
        elif any(parts):
            old = [placed.split_into_shards(self.values, server) for server in range(len(parts))]  # none for tables
            self.values = placed.merge_shards([part or before for part, before in zip(parts, old, strict=True)])

    def dense_versions(self) -> list[int]:
        """Return the versions of the values last received, from each server with shards that are not of tables."""
        return [v for v, shards in zip(self.versions, self.placed.dense_shards_by_server, strict=True) if shards]
