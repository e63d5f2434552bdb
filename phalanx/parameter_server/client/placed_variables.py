"""The variables of a model as they are placed on the servers: cuts arrays into shards, and joins them again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from phalanx.parameter_server.shard_packing import Kind, ShardPacking
from phalanx.parameter_server.shard_placement import PlacedVariable, Shard, rows_of_shard, shard_shape
from phalanx.parameter_server.table_rows import TableRows, rows_in_shard

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
        shards_by_server: The shards of each server. `dense_shards_by_server` excludes tables; `table_shards_by_server`
            has only tables.
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
        self.shards_by_server = by_server = [
            tuple(s for s in shards if s.server == server) for server in range(servers)
        ]
        self.dense_shards_by_server = [tuple(s for s in own if s.variable not in tables) for own in by_server]
        self.table_shards_by_server = [tuple(s for s in own if s.variable in tables) for own in by_server]
        self.groups = [self._grouped(*each) for each in zip_longest(by_server, groups)]
        self._dense = _places(self.dense_shards_by_server, len(variables))
        self._rows = _places(self.table_shards_by_server, len(variables))

    def _grouped(self, own: Sequence[Shard], groups: Sequence[tuple[int, ...]] | None) -> ShardPacking:
        kinds = [self.kind(shard) for shard in own]
        tables = [number for number, shard in enumerate(own) if shard.variable in self.tables]
        apart = [(n,) for n in range(len(own)) if n not in tables]
        return ShardPacking(kinds, apart if groups is None else groups, tables)

    def kind(self, shard: Shard) -> Kind:
        variable = self.variables[shard.variable]
        return shard_shape(variable, shard), np.dtype(variable.dtype)

    def split_into_shards(self, arrays: Sequence[Array | None], server: int) -> list[Array]:
        """A server's shards of the variables' arrays, in the server's order; variables that are None are omitted."""
        parts = [(arrays[shard.variable], shard) for shard in self.shards_by_server[server]]
        return [rows_of_shard(whole, shard) for whole, shard in parts if whole is not None]

    def split_tables(self, arrays: Sequence[Array | TableRows], server: int) -> list[TableRows]:
        """The rows of tables that a server keeps."""
        parts = []
        for shard in self.table_shards_by_server[server]:
            whole = arrays[shard.variable]
            assert isinstance(whole, TableRows)
            parts.append(rows_in_shard(whole, shard))
        return parts

    def merge_shards(self, parts: Sequence[Sequence[Array]]) -> list[Array | None]:
        """The variables' arrays from the shards of all servers; None for tables."""
        return [_merged([parts[server][n] for server, n in places]) if places else None for places in self._dense]

    def merge_tables(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """The rows that the servers sent, for each table; the parts may be flat."""
        return [
            _merged([parts[server][n].reshape(-1, *self.variables[table].shape[1:]) for server, n in self._rows[table]])
            for table in self.tables
        ]


def _places(of_server: Sequence[Sequence[Shard]], variables: int) -> list[list[tuple[int, int]]]:
    """For each variable's shards in order: number of the server, and position among the arrays that it sends."""
    places: list[list[tuple[int, int, int]]] = [[] for _ in range(variables)]
    for server, shards in enumerate(of_server):
        for number, shard in enumerate(shards):
            places[shard.variable].append((shard.start, server, number))
    return [[(server, number) for _, server, number in sorted(own)] for own in places]


def _merged(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
