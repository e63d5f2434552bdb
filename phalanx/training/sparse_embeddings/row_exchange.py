"""Exchange of table rows, which a worker requests from the servers, and of their gradients, which it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.parameter_server.client.parameter_client import ParameterServerClient
from phalanx.parameter_server.client.placed_variables import PlacedVariables
from phalanx.parameter_server.server_messages import PullRows, PullTables, Ticket, Values, arrays_of
from phalanx.parameter_server.table_rows import TableRows, row_numbers_in_shard

Array = np.ndarray[Any, Any]
Numbers = Sequence[Array]
"""The distinct row numbers for each table, ascending."""


class EmbeddingRowExchange:
    """Exchange of rows during one `fit`. Row numbers and rows are lists with one array per table, in table order.

    Args:
        client: Connections to the servers.
        fit: Number of the `fit` call.
        placed: Placement of the tables' shards.
    """

    def __init__(self, client: ParameterServerClient, fit: int, placed: PlacedVariables):
        self._client = client
        self._fit = fit
        self._placed = placed
        self._step: Numbers = ()
        self._next: tuple[int, Numbers] | None = None  # serial of the next ticket, and the rows that its step needs
        self._requested: int | None = None  # serial of the ticket whose rows were requested with the gradients
        self._received: dict[int, list[Array]] = {}  # by serial of the ticket

    # Rows for a step.

    def prefetch(self, ticket: Ticket, numbers: Numbers) -> None:
        """Request, along with the gradients, the rows that the next step, with this ticket, needs."""
        self._next = (ticket.serial, numbers)

    def begin(self, ticket: Ticket, numbers: Numbers) -> list[Array]:
        """Begin the step of this ticket, and return the rows that it needs."""
        self._step = numbers
        received = self._received.pop(ticket.serial, None)
        # The rest is for a ticket that this worker has not used; its rows may be outdated at another step.
        self._received.clear()
        if received is not None:
            return received
        return self._request([(PullRows(self._fit), self._numbers_on(server, numbers)) for server in self._servers()])

    def pull_tables(self) -> list[Array]:
        """Return the tables, with all rows."""
        return self._request([(PullTables(self._fit), ()) for _ in self._servers()])

    # Data sent with a step's gradients.

    def with_rows(self, gradients: Sequence[Array]) -> list[Array | TableRows]:
        """Return the gradients; for tables, only those of the step's rows."""
        result: list[Array | TableRows] = list(gradients)
        for table, numbers in zip(self._placed.tables, self._step, strict=True):
            result[table] = TableRows(numbers, gradients[table][: len(numbers)])
        self._requested = None
        return result

    def wanted(self, server: int) -> list[Array]:
        """Return the row numbers that the next step needs from this server; empty if they are not known yet."""
        if self._next is None:
            return []
        self._requested = self._next[0]
        return self._numbers_on(server, self._next[1])

    def receive(self, parts: Sequence[Sequence[Array]]) -> None:
        """Store the rows that came with the responses to gradients, by server."""
        serial, self._requested, self._next = self._requested, None, None
        is_complete = all(
            len(part) == len(shards) for part, shards in zip(parts, self._placed.table_shards_by_server, strict=True)
        )
        # Otherwise not every server has responded with rows: `begin` will request them.
        if serial is not None and is_complete:
            self._received[serial] = self._placed.merge_tables(parts)

    def _servers(self) -> list[int]:
        """Return the servers that have tables."""
        return [server for server, shards in enumerate(self._placed.table_shards_by_server) if shards]

    def _request(self, requests: Sequence[tuple[PullRows | PullTables, Sequence[Array]]]) -> list[Array]:
        """Send a request to each of these servers, and join their responses."""
        servers = self._servers()
        for server, (request, buffers) in zip(servers, requests, strict=True):
            self._client.send(server, request, buffers)
        parts: list[list[Array]] = [[] for _ in self._placed.table_shards_by_server]
        for server, (response, received) in zip(servers, self._client.receive_all(servers), strict=True):
            assert isinstance(response, Values)
            parts[server] = arrays_of(received, response.dtypes)
        return self._placed.merge_tables(parts)

    def _numbers_on(self, server: int, numbers: Numbers) -> list[Array]:
        """Return the numbers of a server's rows, counted from the beginning of each shard."""
        by_table = dict(zip(self._placed.tables, numbers, strict=True))
        shards = self._placed.table_shards_by_server[server]
        return [row_numbers_in_shard(by_table[shard.variable], shard) for shard in shards]
