"""Embeddings for which a worker trains, sends and receives only the rows that a batch uses."""

from phalanx.training.sparse_embeddings.compact_tables import SparseEmbeddings
from phalanx.training.sparse_embeddings.row_exchange import EmbeddingRowExchange
from phalanx.training.sparse_embeddings.table_selection import EmbeddingTable, find_tables, select_tables

__all__ = ["EmbeddingRowExchange", "EmbeddingTable", "SparseEmbeddings", "find_tables", "select_tables"]
