"""What a user types in an interactive session, cell after cell. Read from stdin, so that it is no program to run again.

It prints what it found as JSON. With SHORT in its environment it starts fewer processes.
"""

import json
import os
import signal

import keras
import numpy as np

import phalanx
from tests.support.seeds import set_random_seed

found = {}
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)
session = os.getpid()


class Regressor(keras.Model):  # as notebooks have them: no get_config, arguments of any kind
    def __init__(self, body, activation):
        super().__init__()
        self.body = body
        self.activation = activation
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        return self.head(self.activation(self.body(inputs)))


class Noted(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])


class OnServers(keras.callbacks.Callback):
    """Does something after the second step on all replicas but the session's own."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and os.getpid() != session:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("on one replica alone")


class Interrupted(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if os.getpid() == session:
            os.kill(session, signal.SIGINT)


def double_tanh(values):
    return 2 * keras.ops.tanh(values)


def squared_error(true, predicted):
    return keras.ops.mean((true - predicted) ** 2, axis=-1)


def make():
    set_random_seed(1)
    body = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model = Regressor(body, double_tanh)
    compile_(model)
    return model


def compile_(model):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)
    model.compile(keras.optimizers.Adam(schedule), loss=squared_error, metrics=["mae"])


def train(model, name):
    noted = Noted()
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[noted], validation_data=(x, y)).history
    model.body.trainable = False
    compile_(model)
    more = model.fit(x, y, batch_size=16, verbose=0, callbacks=[noted]).history
    found[name] = {
        "history": history,
        "more": more,
        "losses": noted.losses,
        "evaluated": model.evaluate(x, y, verbose=0),
        "predicted": model.predict(x, verbose=0).tolist(),
    }


def twin(seed):
    set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(1, name="y")], name="twin")
    model.compile("sgd", "mse")
    return model


def alternate():
    """Single batches of two models that are described alike; their outputs afterwards."""
    first, second = twin(1), twin(2)
    for model in (first, second, first, second):
        model.train_on_batch(x, y)
    return [model.predict(x[:5], verbose=0).tolist() for model in (first, second)]


def failure(call):
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Logger(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.running = (number for number in range(3))  # which cannot travel
        self.epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


strategy = phalanx.MirroredStrategy(2, synchronized_batch_norm=True)
train(make(), "plain")
with strategy.scope():
    model = make()

train(model, "session")

with strategy.scope():
    found["alternating"] = alternate()

found["alternating plainly"] = alternate()

found["both"] = failure(lambda: model.fit(x, y[:3], verbose=0))
if "SHORT" not in os.environ:
    found["one"] = failure(lambda: model.fit(x, y, batch_size=16, verbose=0, callbacks=[OnServers("raise")]))
    found["killed"] = failure(lambda: model.fit(x, y, batch_size=16, verbose=0, callbacks=[OnServers("kill")]))

found["interrupted"] = failure(lambda: model.fit(x, y, batch_size=16, verbose=0, callbacks=[Interrupted()]))
found["generator"] = failure(lambda: model.fit(((x, y) for _ in range(9)), steps_per_epoch=2, verbose=0))
found["reduce"] = failure(lambda: strategy.reduce("SUM", np.float32(1)))
steps = int(model.optimizer.iterations)
logger = Logger()
found["after"] = model.fit(x, y, batch_size=16, verbose=0, callbacks=[phalanx.callbacks.OnChief(logger)]).history
found["logged"] = logger.epochs
found["steps"] = int(model.optimizer.iterations) - steps
found["again"] = phalanx.MirroredStrategy(2).num_replicas_in_sync
if "SHORT" not in os.environ:
    phalanx.leave_job()
    found["left"] = failure(lambda: model.fit(x, y, batch_size=16, verbose=0))
    three = phalanx.MirroredStrategy(3)
    found["replaced"] = failure(lambda: model.evaluate(x, y, verbose=0))
    with three.scope():
        train(make(), "three")

print("FOUND", json.dumps(found))
