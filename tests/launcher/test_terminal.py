"""`phalanx run` as a person sees it: on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import time
from pathlib import Path

import pytest

from tests.launcher.conftest import JOB_BOUND_S, Launcher, wait_until
from tests.support.backends import BACKENDS

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal with a job in its foreground."""

    def __init__(self, launcher: Launcher, *arguments: str):
        # pty.fork, since the terminal must be the controlling one for Ctrl-C to work.
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            import sys

            os.chdir(launcher.folder)
            os.execve(sys.executable, [sys.executable, "-m", "phalanx", "run", *arguments], launcher.environment)
        self.text = ""

    def read_until(self, pattern: str | None) -> str:
        """Read until the pattern was shown, or, without one, until the end."""
        deadline = time.monotonic() + JOB_BOUND_S
        while pattern is None or not re.search(pattern, self.text):
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern} in {self.text}"
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # the job has ended
                data = b""
            if not data:
                assert pattern is None, f"no {pattern} in {self.text}"
                break
            self.text += data.decode()
        return self.text

    def type(self, text: bytes) -> None:
        os.write(self.fd, text)

    def end(self) -> int:
        self.read_until(None)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_the_chief_has_a_terminal_and_the_others_do_not(launcher: Launcher) -> None:
    script = launcher.script(
        """
        if rank == 1:
            wait_for("shown")  # a line of one in the middle of the other's would be drawn around it
        print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns if rank == 0 else '')
        touch("shown")
        """
    )
    terminal = Terminal(launcher, "-n", "2", script)
    import fcntl
    import termios

    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    assert terminal.end() == 0
    lines = ESCAPE.sub("", terminal.text).split("\r\n")
    assert "[worker/1] False False " in lines
    assert any(re.fullmatch(r"\[worker/0\] True True (89|69)", line) for line in lines), lines


def test_prefixes_are_colored_unless_the_user_wants_none(launcher: Launcher) -> None:
    script = launcher.script("print('hello')")
    launcher.environment["TERM"] = "xterm"
    terminal = Terminal(launcher, "-n", "1", script)
    terminal.end()
    assert "\x1b[36m[worker/0]\x1b[0m hello\r\n" in terminal.text
    for unwanted in ({"NO_COLOR": "1"}, {"NO_COLOR": "", "TERM": "dumb"}):
        launcher.environment.update(unwanted)
        terminal = Terminal(launcher, "-n", "1", script)
        terminal.end()
        assert terminal.text == "phalanx: starting 1 worker\r\n[worker/0] hello\r\n"


def test_a_progress_bar_stays_in_place_while_others_write(launcher: Launcher) -> None:
    script = launcher.script(
        r"""
        if rank == 0:
            sys.stdout.write("\r1/2"); sys.stdout.flush()
            touch("drawn")
            wait_for("written")
            sys.stdout.write("\b\b\b\r2/2 done\n"); sys.stdout.flush()
        else:
            wait_for("drawn")
            print("a line of one")
        """
    )
    terminal = Terminal(launcher, "-n", "2", script)
    terminal.read_until("a line of one")
    (launcher.folder / "written").touch()
    assert terminal.end() == 0
    text = terminal.text.replace("\x1b[36m", "").replace("\x1b[33m", "").replace("\x1b[0m", "")
    assert "\r[worker/0] 1/2\r\x1b[2K[worker/1] a line of one\r\n[worker/0] 1/2" in text
    assert text.count("[worker/0] 2/2 done\r\n") == 1


def test_a_lot_of_output_at_the_very_end_arrives(launcher: Launcher) -> None:
    script = launcher.script("sys.stdout.write(''.join(f'line {i}\\n' for i in range(2000))); sys.stdout.flush()")
    terminal = Terminal(launcher, "-n", "1", script)
    assert terminal.end() == 0
    lines = ESCAPE.sub("", terminal.text).splitlines()
    assert lines[1:] == [f"[worker/0] line {i}" for i in range(2000)]


def test_ctrl_c_ends_the_job(launcher: Launcher) -> None:
    script = launcher.script(
        """
        try:
            print("ready", rank, flush=True)
            hang()
        finally:
            touch(f"finally-{rank}")
        """
    )
    terminal = Terminal(launcher, "-n", "2", script)
    terminal.read_until(r"ready 0")
    terminal.read_until(r"ready 1")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert ESCAPE.sub("", terminal.text).count("phalanx: interrupted") == 1
    assert all((Path(launcher.folder) / f"finally-{rank}").exists() for rank in range(2))


def test_ctrl_c_prints_no_traceback_of_programs_that_are_over(launcher: Launcher) -> None:
    """What runs at their exit, such as the finalizers of a library, is not interrupted."""
    script = launcher.script(
        """
        import atexit, os, time
        def at_exit():
            touch(f"over-{rank}")
            while not os.path.exists("pressed"):
                time.sleep(0.01)
        atexit.register(at_exit)
        """
    )
    terminal = Terminal(launcher, "-n", "2", script)
    for rank in range(2):
        wait_until((launcher.folder / f"over-{rank}").exists)
    terminal.type(b"\x03")
    terminal.read_until("phalanx: interrupted")
    (launcher.folder / "pressed").touch()
    assert terminal.end() == 130
    assert "KeyboardInterrupt" not in terminal.text


@pytest.mark.slow
def test_ctrl_c_in_a_job_with_a_coordinator_is_one_line(launcher: Launcher) -> None:
    """Its workers end first, which is no news to who has pressed it."""
    script = launcher.script(
        """
        import time
        import phalanx
        coordinator = phalanx.coordinator.ClusterCoordinator(phalanx.ParameterServerStrategy())
        while True:
            for _ in range(4):
                coordinator.schedule(time.sleep, args=(0.05,))
            coordinator.join()
            print("joined", flush=True)
        """
    )
    terminal = Terminal(launcher, "-n", "2", "--ps", "1", "--chief", script)
    terminal.read_until("joined")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    said = ESCAPE.sub("", terminal.text).partition("phalanx: interrupted")[2]
    assert not [line for line in said.splitlines()[1:] if line.strip("^C ") and "joined" not in line]


def test_a_second_ctrl_c_kills(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import signal
        signal.signal(signal.SIGINT, lambda *_: touch(f"ignored-{rank}"))
        touch(f"ready-{rank}")
        while True:
            hang()
        """
    )
    terminal = Terminal(launcher, "-n", "2", script)
    for name in ("ready", "ignored"):
        for rank in range(2):
            wait_until((launcher.folder / f"{name}-{rank}").exists)
        terminal.type(b"\x03")
    assert terminal.end() == 130


FAILING = """
    if rank == 1:
        def check(batch):
            touch("fails")
            raise ValueError(f"batch {batch} is bad")
        check(5)
    from phalanx.errors import PeerLostError
    wait_for("fails")
    raise PeerLostError("worker/1 left", rank=1, task="worker/1", host="localhost")
    """


def test_an_error_is_one_short_page_with_the_programs_own_line_at_its_top(launcher: Launcher) -> None:
    launcher.environment["TERM"] = "xterm"
    terminal = Terminal(launcher, "-n", "2", launcher.script(FAILING))
    assert terminal.end() == 1
    assert "\x1b[1;31mThe job ended: worker/1" in terminal.text
    lines = ESCAPE.sub("", terminal.text).splitlines()
    assert len(lines) <= 40
    assert any('in check: raise ValueError(f"batch {batch} is bad")' in line for line in lines[:10]), lines
    assert lines.count("ValueError: batch 5 is bad") == 1
    assert terminal.text.count("Traceback") == 1


@pytest.mark.slow  # the page itself is tested above, and its text in test_root_cause
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_in_a_training_is_short_on_every_backend(backend: str, launcher: Launcher) -> None:
    script = str(Path(__file__).with_name("failing_training.py"))
    del launcher.environment["PHALANX_GRACE"]  # so short that a busy machine does not exit within it
    terminal = Terminal(launcher, "--workers", "2", "--backend", backend, script)
    assert terminal.end() == 1
    lines = ESCAPE.sub("", terminal.text).rstrip().split("\r\n")  # a bar that is redrawn is one line
    lines = [line for line in lines if not re.search(r"waits up to|has not connected yet", line)]  # of a busy machine
    assert len(lines) <= 40, terminal.text
    assert any('in check: raise ValueError("the data of batch 5 is bad")' in line for line in lines[:10]), terminal.text
    assert any(re.fullmatch(r"  \.\.\. \d+ frames of phalanx and keras", line) for line in lines), terminal.text


def test_the_errors_of_all_tasks_are_in_the_logs_and_with_v_on_the_page(launcher: Launcher) -> None:
    terminal = Terminal(launcher, "-n", "2", "-v", "--log-dir", "logs", launcher.script(FAILING))
    assert terminal.end() == 1
    assert terminal.text.count("Traceback") == 2
    assert "worker/0 said:" in terminal.text
    logs = launcher.folder / "logs"
    for rank, kind in enumerate(("PeerLostError", "ValueError")):
        log = (logs / f"worker-{rank}.log").read_text()
        assert log.count("Traceback") == 1
        assert kind in log
        assert "\x1b" not in log
    assert (logs / "failure.txt").read_text().count("Traceback") == 2


def test_closing_the_terminal_ends_the_job(launcher: Launcher) -> None:
    terminal = Terminal(launcher, "-n", "2", launcher.script("print('ready', rank, flush=True)\nhang()"))
    terminal.read_until(r"ready 0")
    terminal.read_until(r"ready 1")
    os.close(terminal.fd)
    launcher.assert_all_gone()
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (128 + signal.SIGHUP, 1, 120, -signal.SIGHUP)


@pytest.mark.parametrize("columns", [120, 60])
def test_the_chief_learns_of_a_new_terminal_size(columns: int, launcher: Launcher) -> None:
    import fcntl
    import termios

    script = launcher.script(
        """
        import signal
        resized = []
        signal.signal(signal.SIGWINCH, lambda *_: resized.append(os.get_terminal_size().columns))
        print("ready", flush=True)
        while not resized:
            time.sleep(0.01)
        print("columns", resized[0])
        """
    )
    terminal = Terminal(launcher, "-n", "1", script)
    terminal.read_until(r"ready")
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    assert terminal.end() == 0
    assert f"columns {columns - len('[worker/0] ')}" in terminal.text
