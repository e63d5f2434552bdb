"""Readable tracebacks: the program's frames in full, and only the number of library frames.

  File "train.py", line 26, in <module>
    history = model.fit(x, y, callbacks=[Check()])
  ... 9 frames of phalanx and keras
  File "train.py", line 19, in check
    raise ValueError("the data of batch 5 is bad")
ValueError: the data of batch 5 is bad
"""

from __future__ import annotations

import itertools
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_PHALANX = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
PYTHON = "python"
# The files that TensorFlow generates from the program's functions. Its messages name the program's lines.
_AUTOGRAPH = "__autograph_generated_file"
# Added by JAX where it has removed its own frames.
_NOTE_OF_JAX = "JAX has removed its internal frames"
# Code of the program that is in no file: `python -c`, standard input, a notebook's cells.
_PROGRAM = ("<string>", "<stdin>", "<ipython")


def library_of(filename: str) -> str | None:
    """The library that a source file belongs to, such as `keras`; None for a file of the program."""
    if filename.startswith("<"):
        return None if filename.startswith(_PROGRAM) else PYTHON
    parts = Path(filename).parts
    if not parts:  # exec(compile(text, "", "exec"))
        return None
    if parts[-1].startswith(_AUTOGRAPH):
        return "tensorflow"
    for folder in _INSTALLED:
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    if filename.startswith(_PHALANX):
        return "phalanx"
    return PYTHON if filename.startswith(_STANDARD_LIBRARY) else None


def fold_frames(frames: Iterable[traceback.FrameSummary], program: str | None = None) -> list[str]:
    """Format frames, counting those of libraries.

    Args:
        frames: The frames, outermost first.
        program: A library that counts as the program.
    """
    lines = []
    owned = [(frame, library_of(frame.filename)) for frame in frames]
    for is_own, group in itertools.groupby(owned, lambda each: each[1] in (None, program)):
        if is_own:
            lines += [_show(frame) for frame, _ in group]
        else:
            libraries = [library or "" for _, library in group]
            *others, last = dict.fromkeys(libraries)
            names = f"{', '.join(others)} and {last}" if others else last
            lines.append(f"  ... {len(libraries)} frame{'s' * (len(libraries) > 1)} of {names}\n")
    return lines


def _show(frame: traceback.FrameSummary) -> str:
    line = f"    {frame.line}\n" if frame.line else ""
    return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n{line}'


class _FoldedStack(traceback.StackSummary):
    """The stack of one error in a chain, as the `traceback` module formats it."""

    program: str | None = None

    def format(self, **_: Any) -> list[str]:
        return fold_frames(self, self.program)


def format_folded(error: BaseException) -> str:
    """Format the traceback of an error, including its causes, with the frames of libraries folded."""
    whole = traceback.TracebackException.from_exception(error)
    program = _program(whole.stack)
    for each in _errors(whole):
        stack = _FoldedStack(each.stack)
        stack.program = program
        each.stack = stack
        each.__notes__ = [note for note in each.__notes__ or () if _NOTE_OF_JAX not in note]
    return "".join(whole.format())


def find_origin(error: BaseException) -> str:
    """The innermost line of the program's code in an error's traceback; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename and library_of(error.filename) is None:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    program = _program(frames)
    own = [frame for frame in frames if library_of(frame.filename) in (None, program)]
    if not own:
        return ""
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}"


def _program(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """The library that is the program: with `-m`, an installed one. None if the program has files outside libraries."""
    libraries = [library_of(frame.filename) for frame in frames]
    if None in libraries:
        return None
    return next((library for library in libraries if library not in (PYTHON, "phalanx")), None)


def _errors(error: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield the error, its causes and contexts, and the errors that it groups."""
    yield error
    for other in (error.__cause__, error.__context__, *(error.exceptions or ())):
        if other is not None:
            yield from _errors(other)
