"""Sums in one fixed binary tree, independent of how the summands are divided among processes.

Summand i is a leaf of a tree whose nodes are (level, index): node (l, k) is the sum of nodes (l - 1, 2 k) and
(l - 1, 2 k + 1), and (0, i) is summand i. Floating-point addition is not associative, but each node is the sum of the
same two nodes for any division of the summands. A process that has summands `start` to `stop` computes all nodes in
this range; a process that receives the largest of these nodes from all processes computes the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class TreeSum:
    """Sums lists of arrays, which must be added in the order of their indices. Modifies the arrays in place.

    Args:
        operations: Operations that combine two arrays, for the first arrays of a list; `np.add` for the others.
    """

    def __init__(self, operations: Sequence[np.ufunc] = ()) -> None:
        self._operations = operations
        # (level, index, arrays), in the order of their summands. Two children of a node are never both here: `add`
        # replaces them by their parent.
        self._nodes: list[tuple[int, int, list[Array]]] = []

    def add(self, index: int, arrays: Sequence[Array], level: int = 0) -> None:
        """Add a node: a summand, or a sum of several that another `TreeSum` has computed."""
        total = list(arrays)
        # An odd node is a right child. If its sibling is here, their sum may in turn be a right child.
        while self._nodes and index % 2 and self._nodes[-1][:2] == (level, index - 1):
            _, _, left = self._nodes.pop()
            total = self._sum(left, total)
            level, index = level + 1, index // 2
        self._nodes.append((level, index, total))

    def nodes(self) -> list[list[Array]]:
        """The largest nodes so far: the `nodes_between` the first summand and the last."""
        return [arrays for _, _, arrays in self._nodes]

    def total(self) -> list[Array]:
        """The sum of all summands; only callable once. The small nodes at the end, if any, are added first."""
        *rest, total = self.nodes()
        while rest:
            total = self._sum(rest.pop(), total)
        return total

    def _sum(self, left: list[Array], right: list[Array]) -> list[Array]:
        with np.errstate(all="ignore"):  # an overflow shows in the sum
            operations = itertools.chain(self._operations, itertools.repeat(np.add))
            return [operation(a, b, out=a) for operation, a, b in zip(operations, left, right, strict=False)]


def nodes_between(start: int, stop: int) -> list[tuple[int, int]]:
    """The largest nodes, (level, index), between two summands.

    >>> nodes_between(5, 12)
    [(0, 5), (1, 3), (2, 2)]
    """
    found = []
    while start < stop:
        level = (stop - start).bit_length() - 1  # the largest that fits
        if start:  # and begins at a multiple of its size
            level = min(level, (start & -start).bit_length() - 1)
        found.append((level, start >> level))
        start += 1 << level
    return found
