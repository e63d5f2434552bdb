"""What a user does in an interactive session that copies of a model must have too. Read from stdin; prints JSON.

Each function trains alone and then on two replicas.
"""

import collections
import dataclasses
import json
import os
import tempfile

import keras
import numpy as np

import phalanx
from tests.support.seeds import set_random_seed

found = {}
x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
y = x[:, :1] * 2 + x[:, 1:2]
session = os.getpid()


@dataclasses.dataclass
class Options:
    power: int = 1


class Scale(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.factors = [1.0]

    def call(self, inputs):
        return inputs * self.factors[-1]


class Net(keras.Model):  # as notebooks have them: no get_config
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4)
        self.dropout = keras.layers.Dropout(0.0)
        self.rescale = Scale()
        self.head = keras.layers.Dense(1)
        self.act = None
        self.scale = 1.0
        self.options = Options()
        self.calls = 0

    def call(self, inputs):
        self.calls += 1
        output = self.rescale(self.head(self.dropout(self.hidden(inputs)))) ** self.options.power * self.scale
        return output if self.act is None else self.act(output)


class Scaled(keras.optimizers.SGD):
    def __init__(self, rate, factor=1.0, **kwargs):
        super().__init__(rate, **kwargs)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.factor, variable, learning_rate)


class Within(keras.metrics.Metric):
    def __init__(self, distance=1.0, name="within"):
        super().__init__(name=name)
        self.distance = distance
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, true, predicted, sample_weight=None):
        near = keras.ops.abs(true - predicted) < self.distance
        self.count.assign_add(keras.ops.sum(keras.ops.cast(near, "float32")))

    def result(self):
        return self.count.value


class Differing(keras.layers.Layer):
    """Returns another dtype in the session than in the other processes."""

    def call(self, inputs):
        return keras.ops.cast(inputs, "float16" if os.getpid() == session else "float32")


def make(optimizer="sgd", kind=Net, metrics=None):
    set_random_seed(1)
    model = kind()
    model.compile(optimizer, "mse", metrics=metrics)
    return model


def sequential():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])


def fit(model, **options):
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, **options).history
    return [history[name] for name in sorted(history)]


def attributes():
    model = make()
    model.scale, model.options.power = 3.0, 2
    model.rescale.factors.append(0.5)
    results = fit(model)
    model.scale = np.float32(0.5)  # where functions are compiled, they keep the former one
    results += fit(model)
    model.compile("sgd", "mse")  # the same as before
    results += [*fit(model), model.predict(x, verbose=0).tolist()]
    return results


def optimizers():
    results = fit(make(Scaled(0.05, factor=0.1)))
    model = make(Scaled(0.05))
    model.optimizer.factor, model.optimizer.learning_rate = 0.2, 0.02
    results += fit(model)
    for chosen in ({"var_names": ["bias"]}, {"var_list": None}):
        model = make(keras.optimizers.AdamW(0.05, weight_decay=0.5), sequential)
        if "var_list" in chosen:
            model.evaluate(x, y, verbose=0)  # which makes copies
            chosen = {"var_list": [model.layers[0].kernel]}
        model.optimizer.exclude_from_weight_decay(**chosen)
        results += fit(model)
    return results


def settings():
    epsilon = keras.config.epsilon()
    keras.config.set_epsilon(10.0)
    results = fit(make(metrics=["mape"]))
    keras.config.set_epsilon(epsilon)
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = make()
    keras.config.set_dtype_policy("float32")
    predicted = model.predict(x, verbose=0)
    return [*results, np.asarray(predicted, "float32").tolist()]


def compilation():
    results = fit(make(metrics=[Within(3.0)]))
    model = make(metrics=["mae"])
    results += fit(model)
    model.compile("adam", "mse")
    return results + fit(model)


def backup():
    return fit(make(kind=sequential), callbacks=[keras.callbacks.BackupAndRestore(tempfile.mkdtemp())])


def quantized():
    model = make("adam", sequential)
    results = fit(model)
    model.quantize("int8")
    return [*results, model.predict(x, verbose=0).tolist()]


def failure(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_new(**values):
    model = make()
    for name, value in values.items():
        setattr(model, name, value)
    return model


functions = (attributes, optimizers, settings, compilation, backup, quantized)
plain = {function.__name__: function() for function in functions}
strategy = phalanx.MirroredStrategy(2)
with strategy.scope():
    found["equal"] = {function.__name__: (plain[function.__name__], function()) for function in functions}
    found["layer"] = failure(lambda: with_new(act=keras.layers.Activation("tanh")).predict(x, verbose=0))
    found["function"] = failure(lambda: with_new(act=lambda values: values + 1).predict(x, verbose=0))
    found["array"] = failure(lambda: with_new(scale=np.float32([3])).predict(x, verbose=0))
    found["deque"] = failure(lambda: with_new(scale=collections.deque([3])).predict(x, verbose=0))
    different = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), Differing()])
    found["mismatch"] = failure(lambda: different.predict(x, verbose=0))
    found["after"] = failure(lambda: make().predict(x, verbose=0))

print("FOUND", json.dumps(found))
