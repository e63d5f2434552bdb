"""A training that fails on one of its workers, in a function that a callback calls."""

import keras
import numpy as np

import phalanx

x = np.random.default_rng(0).normal(size=(1000, 20)).astype("float32")
strategy = phalanx.MultiWorkerMirroredStrategy()


class Check(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        check(batch)


def check(batch):
    if batch == 5 and strategy.cluster_resolver.task_id == 1:
        raise ValueError("the data of batch 5 is bad")


with strategy.scope():
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, x[:, :1], batch_size=64, epochs=3, callbacks=[Check()])
