"""An elastic program that makes a process set whenever the members change, where a second member is lost meanwhile.

phalanx run -np 4 --min-np 1 callback_program.py FOLDER WHERE

Worker 3 is killed (-9) between two commits; worker 1 in the callback that follows: before it makes the process set, or
while it does. Both come back.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from unittest import mock

import numpy as np

import phalanx.horovod.numpy as hvd
from phalanx.cluster.member_links import MemberLinks
from tests.horovod.elastic.lives import Life, until_others_come

STEPS, KILL_AT, WAIT_AT = 8, 3, 6


def make_process_set() -> None:
    if hvd.size() > 1:
        hvd.add_process_set(range(hvd.size() - 1))


def main(folder: Path, where: str) -> None:
    life = Life(folder)
    hvd.init()
    make_process_set()  # so does who was there before, in the callback
    state = hvd.elastic.ObjectState(step=0)

    def on_reset() -> None:
        life.note("reset", size=hvd.size())
        if life.is_first_of(1) and where == "before":
            life.die()
        dying = mock.patch.object(MemberLinks, "connect_to_lower_ranks", side_effect=lambda *_: life.die())
        with dying if life.is_first_of(1) else contextlib.nullcontext():
            make_process_set()

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def train(state) -> None:
        while state.step < STEPS:
            if hvd.size() < 4 and state.step == WAIT_AT:
                until_others_come(state.check_host_updates)
            if life.is_first_of(3) and state.step == KILL_AT:
                life.die()
            hvd.allreduce(np.ones(3), name="work")
            state.step += 1
            state.commit()

    train(state)
    life.note("finished", size=hvd.size(), step=state.step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
