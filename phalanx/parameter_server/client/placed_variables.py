"""The variables of a model as they are placed on the servers: cuts arrays into shards, and joins them again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from phalanx.parameter_server.shard_packing import Kind, ShardPacking
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard, rows, shard_shape
from phalanx.parameter_server.table_rows import TableRows, cut

Array = np.ndarray[Any, Any]


class PlacedVariables:
    """Placement of each variable's shards.

    Args:
        variables: The trainable variables, in the model's order.
        shards: The shards of all servers.
        servers: Number of servers.
        tables: Numbers of the variables that are sent by rows.
        groups: Numbers of the shards that are sent as one vector, for each server; empty: each shard separately.

    Attributes:
        of_server: The shards of each server; `dense_of_server` excludes tables, `tables_of_server` has only tables.
        groups: Packing of the shards of each server.
    """

    def __init__(
        self,
        variables: Sequence[PlacedVariable],
        shards: Sequence[Shard],
        servers: int,
        tables: Sequence[int] = (),
        groups: Sequence[Sequence[tuple[int, ...]]] = (),
    ):
        self.variables = tuple(variables)
        self.shards = tuple(shards)
        self.tables = tuple(tables)
        self.of_server = [tuple(s for s in shards if s.server == server) for server in range(servers)]
        self.dense_of_server = [tuple(s for s in own if s.variable not in tables) for own in self.of_server]
        self.tables_of_server = [tuple(s for s in own if s.variable in tables) for own in self.of_server]
        self.groups = [self._grouped(*each) for each in zip_longest(self.of_server, groups)]
        self._dense = _places(self.dense_of_server, len(variables))
        self._rows = _places(self.tables_of_server, len(variables))

    def _grouped(self, own: Sequence[Shard], groups: Sequence[tuple[int, ...]] | None) -> ShardPacking:
        kinds = [self.kind(shard) for shard in own]
        tables = [number for number, shard in enumerate(own) if shard.variable in self.tables]
        apart = [(n,) for n in range(len(own)) if n not in tables]
        return ShardPacking(kinds, apart if groups is None else groups, tables)

    def kind(self, shard: Shard) -> Kind:
        variable = self.variables[shard.variable]
        return shard_shape(variable, shard), np.dtype(variable.dtype)

    def cut(self, arrays: Sequence[Array | None], server: int) -> list[Array]:
        """A server's shards of the variables' arrays, in the server's order; variables that are None are omitted."""
        parts = [(arrays[shard.variable], shard) for shard in self.of_server[server]]
        return [rows(whole, shard) for whole, shard in parts if whole is not None]

    def cut_tables(self, arrays: Sequence[Array | TableRows], server: int) -> list[TableRows]:
        """The rows of tables that a server keeps."""
        parts = []
        for shard in self.tables_of_server[server]:
            whole = arrays[shard.variable]
            assert isinstance(whole, TableRows)
            parts.append(cut(whole, shard))
        return parts

    def join(self, parts: Sequence[Sequence[Array]]) -> list[Array | None]:
        """The variables' arrays from the shards of all servers; None for tables."""
        return [_joined([parts[server][n] for server, n in places]) if places else None for places in self._dense]

    def join_tables(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """The rows that the servers sent, for each table; the parts may be flat."""
        return [
            _joined([parts[server][n].reshape(-1, *self.variables[table].shape[1:]) for server, n in self._rows[table]])
            for table in self.tables
        ]


def _places(of_server: Sequence[Sequence[Shard]], variables: int) -> list[list[tuple[int, int]]]:
    """For each variable's shards in order: number of the server, and position among the arrays that it sends."""
    places: list[list[tuple[int, int, int]]] = [[] for _ in range(variables)]
    for server, shards in enumerate(of_server):
        for number, shard in enumerate(shards):
            places[shard.variable].append((shard.start, server, number))
    return [[(server, number) for _, server, number in sorted(own)] for own in places]


def _joined(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
