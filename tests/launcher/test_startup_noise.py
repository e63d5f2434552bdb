"""Which lines of a backend's start-up are left out."""

from __future__ import annotations

import io

import pytest

from phalanx.monitoring.console import Console
from phalanx.monitoring.startup_noise import StartupNoiseFilter

NOISE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1795758161.032386   13764 port.cc:153] oneDNN custom operations are on.\n"
)
TEXT = (
    f"before\n{NOISE}Input sharding: DATA\nI am not noise\nWARNING: mine\nE0000 00:00:17.1 1 cuda.cc:1] failed\nEpoch 1"
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_noise_is_left_out_however_the_text_is_cut(size: int) -> None:
    noise = StartupNoiseFilter()
    pieces = [noise.feed(TEXT[i : i + size]) for i in range(0, len(TEXT), size)]
    assert "".join(pieces) + noise.finish() == TEXT.replace(NOISE, "")


def test_what_ends_in_the_middle_of_a_line_is_shown_at_once_unless_it_may_be_noise() -> None:
    noise = StartupNoiseFilter()
    assert noise.feed("1/2\r") == "1/2\r"
    assert noise.feed("I0000 00:00: in the middle of a line\nI00") == "I0000 00:00: in the middle of a line\n"
    assert noise.feed("x") == "I00x"
    assert StartupNoiseFilter().finish() == ""


def test_the_console_hides_it_and_the_log_has_it() -> None:
    shown, log = io.StringIO(), io.BytesIO()
    console = Console(["worker/0"], shown, shown, logs=[log], quiet=True)
    console.feed(0, False, NOISE.encode() + b"W")
    console.finish(0)
    assert shown.getvalue() == "[worker/0] W\n"
    assert log.getvalue() == NOISE.encode() + b"W\n"
    loud = Console(["worker/0"], shown, shown)
    loud.feed(0, False, NOISE.encode())
    assert "InitializeLog" in shown.getvalue()
