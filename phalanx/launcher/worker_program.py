"""The program that a worker runs, and the command line that runs the current program again."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigurationError

# Options of the interpreter that take their value from the next argument if it is not attached.
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program: the part of a command line after `python`.

    Attributes:
        arguments: `("train.py", "--lr", "1")`, `("-m", "module", ...)` or `("-c", "code", ...)`.
        interpreter: Options of the interpreter, such as `-O` or `-X dev`.
    """

    arguments: tuple[str, ...]
    interpreter: tuple[str, ...] = ()


def parse_command(command: Sequence[str]) -> Program | None:
    """The program in an interpreter's command line (`sys.orig_argv`); None for an interactive session."""
    options: list[str] = []
    rest = list(command[1:])
    while rest:
        argument = rest.pop(0)
        if argument in ("-", "-i"):
            return None
        if argument == "--":
            return Program(tuple(rest), tuple(options)) if rest else None
        if not argument.startswith("-"):
            return Program((argument, *rest), tuple(options))
        if argument.startswith("--"):
            options.append(argument)
            if argument in _OPTIONS_WITH_VALUE and rest:
                options.append(rest.pop(0))
            continue
        # Short options may be combined: -Bc CODE, -OOmmodule.
        for position, letter in enumerate(argument[1:], start=1):
            if letter in "cm":
                if position > 1:
                    options.append(argument[:position])
                target = [argument[position + 1 :]] if argument[position + 1 :] else []
                return Program((f"-{letter}", *target, *rest), tuple(options))
            if letter in "WX":
                options.append(argument)
                if position == len(argument) - 1 and rest:
                    options.append(rest.pop(0))
                break
        else:
            options.append(argument)
    return None


def runs_tests(program: Program) -> bool:
    """Whether this program is a test runner, or one of the processes that pytest-xdist starts.

    >>> runs_tests(Program(("-m", "pytest", "tests")))
    True
    """
    kind, *rest = program.arguments
    if kind == "-m":
        return rest[:1] in (["pytest"], ["unittest"])
    if kind == "-c":
        return "execnet" in "".join(rest[:1])
    return Path(kind).name in ("pytest", "py.test")


def starting_folder(program: Program) -> str | None:
    """The directory where this process's program was started, even if it has changed since; None if unknown."""
    script = program.arguments[0]
    file: str | None = getattr(sys.modules["__main__"], "__file__", None)  # Python makes a relative path absolute
    if file is None or script.startswith("-") or Path(script).is_absolute():
        return None
    for ending in (f"/{script}", f"/{script}/__main__.py"):
        if file.endswith(ending):
            return file.removesuffix(ending) or "/"
    return None


def check_script(script: str) -> None:
    """Check that workers can run this script, before any is started.

    Raises: ConfigurationError saying what to write instead.
    """
    path = Path(script)
    if path.is_file() or (path.is_dir() and (path / "__main__.py").is_file()):
        return
    if path.is_dir():
        raise ConfigurationError(f"{script} is a folder without __main__.py. Name the script to run.")
    if re.fullmatch(r"python[\d.]*", path.name):
        raise ConfigurationError(f"Leave out {script!r}: `phalanx run` starts the script with the Python that it has.")
    raise ConfigurationError(
        f"There is no script {script} (looked in {Path.cwd()}). "
        f"Name an existing file, or put -m before the name of a module."
    )
