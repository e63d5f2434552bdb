"""A member of an elastic job that has no model: its chief saves after every step, as a `fit` does.

    partition_member.py FOLDER

FOLDER/state has the newest step, and FOLDER/writes a line for the beginning and the end of each save.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from phalanx.config.job_config import run_of_job
from phalanx.runtime.write_claim import WriteClaim
from phalanx.training.replica import Replica
from tests.launcher import member


class SavingMember(member.Member):
    def __init__(self, folder: Path, index: int, replica: Replica):
        super().__init__(folder, index, replica)
        self._claim = WriteClaim(folder / "saved", "fit0", lambda: replica.generation)
        self._step = saved_step(folder)

    def _note(self) -> None:
        super()._note()
        if self._communicator.rank == 0:
            with self._claim.writing():
                self._log("begin")
                path = self._folder / f"state.{os.getpid()}"
                path.write_text(str(self._step))
                path.replace(self._folder / "state")
                self._log("end")

    def _log(self, what: str) -> None:
        line = {
            "what": what,
            "step": self._step,
            "token": [run_of_job()[1], self._replica.generation],
            "pid": os.getpid(),
            "members": self._communicator.world_size,
            "host": os.environ["REMOTE_HOST"],
            "time": time.time(),
        }
        with (self._folder / "writes").open("a") as file:
            file.write(json.dumps(line) + "\n")


def saved_step(folder: Path) -> int:
    path = folder / "state"
    return int(path.read_text()) if path.exists() else 0


if __name__ == "__main__":
    member.Member = SavingMember  # type: ignore[misc]
    member.main(Path(sys.argv[1]))
