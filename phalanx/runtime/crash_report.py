"""The error that ended a worker, in a file that only its launcher sees."""

from __future__ import annotations

import traceback

import msgspec

from phalanx.errors import FrameError, LinkTimeoutError, PeerLostError, PhalanxError
from phalanx.monitoring.console import without_escapes
from phalanx.runtime import exit_codes, folded_traceback
from phalanx.transport.decoding import decode_json

# A report is one page. Messages that contain a whole array are truncated.
MAX_TRACEBACK_CHARACTERS = 60_000
MAX_MESSAGE_CHARACTERS = 4_000


class CrashReport(msgspec.Struct, frozen=True):
    """An uncaught error, or an error that made the program exit.

    Attributes:
        kind: Name of its class.
        message: Message of the error.
        traceback: Traceback as printed by Python, including chained errors.
        lost: The task that a PeerLostError in the chain names.
        code: Exit code of the first error of Phalanx in the chain; 1 if there is none.
        interrupted: Whether an interrupt caused it.
        silent: The task that did not answer in time, which need not be lost.
        folded: The traceback without the frames of libraries.
        origin: The line of the program's code that the error came from; empty if there is none.
    """

    kind: str
    message: str
    traceback: str
    lost: str | None = None
    code: int = 1
    interrupted: bool = False
    silent: str | None = None
    folded: str = ""
    origin: str = ""


def build_report(error: BaseException) -> CrashReport:
    text = _bounded("".join(traceback.format_exception(error)))
    chain = list(exit_codes.causes(error, handled=True))
    return CrashReport(
        kind=type(error).__name__,
        message=without_escapes(exit_codes.message(error))[:MAX_MESSAGE_CHARACTERS],
        traceback=text,
        lost=next((each.task for each in chain if isinstance(each, PeerLostError)), None),
        silent=next((each.peer for each in chain if isinstance(each, LinkTimeoutError)), None),
        code=next((each.exit_code for each in chain if isinstance(each, PhalanxError)), 1),
        interrupted="KeyboardInterrupt" in text,  # libraries wrap it in their own errors
        folded=_bounded(folded_traceback.format_folded(error)),
        origin=_bounded(folded_traceback.find_origin(error)),
    )


def _bounded(text: str) -> str:
    text = without_escapes(exit_codes.sendable(text))  # Keras writes parts of its messages in bold
    if len(text) <= MAX_TRACEBACK_CHARACTERS:
        return text
    half = MAX_TRACEBACK_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out)\n{text[-half:]}"


def encode(report: CrashReport) -> bytes:
    return msgspec.json.encode(report)


def parse(content: bytes) -> CrashReport | None:
    """The report in a file's content; None if there is none or the worker died while writing it."""
    try:
        return decode_json(content, CrashReport)
    except FrameError:
        return None
