"""Which classes and functions belong to the program, not to a library."""

from __future__ import annotations

import sys
from types import FunctionType


def is_of_program(defined: type | FunctionType) -> bool:
    """Whether a class or function is in a module of the program, not of a library."""
    module = defined.__module__ or ""  # a function compiled from text has none
    if module == "__main__":
        return True
    home = getattr(sys.modules.get(module), "__file__", None) or ""
    root = module.partition(".")[0]
    return bool(home) and "-packages" not in home and root not in sys.stdlib_module_names and root != "phalanx"
