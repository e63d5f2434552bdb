"""Which classes and functions are the program's own, and not those of a library."""

from __future__ import annotations

import sys
from types import FunctionType


def is_of_program(defined: type | FunctionType) -> bool:
    """Whether a class or function is in a module of the program, and not of a library."""
    module = defined.__module__ or ""  # a function of a text that was compiled has none
    if module == "__main__":
        return True
    home = getattr(sys.modules.get(module), "__file__", None) or ""
    root = module.partition(".")[0]
    return bool(home) and "-packages" not in home and root not in sys.stdlib_module_names and root != "phalanx"
