"""To the structure of Horovod's examples/elastic/pytorch/pytorch_mnist_elastic.py."""

import torch
import torch.nn.functional as F
from torch import nn, optim

import phalanx.horovod.torch as hvd  # was: import horovod.torch as hvd
from tests.originals.report import digits, report

BATCH_SIZE, EPOCHS, LR, MOMENTUM = 16, 2, 0.01, 0.5

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
(images, labels), _ = digits()
train_dataset = torch.utils.data.TensorDataset(torch.from_numpy(images.reshape(-1, 64) / 16), torch.from_numpy(labels))
train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=BATCH_SIZE, sampler=train_sampler)

model = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
lr_scaler = hvd.size()
optimizer = optim.SGD(model.parameters(), lr=LR * lr_scaler, momentum=MOMENTUM)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, EPOCHS + 1):  # noqa: B020
        state.model.train()
        train_sampler.set_epoch(state.epoch)
        steps_remaining = len(train_loader) - state.batch
        for state.batch, (data, target) in enumerate(train_loader):
            if state.batch >= steps_remaining:
                break
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.commit()
        state.batch = 0


optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = LR * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
report(weights=[weight.detach() for weight in model.parameters()])
