"""What the programs of elastic jobs have in common: which life of which task this is, and its log."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 90.0
"""Against hanging only: a process that was killed starts again and imports its framework."""


class Life:
    """One life of a task, with a file of its own, `worker-1.2.log`."""

    def __init__(self, folder: Path):
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        self.index: int = task["index"]
        self.number = 1
        while (folder / f"worker-{self.index}.{self.number}.log").exists():
            self.number += 1
        self._path = folder / f"worker-{self.index}.{self.number}.log"
        self._path.touch()

    def note(self, event: str, **facts: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "life": f"{self.index}.{self.number}", **facts}) + "\n")

    def is_first_of(self, index: int) -> bool:
        return (self.index, self.number) == (index, 1)

    def die(self) -> None:
        self.note("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def until_others_come(look: Callable[[], None]) -> None:
    """Look for them, until looking raises."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        look()
        time.sleep(0.05)
    raise TimeoutError("no other member joined")
