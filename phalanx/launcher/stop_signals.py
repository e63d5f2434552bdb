"""Handles the signals by which users and schedulers end a job."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from phalanx.config.launch_config import LaunchConfig
from phalanx.config.parsing import parse_signal
from phalanx.errors import SIGNAL_BASE
from phalanx.launcher.job_supervisor import JobSupervisor

# The first signal shuts the job down in order, and a Ctrl-C after it kills the workers. The third Ctrl-C ends this
# process even if it is stuck, for example in a write to a terminal that no one reads.
CTRL_C_LIMIT = 3

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


def stop_signals(config: LaunchConfig) -> tuple[signal.Signals, ...]:
    """The signals that end a job.

    Raises: ConfigurationError if the configured preemption signal does not exist.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    chosen = None if config.preemption_signal is None else parse_signal(config.preemption_signal)
    return signals if chosen is None or chosen in signals else (*signals, chosen)


@contextlib.contextmanager
def stopped_by_signals(
    job: JobSupervisor, signals: Sequence[signal.Signals], on_resize: Callable[[], None] | None
) -> Iterator[None]:
    """Make `signals` stop the job, inside the block. Signals that the parent process ignores, as under nohup, stay
    ignored.

    Args:
        on_resize: Called when the terminal's size changes; None if there is no terminal.
    """
    ctrl_c = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal ctrl_c
        ctrl_c += number == signal.SIGINT
        if ctrl_c >= CTRL_C_LIMIT:
            os._exit(SIGNAL_BASE + number)  # the orphan guards end the workers
        job.stop(number)

    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    handlers: dict[int, Handler] = dict.fromkeys(handled, stop)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited; exits of workers would go unnoticed
        handlers[signal.SIGCHLD] = signal.SIG_DFL
    if on_resize is not None:
        handlers[signal.SIGWINCH] = lambda number, frame: on_resize()
    previous_wakeup = signal.set_wakeup_fd(job.loop.wakeup_fd, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
