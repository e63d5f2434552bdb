"""To the structure of Keras's guide "Multi-GPU distributed training with PyTorch", without its process group."""

import keras
import torch

import phalanx.horovod.torch as hvd  # was: from torch.nn.parallel import DistributedDataParallel
from tests.originals.report import digits, report

num_epochs = 2
batch_size = 16


def get_model():
    inputs = keras.Input(shape=(8, 8, 1))
    x = keras.layers.Rescaling(1.0 / 16)(inputs)
    x = keras.layers.Conv2D(8, 3, use_bias=False)(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(16, activation="relu")(x)
    outputs = keras.layers.Dense(10)(x)
    return keras.Model(inputs, outputs)


def get_dataset():
    (x_train, y_train), _ = digits()
    return torch.utils.data.TensorDataset(torch.from_numpy(x_train[..., None]), torch.from_numpy(y_train))


def prepare_dataloader(dataset, current_gpu_index, num_gpus, batch_size):
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=num_gpus, rank=current_gpu_index, shuffle=False
    )
    return torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size=batch_size, shuffle=False)


def train_model(model, dataloader, num_epochs, optimizer, loss_fn):
    losses = []
    for epoch in range(num_epochs):
        running_loss = 0.0
        running_loss_count = 0
        for inputs, targets in dataloader:
            outputs = model(inputs)
            loss = loss_fn(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            running_loss_count += 1
        losses.append(running_loss / running_loss_count)
        print(f"Epoch {epoch + 1}/{num_epochs}, Loss: {losses[-1]}")
    return losses


hvd.init()  # changed: hvd.init() in place of a process group
keras.utils.set_random_seed(1)
dataset = get_dataset()
model = get_model()
dataloader = prepare_dataloader(dataset, hvd.rank(), hvd.size(), batch_size)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = hvd.DistributedOptimizer(optimizer)  # changed: a wrapped optimizer in place of a wrapped model
losses = train_model(model, dataloader, num_epochs, optimizer, loss_fn)
merged = hvd.allreduce(torch.tensor(losses), name="losses")
report(losses=merged.tolist(), weights=[weight.detach() for weight in model.parameters()])
