"""Parts of Keras and JAX that hardly a training uses are imported when the program first uses them.

`import keras` imports scikit-learn and Matplotlib where they are installed, for its wrappers and galleries of pictures,
and with them half of SciPy; and pandas, to tell its tables from other inputs. That takes longer than Keras itself, in
every worker of a job and in each that is started again.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType
from typing import Any

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
ASKS_FOR_PANDAS = "keras.src.trainers.data_adapters.array_slicing"
"""It imports pandas, and asks nothing but whether objects are of its classes."""


class _OfPandas(type):
    """The class of this name in pandas. Without pandas no object is of it."""

    def __instancecheck__(cls, instance: object) -> bool:
        pandas = sys.modules.get("pandas")
        return pandas is not None and isinstance(instance, getattr(pandas, cls.__name__))


_pandas = ModuleType("pandas", "In the place of pandas, for who only asks for its classes.")
_pandas.__dict__.update({name: _OfPandas(name, (), {}) for name in ("DataFrame", "Series")})


def _import(name: str, *rest: Any) -> Any:
    return _pandas if name == "pandas" else builtins.__import__(name, *rest)


class _WithoutPandas(Loader):
    """Executes a module for which `import pandas` is free."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What a module imports goes by its own built-in functions; no other module is concerned.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        self._loader.exec_module(module)


class _Finder:
    """See `importlib.abc.MetaPathFinder`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in DEFERRED and name != ASKS_FOR_PANDAS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader) if name in DEFERRED else _WithoutPandas(spec.loader)
        return spec


def install() -> None:
    """From now on, in this process."""
    sys.meta_path.insert(0, _Finder)
