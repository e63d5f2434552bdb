"""Horovod's PyTorch example: plain PyTorch, no Keras.

    phalanx run -np 2 examples/horovod_torch.py

Data: scikit-learn's digits, of which a fifth is held out.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as functional
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import phalanx.horovod.torch as hvd


class Net(nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 3)
        self.conv2 = nn.Conv2d(10, 20, 3)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x)).flatten(1)
        x = functional.dropout(functional.relu(self.fc1(x)), training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.manual_seed(42 + hvd.rank())

    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(
        (images / 16).astype("float32").reshape(-1, 1, 8, 8), digits, test_size=0.2, random_state=0, stratify=digits
    )
    x_train, x_test, y_train, y_test = map(torch.from_numpy, parts)
    samples = TensorDataset(x_train, y_train)
    sampler = DistributedSampler(samples, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(samples, batch_size=options.batch_size, sampler=sampler)

    model = Net()
    # Adasum takes care of the learning rate itself.
    scale = 1 if options.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * scale, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
    )

    for epoch in range(options.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
        accuracy = test(model, x_test, y_test)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {accuracy:.2%}")


@torch.no_grad()
def test(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The accuracy on held-out samples, each tested by one process."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    right = (model(x[mine]).argmax(1) == y[mine]).sum()
    return hvd.allreduce(right, name="right", op=hvd.Sum).item() / len(y)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step on each process")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
    parser.add_argument("--use-adasum", action="store_true", help="merge steps by Adasum")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
