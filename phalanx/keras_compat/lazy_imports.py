"""Defers imports of parts of Keras and JAX that few programs use until the program uses them.

`import keras` imports scikit-learn and Matplotlib if they are installed, for its wrappers and image galleries, and with
them half of SciPy. It also imports pandas, to recognize its tables among inputs. That takes longer than Keras itself,
in every worker of a job and after every restart.

Measured: CPU seconds of `import keras`, with all of these packages installed, mean of two runs on a busy machine

                                       jax    torch   tensorflow
    without this module                2.6    4.8     4.2
    DEFERRED                           1.2    3.4     3.4
    DEFERRED and without pandas        1.05   3.3     2.65

On JAX, `jax.experimental.sparse.linalg` alone is 0.13 s of it.

Puts a finder in `sys.meta_path`. This module imports neither Keras nor JAX. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Sequence
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
LARGE = frozenset({"jax", "keras", "tensorflow", "torch"})
"""Libraries whose import takes seconds."""
PANDAS_IMPORTER = "keras.src.trainers.data_adapters.array_slicing"
"""The module that imports pandas only to test whether objects are instances of its classes."""


class _PandasPlaceholder(type):
    """Placeholder for the pandas class of this name. Until pandas is imported, no object is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        pandas = sys.modules.get("pandas")
        return pandas is not None and isinstance(instance, getattr(pandas, cls.__name__))


_pandas = ModuleType("pandas", "Stands for pandas in a module that only tests for its classes.")
_pandas.__dict__.update({name: _PandasPlaceholder(name, (), {}) for name in ("DataFrame", "Series")})


def _import(name: str, *rest: Any) -> Any:
    return _pandas if name == "pandas" else builtins.__import__(name, *rest)


class _PandasFreeLoader(Loader):
    """Executes a module in which `import pandas` costs nothing."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # `import` calls the `__import__` of the module's own built-ins, so no other module is affected.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        self._loader.exec_module(module)


class _Finder:
    """See `importlib.abc.MetaPathFinder`.

    Args:
        on_import: See `install`.
    """

    def __init__(self, on_import: Callable[[str | None], object] | None):
        self._on_import = on_import
        self._is_importing = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in LARGE and self._on_import is not None and not self._is_importing:
            return self._announced(PathFinder.find_spec(name, path, target))
        if name not in DEFERRED and name != PANDAS_IMPORTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader) if name in DEFERRED else _PandasFreeLoader(spec.loader)
        return spec

    def _announced(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        """Report the import of a module. The modules that it imports in turn are part of it."""
        if spec is None or spec.loader is None:
            return spec
        # The loader itself is kept: programs and libraries read sources and data files through it.
        loader, execute, on_import = spec.loader, spec.loader.exec_module, self._on_import
        assert on_import is not None

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[method-assign]
            self._is_importing = True
            on_import(spec.name)
            try:
                execute(module)
            finally:
                self._is_importing = False
                on_import(None)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(on_import: Callable[[str | None], object] | None = None) -> None:
    """Defer the imports from now on, in this process.

    Args:
        on_import: Called with the name of a large library when its import begins, and with None when it has ended.
    """
    sys.meta_path.insert(0, _Finder(on_import))
