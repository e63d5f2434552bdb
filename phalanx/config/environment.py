"""The only place that accesses this process's environment.

Functions that read variables take a mapping, so that tests need no real environment; their default is
`process_environment()`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path


def process_environment() -> MutableMapping[str, str]:
    """Return the live environment of this process. Child processes inherit what is written to it."""
    return os.environ


def set_variables(variables: Mapping[str, str], *, overwrite: bool = True) -> None:
    """Set variables for this process and its children.

    Args:
        variables: Values by name.
        overwrite: Whether to replace values that the user has set.
    """
    for name, value in variables.items():
        if overwrite or name not in os.environ:
            os.environ[name] = value


@contextmanager
def temporary_variables() -> Iterator[None]:
    """Context manager that restores the environment on exit."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def user_cache_directory() -> Path:
    """Directory in which Phalanx keeps files of this user between jobs; may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"


def allows_color() -> bool:
    """Whether the user allows colors (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
