"""A member of an elastic job that has no model: it takes steps together with the others until it is stopped.

    member.py FOLDER

Each process writes a line for each of its steps to `FOLDER/worker-N.jsonl`. Files in FOLDER say what it does: `stop`
ends the job; `slow-N` makes the steps of worker N slow; `hang-N` makes it hang between two steps; `mute-N` makes it
end without a word when it is interrupted, and `linger-N` end late; `bad-HOST` makes workers on that host fail when they
come.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.collectives.options import CommunicationOptions
from phalanx.config.job_config import JobConfig
from phalanx.elastic.elastic_communicator import ElasticCommunicator
from phalanx.elastic.elastic_group import ElasticGroup
from phalanx.elastic.elastic_node import ElasticNode
from phalanx.errors import MembershipChangedError
from phalanx.runtime import progress, telemetry
from phalanx.training.replica import EntryFinishedError, Replica

PACE_S = 0.02
SLOW_S = 0.1
LINGER_S = 1.0


class Member:
    def __init__(self, folder: Path, index: int, replica: Replica):
        assert replica.elastic is not None
        self._folder, self._index, self._group = folder, index, replica.elastic
        self._replica, self._communicator = replica, replica.communicator
        self._step = 0

    def train(self) -> None:
        if self._group.needs_state:
            self._welcome()
        self._replica.announce_entry()
        while True:
            progress.report("gradients", epoch=0, step=self._step)
            time.sleep(SLOW_S if self._is("slow") else PACE_S)
            while self._is("hang"):
                time.sleep(PACE_S)
            progress.enter("all_reduce")
            self._group.join_points.at_boundary = True
            try:
                stops = self._communicator.all_reduce([np.array([float((self._folder / "stop").exists())])])
            except MembershipChangedError:
                self._replica.announce_entry()  # its chief may be another one
                self._welcome()
                continue
            self._step += 1
            self._note()
            if stops[0][0]:
                return

    def _welcome(self) -> None:
        """Tell those who came at which step the others are."""
        while self._group.newcomers:
            try:
                self._step = int(self._communicator.broadcast_bytes(str(self._step).encode()))
                self._group.needs_state = False
                return
            except MembershipChangedError:
                continue

    def _note(self) -> None:
        communicator = self._communicator
        with (self._folder / f"worker-{self._index}.jsonl").open("a") as file:
            line = {
                "step": self._step,
                "members": communicator.world_size,
                "rank": communicator.rank,
                "host": os.environ.get("REMOTE_HOST", "here"),
                "agent": os.getppid(),
            }
            file.write(json.dumps(line) + "\n")

    def _is(self, what: str) -> bool:
        return (self._folder / f"{what}-{self._index}").exists()


def main(folder: Path) -> None:
    if (folder / f"bad-{os.environ.get('REMOTE_HOST', 'here')}").exists():
        os._exit(1)
    tf_config = json.loads(os.environ["TF_CONFIG"])
    index = tf_config["task"]["index"]
    config = JobConfig.from_environment()
    with ElasticNode(ClusterSpec(tf_config["cluster"]), Task("worker", index), JobFacts(), config) as node:
        communicator = ElasticCommunicator(ElasticGroup(node, CommunicationOptions(timeout_seconds=config.timeout_s)))
        telemetry.start_publishing(lambda: communicator.statistics)
        replica = Replica(communicator)
        try:
            with replica.entry() as entry:
                if replica.is_candidate:
                    replica.join_entry()
                Member(folder, index, replica).train()
                entry.result = b"over"
        except EntryFinishedError:
            pass
        except KeyboardInterrupt:
            if (folder / f"mute-{index}").exists():
                os._exit(1)
            if (folder / f"linger-{index}").exists():
                time.sleep(LINGER_S)
            raise
        communicator.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
