from __future__ import annotations

import errno
import io
import itertools
import os
import re
import select
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.monitoring.console import NOTEBOOK, Console, LineAssembler, LiveLine, width, write_whole
from tests.launcher.conftest import wait_until

BAR = "\x1b[1m 3/10\x1b[0m \x1b[32m━━━\x1b[0m - loss: 0.5"


def drawn(output: str) -> list[str]:
    """What a terminal shows after `output`: enough of one for what progress bars do."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|[^\x1b]", output):
        if token == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append([])
        elif token == "\r":
            column = 0
        elif token == "\b":
            column = max(0, column - 1)
        elif token == "\x1b[2K":
            rows[row] = []
        elif token == "\x1b[J":
            rows[row] = rows[row][:column]
            del rows[row + 1 :]
        elif token.endswith("A") and len(token) > 2:
            row -= int(token[2:-1] or 1)
        elif not token.startswith("\x1b"):
            rows[row] += [" "] * (column + 1 - len(rows[row]))
            rows[row][column] = token
            column += 1
    return ["".join(cells).rstrip() for cells in rows]


def screen(*, columns: int | None) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(["worker/0", "worker/1"], out, out, columns=columns), out


def test_a_line_is_complete_at_its_end() -> None:
    lines = LineAssembler()
    assert lines.feed("one\ntw") == ["one"]
    assert lines.feed("o\n\n") == ["two", ""]
    assert lines.finish() == []
    lines.feed("three")
    assert lines.finish() == ["three"]


def test_a_progress_bar_becomes_the_line_that_stays() -> None:
    assert LineAssembler().feed("\r1/3\b\b\b\r2/3\b\b\b\r3/3 done\n") == ["3/3 done"]
    assert LineAssembler().feed("text\r\n") == ["text"]


def test_a_line_without_end_is_cut_also_after_a_carriage_return() -> None:
    lines = LineAssembler()
    lines = LineAssembler()
    lines.feed("\r")
    shown = [line for _ in range(300) for line in lines.feed(65536 * "x")]
    assert sum(map(len, [*shown, *lines.finish()])) == 300 * 65536
    assert len(shown) > 1


@given(st.text(alphabet="ab\r\n\b\x1b[mK ", max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_where_the_pieces_are_cut_does_not_matter_to_lines(text: str, cuts: list[int]) -> None:
    whole, pieces = LineAssembler(), LineAssembler()
    bounds = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert whole.feed(text) + whole.finish() == [
        *(line for part in parts for line in pieces.feed(part)),
        *pieces.finish(),
    ]


@given(st.lists(st.sampled_from(["text", "\r", "\n", "\x1b[1m", "\x1b[2K", "\x1b[?25l", "é"]), max_size=12))
def test_where_the_pieces_are_cut_does_not_matter_to_the_live_line(tokens: list[str]) -> None:
    text = "".join(tokens)
    single = LiveLine("[0] ")
    assert LiveLine("[0] ").feed(text) == "".join(single.feed(character) for character in text)


def test_every_line_of_the_chief_begins_with_its_task() -> None:
    live = LiveLine("[0] ")
    assert drawn(live.feed("one\n\ntwo\r\nthree")) == ["[0] one", "[0]", "[0] two", "[0] three"]


def test_a_redrawn_bar_keeps_its_prefix_and_place() -> None:
    live = LiveLine("[0] ")
    output = live.feed("\r1/10") + live.feed("\b" * 4 + "\r2/10") + live.feed("\b" * 4 + "\r3/10 done\n")
    assert drawn(output) == ["[0] 3/10 done", ""]


def test_the_prefix_stands_before_the_color_of_the_text() -> None:
    assert LiveLine("[0] ").feed("\r\x1b[2K\x1b[1mEpoch") == "\r\x1b[2K[0] \x1b[1mEpoch"


def test_lines_of_others_stand_above_the_live_line() -> None:
    shown, out = screen(columns=80)
    shown.feed(0, False, f"Epoch 1\n\r{BAR}".encode())
    shown.feed(1, False, b"warning\n")
    shown.feed(0, False, b"\b\b\b\r 4/10 finished            \n")
    assert drawn(out.getvalue()) == [
        "[worker/0] Epoch 1",
        "[worker/1] warning",
        "[worker/0]  4/10 finished",
        "",
    ]


def test_a_bar_that_ends_with_a_return_is_drawn_over_afterwards_too() -> None:
    shown, out = screen(columns=80)
    shown.feed(0, False, b"10 %\r")
    shown.feed(1, False, b"warning\n")
    shown.feed(0, False, b"99 %\r")
    shown.close()
    assert drawn(out.getvalue()) == ["[worker/1] warning", "[worker/0] 99 %", ""]


def test_a_bar_wider_than_the_terminal_is_erased_whole() -> None:
    for bar in ("x" * 50, "精度" * 12 + "xx", "x\u0301" * 50):  # 50 columns, as a terminal counts them
        live = LiveLine("[0] ")
        live.feed(bar)
        assert live.above("line\n", columns=20).startswith("\r\x1b[2A\x1b[J")


def test_a_character_cut_in_two_is_put_together() -> None:
    shown, out = screen(columns=None)
    data = "größe\n".encode()
    for byte in data:
        shown.feed(1, False, bytes([byte]))
    assert out.getvalue() == "[worker/1] größe\n"


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    shown, out = screen(columns=None)
    shown.feed(1, False, b"\xff\xfe\n")
    assert out.getvalue() == "[worker/1] \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\n"


def test_the_log_has_lines_without_control_characters() -> None:
    log, out = io.BytesIO(), io.StringIO()
    console = Console(["worker/0"], out, out, columns=80, color=True, logs=[log])
    for byte in f"one\r\n\r{BAR}\b\b\r{BAR}\x07 größe\nlast".encode():
        console.feed(0, False, bytes([byte]))
    assert log.getvalue().decode() == "one\n 3/10 ━━━ - loss: 0.5 größe\n"
    console.finish(0)
    console.log(0, "Traceback\nValueError: \x1b[1mbold\x1b[0m")
    console.log(0, "\x1b7\x1b(B\x1b[mas \x9btput\x1b8 writes them\x1bc")
    expected = ["last", "Traceback", "ValueError: bold", "as tput writes them"]
    assert log.getvalue().decode().splitlines()[2:] == expected


@pytest.mark.parametrize("columns", [None, 80])
def test_without_colors_those_of_the_tasks_are_left_out_too(columns: int | None) -> None:
    shown, out = screen(columns=columns)
    for rank in (0, 1):
        shown.feed(rank, False, b"\x1b[1mbold\x1b[0m and \x1b[38;5;200mcolor\x1b[0m\n")
    assert out.getvalue() == "[worker/0] bold and color\n[worker/1] bold and color\n"


def test_width_does_not_count_escapes() -> None:
    assert width(BAR) == len(" 3/10 ━━━ - loss: 0.5")


def test_what_comes_after_a_task_has_ended_stands_in_a_line_of_its_own() -> None:
    out = io.StringIO()
    screen = Console(["worker/0"], out, out, columns=80)
    screen.feed(0, False, b" 3/10 loss: 0.5")
    screen.finish(0)
    screen.feed(0, False, b"again")
    assert drawn(out.getvalue()) == ["[worker/0]  3/10 loss: 0.5", "[worker/0] again"]


def test_a_line_without_end_takes_no_more_time_and_memory_the_longer_it_gets() -> None:
    live = LiveLine("[0] ")
    output = "".join(live.feed("\x1b[" * 1000) for _ in range(300))
    assert output.replace("\n", "").replace("[0] ", "") == "\x1b[" * 299_999  # the last one may be no whole one yet
    assert output.count("\n[0] ") > 1
    assert len(live.above("line\n", columns=80)) < 200_000


def test_a_character_that_an_end_cuts_in_two_does_not_run_into_the_next_life() -> None:
    for columns in (80, None):
        shown, out = screen(columns=columns)
        for rank in (0, 1):
            shown.feed(rank, False, b"gr\xc3")
            shown.finish(rank)
            shown.feed(rank, False, b"\xb6\n")
        assert drawn(out.getvalue())[:-1] == [
            f"[worker/{rank}] {text}"
            for rank in (0, 1)
            for text in ("gr\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}")
        ]


def test_what_the_encoding_lacks_is_shown_as_a_question_mark() -> None:
    memory = io.BytesIO()
    out = io.TextIOWrapper(memory, encoding="ascii")
    Console(["worker/0"], out, out).feed(0, False, b"\xff\n")
    assert memory.getvalue() == b"[worker/0] ?\n"


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_reader_that_lags_behind_a_non_blocking_pipe_gets_everything(buffering: int) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    text = "".join(f"line {i}\n" for i in range(20_000))
    out = io.TextIOWrapper(
        os.fdopen(theirs, "wb", buffering),  # 0 is that of PYTHONUNBUFFERED
        encoding="utf-8",
        write_through=not buffering,
    )

    def write() -> None:
        with out:
            write_whole(out, text)

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: not select.select([], [theirs], [], 0)[1])  # it takes no more
    with open(ours, "rb") as reader:
        assert reader.read() == text.encode()
    writer.join()


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_output_that_takes_no_more_is_told_of_on_the_other_one() -> None:
    out, err = Full(), io.StringIO()
    screen = Console(["worker/0"], out, err)
    screen.feed(0, False, b"one\ntwo\n")
    screen.feed(0, False, b"three\n")
    screen.feed(0, True, b"four\n")
    assert err.getvalue().splitlines() == [
        "phalanx: the output ends here (No space left on device); the job continues",
        "[worker/0] four",
    ]


def test_where_a_test_runner_has_closed_its_stand_in_the_real_one_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    screen = Console(["worker/0"], out, out)
    out.close()
    screen.feed(0, False, b"still here\n")
    assert "[worker/0] still here" in capfd.readouterr().out


def test_a_notebook_gets_no_control_sequences_but_carriage_returns_and_colors() -> None:
    console, out = screen(columns=NOTEBOOK)
    console.feed(0, False, f"\r{BAR} and more".encode())
    console.feed(1, False, b"a line\n")
    console.feed(0, False, b"\b\b\b\r" + BAR.encode() + b"         \n")
    console.close()
    written = out.getvalue()
    assert drawn(written) == ["[worker/1] a line", "[worker/0]  3/10 ━━━ - loss: 0.5", ""]
    assert not re.search(r"\x1b\[[^m]*[A-Za-ln-z]|\x08", written)
