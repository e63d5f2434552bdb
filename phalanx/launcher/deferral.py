"""Parts of Keras and JAX that hardly a training uses are imported when the program first uses them.

`import keras` imports scikit-learn and Matplotlib where they are installed, for its wrappers and galleries of pictures,
and with them half of SciPy. That takes longer than Keras itself, in every worker of a job and in each that is started
again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

DEFERRED = frozenset(
    {
        "keras.src.visualization",
        "keras.visualization",
        "keras.wrappers",
        "keras._tf_keras.keras.visualization",
        "keras._tf_keras.keras.wrappers",
        "jax.experimental.sparse.linalg",
    }
)


class _Finder:
    """See `importlib.abc.MetaPathFinder`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def install() -> None:
    """From now on, in this process."""
    sys.meta_path.insert(0, _Finder)
