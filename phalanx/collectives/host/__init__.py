"""Collectives over host memory: shared memory inside a host, links between hosts."""
