"""Collectives over host memory: shared memory within a host, links between hosts."""
