"""Workers of this host, as real processes."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from pathlib import Path

import pytest

from phalanx.launcher.host_messages import Started, WorkerSpec
from phalanx.launcher.hosts.local_host import LocalHost

BOUND_S = 20.0


def test_an_interrupt_while_workers_are_ended_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C twice, in a notebook whose process lives on."""
    program = tmp_path / "program.py"
    program.write_text("import time; time.sleep(600)")
    with selectors.DefaultSelector() as selector:
        host = LocalHost(selector)
        host.prepare(2)
        started = host.start([WorkerSpec(rank, (str(program),), {}) for rank in range(2)])
        pids = [event.pid for event in started if isinstance(event, Started)]

        def interrupt(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                host.close()
        deadline = time.monotonic() + BOUND_S
        for pid in pids:
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is None:
                assert time.monotonic() < deadline, f"{pid} still runs"
                time.sleep(0.01)
        host.close()
