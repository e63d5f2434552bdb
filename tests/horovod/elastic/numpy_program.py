"""An elastic program without a framework: what Horovod's layer itself rebuilds when the members change.

phalanx run -np 3 --min-np 2 --max-np 4 numpy_program.py FOLDER

Numbers are dealt out to the members there are, and summed. The job begins with three and gets a fourth; then worker 0
is killed (-9) with operations under way, and comes back.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import phalanx.horovod.numpy as hvd
from phalanx.horovod.instance_numbers import InstanceNumber
from tests.horovod.elastic.lives import Life, until_others_come

STEPS, NUMBERS, KILL_AT, WAIT_AT = 12, 12, 5, (2, 8)


def main(folder: Path) -> None:
    life = Life(folder)
    hvd.init()
    life.note("joined", rank=hvd.rank(), size=hvd.size())
    state = hvd.elastic.ObjectState(step=0, total=0.0, sizes=[])
    sets = []

    @hvd.elastic.run
    def train(state, answer: int) -> int:
        assert [old.process_set_id for old in sets] == [None] * len(sets), "of former members"
        sets.append(hvd.add_process_set(list(range(0, hvd.size(), 2))))
        number = int(InstanceNumber("test", hvd.global_process_set))
        assert hvd.allgather(np.array([number])).tolist() == [0] * hvd.size()
        life.note("began", rank=hvd.rank(), size=hvd.size(), step=state.step, local=hvd.local_rank())
        while state.step < STEPS:
            if hvd.size() < 4 and state.step in WAIT_AT:
                until_others_come(state.check_host_updates)
            handles = [hvd.allreduce_async(np.ones(3), name=f"pending.{i}", op=hvd.Sum) for i in range(3)]
            if life.is_first_of(0) and state.step == KILL_AT:
                life.die()
            own = sum(n for n in range(NUMBERS) if n % hvd.size() == hvd.rank())
            total = hvd.allreduce(np.array([float(own)]), op=hvd.Sum)  # no name: all count again from 0
            assert all((hvd.synchronize(handle) == hvd.size()).all() for handle in handles)
            if sets[-1].included():
                members = hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=sets[-1])
                assert members.tolist() == [sets[-1].size()]
            state.total += state.step * NUMBERS * NUMBERS + float(total[0])
            state.sizes.append(hvd.size())
            state.step += 1
            state.commit()
        return answer

    answer = train(state, answer=7)
    told = {"total": state.total, "sizes": state.sizes, "step": state.step}
    life.note("finished", answer=answer, rank=hvd.rank(), size=hvd.size(), **told)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
