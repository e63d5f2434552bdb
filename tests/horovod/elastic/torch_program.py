"""An elastic program for PyTorch as Horovod's documentation has it: sampler, optimizer, scheduler, commits.

phalanx run -np 3 --min-np 2 torch_program.py FOLDER

Worker 1 is killed (-9) in its first life, between two commits. The others go on, and wait for it before the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import phalanx.horovod.torch as hvd
from tests.horovod.elastic.lives import Life, until_others_come

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 60, 4, 4, 2
KILL_AT, ALONE_UNTIL = 7, 11  # steps: the first is in the second epoch, not just after a commit


def main(folder: Path) -> None:
    life = Life(folder)
    hvd.init()
    life.note("joined", rank=hvd.rank(), size=hvd.size())
    torch.manual_seed(life.index + 10 * life.number)  # so only what is synchronised is alike
    x = torch.arange(SAMPLES, dtype=torch.float32)[:, None] / SAMPLES
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, 3 * x - 1)
    sampler = hvd.elastic.ElasticSampler(data, seed=1)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, step=0, counts=np.zeros((EPOCHS, SAMPLES), int)
    )
    committed = 0

    def on_reset() -> None:
        life.note("reset", size=hvd.size(), rank=hvd.rank(), step=state.step, committed=committed)

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def train(state) -> None:
        nonlocal committed
        weights = hvd.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None], name="weights")
        moments = hvd.allgather_object([s["exp_avg"].sum().item() for s in optimizer.state_dict()["state"].values()])
        life.note(
            "began",
            step=state.step,
            size=hvd.size(),
            rank=hvd.rank(),
            alike=bool((weights == weights[0]).all()) and all(each == moments[0] for each in moments),
            rate=optimizer.param_groups[0]["lr"],
        )
        while state.epoch < EPOCHS:
            for number, (indices, inputs, targets) in enumerate(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                if life.is_first_of(1) and state.step == KILL_AT:
                    life.die()
                optimizer.step()
                own = np.bincount(indices.numpy(), minlength=SAMPLES)
                state.counts[state.epoch] += hvd.allreduce(torch.from_numpy(own), op=hvd.Sum, name="counts").numpy()
                sampler.record_batch(number, len(indices))
                state.step += 1
                if state.step % COMMIT_EVERY == 0:
                    state.commit()
                    committed = state.step
                if hvd.size() < 3 and state.step >= ALONE_UNTIL:
                    until_others_come(state.check_host_updates)
            scheduler.step()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
            committed = state.step

    train(state)
    life.note(
        "finished",
        rank=hvd.rank(),
        size=hvd.size(),
        step=state.step,
        counts=state.counts.tolist(),
        weights=[p.detach().reshape(-1).tolist() for p in model.parameters()],
        rate=optimizer.param_groups[0]["lr"],
        loss=float(torch.nn.functional.mse_loss(model(x), 3 * x - 1)),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
