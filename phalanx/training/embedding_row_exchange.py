"""The rows of tables that one worker has been sent, asks for, and has gradients of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.parameter_server.client import ParameterServerClient
from phalanx.parameter_server.placed_variables import PlacedVariables
from phalanx.parameter_server.server_messages import PullRows, PullTables, Ticket, Values, arrays_of
from phalanx.parameter_server.shard_placement import Shard
from phalanx.parameter_server.table_rows import NUMBER, TableRows, of_shard

Array = np.ndarray[Any, Any]
Numbers = Sequence[Array]
"""For each table the numbers of rows, ascending, each once."""


class EmbeddingRowExchange:
    """Used for one `fit`. Row numbers and rows are lists with an array for each table, in the order of the tables."""

    def __init__(self, client: ParameterServerClient, fit: int, placed: PlacedVariables):
        self._client = client
        self._fit = fit
        self._placed = placed
        self._step: Numbers = ()
        self._next: tuple[int, Numbers] | None = None  # serial of the ticket, and what its step will need
        self._asked: int | None = None
        self._came: dict[int, list[Array]] = {}

    # Rows for a step.

    def prefetch(self, ticket: Ticket, numbers: Numbers) -> None:
        """The step of this ticket, the next one, will need these rows: ask for them along with the gradients."""
        self._next = (ticket.serial, numbers)

    def begin(self, ticket: Ticket, numbers: Numbers) -> list[Array]:
        """The rows that the step of this ticket needs, which begins now."""
        self._step = numbers
        came = self._came.pop(ticket.serial, None)
        self._came.clear()
        return self._pull(numbers) if came is None else came

    # What goes along with a step's gradients.

    def with_rows(self, gradients: Sequence[Array]) -> list[Array | TableRows]:
        """The gradients, of tables only the rows of the step."""
        result: list[Array | TableRows] = list(gradients)
        for table, numbers in zip(self._placed.tables, self._step, strict=True):
            result[table] = TableRows(numbers, gradients[table][: len(numbers)])
        self._asked = None
        return result

    def wanted(self, server: int) -> list[Array]:
        """The numbers of the rows that the next step needs of this server; none if that is not known yet."""
        if self._next is None:
            return []
        self._asked = self._next[0]
        return self._numbers_on(server, self._next[1])

    def receive(self, parts: Sequence[Sequence[Array]]) -> None:
        """Rows that came with the answers to gradients."""
        serial, self._asked, self._next = self._asked, None, None
        complete = all(
            len(part) == len(shards) for part, shards in zip(parts, self._placed.tables_of_server, strict=True)
        )
        if serial is not None and complete:
            self._came[serial] = self._placed.join_tables(parts)

    # Questions of their own.

    def pull_tables(self) -> list[Array]:
        """The tables, whole."""
        return self._ask([PullTables(self._fit)] * self._client.num_servers, [()] * self._client.num_servers)

    def _pull(self, numbers: Numbers) -> list[Array]:
        buffers = [self._numbers_on(server, numbers) for server in range(self._client.num_servers)]
        return self._ask([PullRows(self._fit)] * self._client.num_servers, buffers)

    def _ask(self, questions: Sequence[PullRows | PullTables], buffers: Sequence[Sequence[Array]]) -> list[Array]:
        """Ask the servers that have tables."""
        asked = [server for server, shards in enumerate(self._placed.tables_of_server) if shards]
        for server in asked:
            self._client.send(server, questions[server], buffers[server])
        parts: list[list[Array]] = [[] for _ in questions]
        for server, (answer, received) in zip(asked, self._client.receive_all(asked), strict=True):
            assert isinstance(answer, Values)
            parts[server] = arrays_of(received, answer.dtypes)
        return self._placed.join_tables(parts)

    def _numbers_on(self, server: int, numbers: Numbers) -> list[Array]:
        by_table = dict(zip(self._placed.tables, numbers, strict=True))
        return [_numbers_in(shard, by_table[shard.variable]) for shard in self._placed.tables_of_server[server]]


def _numbers_in(shard: Shard, numbers: Array) -> Array:
    """The numbers that lie in the shard, counted from its beginning."""
    return numbers[of_shard(numbers, shard)] - NUMBER.type(shard.start)
