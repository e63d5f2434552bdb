"""The last words of a worker: the error that ended it, in a file that only its launcher sees."""

from __future__ import annotations

import os
import traceback

import msgspec

from phalanx.errors import PeerLostError
from phalanx.launcher import exit_codes

# A traceback is shown on one page; an error that holds a whole array in its message is cut.
MAX_TRACEBACK_CHARACTERS = 60_000
MAX_MESSAGE_CHARACTERS = 4_000


class ErrorWords(msgspec.Struct, frozen=True):
    """An uncaught error.

    Attributes:
        kind: name of its class.
        message: what it said.
        traceback: as Python prints it, chained errors included.
        lost: the task that a PeerLostError names.
    """

    kind: str
    message: str
    traceback: str
    lost: str | None = None


def of_error(error: BaseException) -> ErrorWords:
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        half = MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n... ({len(text) - 2 * half} characters left out)\n{text[-half:]}"
    return ErrorWords(
        kind=type(error).__name__,
        message=str(error)[:MAX_MESSAGE_CHARACTERS],
        traceback=text,
        lost=_lost_task(error),
    )


def write(fd: int, words: ErrorWords) -> None:
    os.pwrite(fd, msgspec.json.encode(words), 0)


def parse(content: bytes) -> ErrorWords | None:
    """The words in a file's content; None if there are none or the worker died while writing them."""
    try:
        return msgspec.json.decode(content, type=ErrorWords)
    except msgspec.DecodeError:
        return None


def _lost_task(error: BaseException | None) -> str | None:
    return next((cause.task for cause in exit_codes.causes(error) if isinstance(cause, PeerLostError)), None)
