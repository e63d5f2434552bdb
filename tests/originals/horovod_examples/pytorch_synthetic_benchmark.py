"""To the structure of Horovod's examples/pytorch/pytorch_synthetic_benchmark.py."""

import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import phalanx.horovod.torch as hvd  # was: import horovod.torch as hvd
from tests.originals.report import report

BATCH_SIZE, NUM_WARMUP_BATCHES, NUM_BATCHES_PER_ITER, NUM_ITERS = 8, 2, 3, 2

hvd.init()
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
lr_scaler = hvd.size()
optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
compression = hvd.Compression.fp16
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(BATCH_SIZE, 3, 16, 16)
target = torch.LongTensor(BATCH_SIZE).random_() % 10


def benchmark_step():
    optimizer.zero_grad()
    output = model(data)
    loss = F.cross_entropy(output, target)
    loss.backward()
    optimizer.step()


def log(s, nl=True):
    if hvd.rank() == 0:
        print(s, end="\n" if nl else "")


log(f"Number of CPUs: {hvd.size()}")
timeit.timeit(benchmark_step, number=NUM_WARMUP_BATCHES)
img_secs = []
for x in range(NUM_ITERS):
    time = timeit.timeit(benchmark_step, number=NUM_BATCHES_PER_ITER)
    img_sec = BATCH_SIZE * NUM_BATCHES_PER_ITER / time
    log(f"Iter #{x}: {img_sec:.1f} img/sec per CPU")
    img_secs.append(img_sec)
img_sec_mean, img_sec_conf = np.mean(img_secs), 1.96 * np.std(img_secs)
log(f"Total img/sec on {hvd.size()} CPUs: {hvd.size() * img_sec_mean:.1f} +-{hvd.size() * img_sec_conf:.1f}")
report(weights=[weight.detach() for weight in model.parameters()])
