"""What a program does with a ClusterCoordinator, and the program that does it: `python -m tests.coordinator.cases
FOLDER CASE...`.

Every task runs it. The chief runs the cases, and writes what each found; the assertions are in `test_jobs.py`. What is
scheduled is of the main program, so it travels by value.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from phalanx.coordinator import ClusterCoordinator
from tests.coordinator.serving import serve_if_asked
from tests.support.seeds import set_random_seed

WORKERS_COME_S = 60.0

SAMPLES, FEATURES, CLASSES, BATCH = 96, 6, 3, 16
KERNELS_DRAWN_WITH_SEED = 3


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, np.argmax(x[:, :CLASSES], axis=1).astype("int32")


class Counter(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)


class World:
    """What the program made in scope, on every task alike."""

    def __init__(self, scope: Any) -> None:
        set_random_seed(KERNELS_DRAWN_WITH_SEED)
        with scope:
            self.model = keras.Sequential(
                [
                    keras.Input((FEATURES,)),
                    keras.layers.Dense(8, activation="tanh"),
                    keras.layers.Dense(CLASSES),
                ]
            )
            self.optimizer = keras.optimizers.Adam(0.02)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
            self.mean = keras.metrics.Mean()
            self.normalize = keras.layers.BatchNormalization(center=False, scale=False)
            self.normalize.build((None, FEATURES))
            self.drop = keras.layers.Dropout(0.5)
            self.counter = Counter()


def steps_of(world: World) -> Callable[..., float]:
    """A function that makes training steps in the manner of the backend: one for each batch that it is given."""
    model, optimizer, accuracy = world.model, world.optimizer, world.accuracy
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        @jax.jit
        def gradients_of(trainable: Any, state: Any, x: Any, y: Any) -> Any:
            def loss(trainable: Any) -> Any:
                logits, _ = model.stateless_call(trainable, state, x, training=True)
                return loss_of(y, logits), logits

            return jax.value_and_grad(loss, has_aux=True)(trainable)

        def step(x: Any, y: Any) -> float:
            trainable = [variable.value for variable in model.trainable_variables]
            state = [variable.value for variable in model.non_trainable_variables]
            (loss, logits), gradients = gradients_of(trainable, state, x, y)
            optimizer.apply(gradients, model.trainable_variables)
            accuracy.update_state(y, logits)
            return float(loss)

    elif backend == "tensorflow":
        import tensorflow as tf

        @tf.function
        def tf_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_of(y, logits)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, logits)
            return loss

        def step(x: Any, y: Any) -> float:
            return float(tf_step(tf.constant(x), tf.constant(y)))

    else:
        import torch

        def step(x: Any, y: Any) -> float:
            model.zero_grad()
            logits = model(torch.from_numpy(x), training=True)
            loss = loss_of(torch.from_numpy(y.astype("int64")), logits)
            loss.backward()
            gradients = [variable.value.grad for variable in model.trainable_variables]
            with torch.no_grad():
                optimizer.apply(gradients, model.trainable_variables)
                accuracy.update_state(y, logits)
            return float(loss)

    def steps(batches: Any) -> float:
        return [step(x, y) for x, y in batches][-1]

    return steps


def batches_of(epoch: int) -> list[tuple[Any, Any]]:
    x, y = data()
    order = np.random.default_rng(epoch).permutation(SAMPLES)
    return [(x[rows], y[rows]) for rows in np.split(order, SAMPLES // BATCH)]


def raised_by(function: Callable[[], Any]) -> tuple[str, str, str]:
    """The class, the text and the cause of what a call raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), str(error.__cause__)
    return "", "", ""


# Cases: on the chief.


def results(coordinator: ClusterCoordinator, world: World) -> Any:
    offset = 10

    def function(x: int, times: int = 1) -> int:
        return (x + offset) * times

    values = [coordinator.schedule(function, args=(n,), kwargs={"times": 2}) for n in range(20)]
    coordinator.join()
    return {"fetched": coordinator.fetch({"all": values, "other": 5}), "done": coordinator.done()}


def results_are_arguments(coordinator: ClusterCoordinator, world: World) -> Any:
    first = coordinator.schedule(lambda: keras.ops.arange(4))
    second = coordinator.schedule(
        lambda x, more: keras.ops.sum(x) + more["n"], args=(first,), kwargs={"more": {"n": 5}}
    )
    third = coordinator.schedule(lambda: [1, second])
    kinds = coordinator.schedule(lambda x: keras.ops.is_tensor(x), args=(keras.ops.ones(3),)).fetch()
    return {
        "first": first.fetch(),
        "is_array": isinstance(first.fetch(), np.ndarray),
        "is_tensor": keras.ops.is_tensor(first.get()),
        "second": second.fetch(),
        "third": third.fetch(),
        "arguments are tensors": kinds,
    }


def all_workers(coordinator: ClusterCoordinator, world: World) -> Any:
    import time

    def where() -> int:
        time.sleep(0.05)  # so that there is something for each
        return os.getpid()

    pids: set[int] = set()
    until = time.monotonic() + WORKERS_COME_S
    while len(pids) < 2 and time.monotonic() < until:  # one may come much later than the other
        pids |= set(coordinator.fetch([coordinator.schedule(where) for _ in range(20)]))
    return {"workers": len(pids), "chief": os.getpid() in pids}


def own_numbers(coordinator: ClusterCoordinator, world: World) -> Any:
    import time

    drop = world.drop

    def dropped() -> tuple[int, list[Any]]:
        time.sleep(0.05)
        return os.getpid(), keras.ops.convert_to_numpy(drop(np.ones((1, 64), "float32"), training=True)).tolist()

    masks: dict[int, list[Any]] = {}
    until = time.monotonic() + WORKERS_COME_S
    while len(masks) < 2 and time.monotonic() < until:
        for pid, mask in coordinator.fetch([coordinator.schedule(dropped) for _ in range(20)]):
            masks.setdefault(pid, mask)
    return list(masks.values())


def errors(coordinator: ClusterCoordinator, world: World) -> Any:
    import tempfile
    import time

    all_are_scheduled = Path(tempfile.mkdtemp()) / "all are scheduled"

    def fail() -> None:
        until = time.monotonic() + 60
        while not all_are_scheduled.exists() and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyError("what went wrong")

    failing = [coordinator.schedule(fail) for _ in range(50)]
    all_are_scheduled.touch()
    at_join = raised_by(coordinator.join)
    ends = [raised_by(value.fetch)[0] for value in failing]
    after = coordinator.schedule(lambda: 1).fetch()
    coordinator.join()
    one = coordinator.schedule(fail)
    of_one = raised_by(one.fetch)
    at_schedule = raised_by(lambda: coordinator.schedule(lambda: 2))
    needs_failed = raised_by(lambda: coordinator.schedule(lambda x: x, args=(one,)))
    return {
        "join": at_join,
        "ends": sorted(set(ends)),
        "after": after,
        "fetch": of_one,
        "schedule": at_schedule,
        "needs": needs_failed,
        "done": coordinator.done(),
    }


class Odd(Exception):
    """Pickles well, and unpickles badly."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("an odd one")


def changes_after_errors(coordinator: ClusterCoordinator, world: World) -> Any:
    """What the chief assigns after a function's error was raised reaches the workers."""

    def fail() -> None:
        raise KeyError("on purpose")

    seen = []
    step, data = steps_of(world), batches_of(0)[:2]
    for value in (2.0, 3.0):
        coordinator.schedule(step, args=(data,))
        coordinator.schedule(fail)
        raised_by(coordinator.join)
        world.model.set_weights([np.full_like(weight, value) for weight in world.model.get_weights()])
        result = coordinator.schedule(lambda: [float(np.mean(weight)) for weight in world.model.get_weights()])
        coordinator.join()
        now = [float(np.mean(weight)) for weight in world.model.get_weights()]
        seen += [{"workers": result.fetch() == [value] * len(now), "chief": now == [value] * len(now)}]
    return seen


def errors_with_other_arguments(coordinator: ClusterCoordinator, world: World) -> Any:
    def fail() -> None:
        raise Odd(1, 2)

    coordinator.schedule(fail)
    return raised_by(coordinator.join)


def what_does_not_travel(coordinator: ClusterCoordinator, world: World) -> Any:
    lock = threading.Lock()
    metric = keras.metrics.Mean()
    with coordinator.strategy.scope():
        late = keras.metrics.Mean()
    returned = coordinator.schedule(lambda: threading.Lock())
    result = raised_by(coordinator.join)
    del returned
    model = world.model
    coordinator.schedule(lambda: model.fit(*data()))
    fit = raised_by(coordinator.join)
    coordinator.schedule(lambda: coordinator.schedule(lambda: 1))
    nested = raised_by(coordinator.join)
    coordinator.schedule(lambda: sys.exit(0))
    exits = raised_by(coordinator.join)
    return {
        "fit": fit,
        "nested": nested,
        "exits": exits,
        "lock": raised_by(lambda: coordinator.schedule(lambda: lock)),
        "generator": raised_by(lambda: coordinator.schedule(lambda x: x, args=((n for n in range(3)),))),
        "outside": raised_by(lambda: coordinator.schedule(lambda: metric.result())),
        "late": raised_by(lambda: coordinator.schedule(lambda: late.result())),
        "called": raised_by(lambda: coordinator.schedule(5)),
        "result": result,
        "next": raised_by(lambda: next(iter(coordinator.create_per_worker_dataset(lambda: [1])))),
        "run": raised_by(lambda: coordinator.strategy.run(lambda: 1)),
        "index": raised_by(phalanx.coordinator.experimental_get_current_worker_index),
    }


def own_datasets(coordinator: ClusterCoordinator, world: World) -> Any:
    def dataset(context: phalanx.InputContext) -> list[int]:
        index = phalanx.coordinator.experimental_get_current_worker_index()
        assert index == context.input_pipeline_id
        return [100 * index + n for n in range(1000)]

    def take(iterator: Any, count: int) -> tuple[int, list[int]]:
        return os.getpid(), [next(iterator) for _ in range(count)]

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    found = coordinator.fetch([coordinator.schedule(take, args=(iterator, 3)) for _ in range(12)])
    by_worker: dict[int, list[int]] = {}
    for pid, numbers in found:
        by_worker.setdefault(pid, []).extend(numbers)
    short = iter(coordinator.create_per_worker_dataset([1, 2]))
    coordinator.schedule(take, args=(short, 3))
    ended = raised_by(coordinator.join)
    wrong = coordinator.create_per_worker_values(lambda: 1 / 0)
    coordinator.schedule(lambda value: value, args=(wrong,))
    not_made = raised_by(coordinator.join)
    return {"numbers": sorted(by_worker.values()), "ended": ended, "not made": not_made}


def own_values(coordinator: ClusterCoordinator, world: World) -> Any:
    values = coordinator.create_per_worker_values(lambda: (os.getpid(), []))

    def visit(value: Any) -> bool:
        value[1].append(1)
        return value[0] == os.getpid() and len(value[1]) > 0

    return coordinator.fetch([coordinator.schedule(visit, args=(values,)) for _ in range(8)])


def metrics(coordinator: ClusterCoordinator, world: World) -> Any:
    mean = world.mean

    def count(value: float) -> float:
        mean.update_state([value, value])
        return float(mean.result())

    mean.update_state([5.0])
    found = []
    for _ in range(2):
        inside = [coordinator.schedule(count, args=(float(n),)) for n in range(10)]
        coordinator.join()
        found.append((float(mean.result()), float(mean.count), coordinator.fetch(inside)))
        mean.reset_state()
    return found


def functions_are_kept(coordinator: ClusterCoordinator, world: World) -> Any:
    big, calls = np.arange(100_000), []

    def function(_: int) -> tuple[int, int, int, int]:
        calls.append(1)
        return os.getpid(), len(calls), id(big), int(big.sum())

    found = coordinator.fetch([coordinator.schedule(function, args=(n,)) for n in range(12)])
    per_worker = {pid: [entry for entry in found if entry[0] == pid] for pid, *_ in found}
    return [
        ([entry[1] for entry in entries], len({entry[2] for entry in entries}), {entry[3] for entry in entries})
        for entries in per_worker.values()
    ]


def values_that_the_program_sets(coordinator: ClusterCoordinator, world: World) -> Any:
    model = world.model

    def weights() -> Any:
        return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]

    coordinator.join()
    before = model.get_weights()
    model.set_weights([np.full_like(weight, 0.5) for weight in before])
    seen = coordinator.schedule(weights).fetch()
    coordinator.join()
    after = model.get_weights()

    def set_and_return_former() -> float:
        former = model.get_weights()
        model.set_weights([weight + 1.0 for weight in former])
        return float(np.mean([weight.mean() for weight in former]))

    found = coordinator.fetch([coordinator.schedule(set_and_return_former) for _ in range(8)])
    coordinator.join()
    model.set_weights(before)
    return {
        "seen": [float(w.mean()) for w in seen],
        "after": [float(w.mean()) for w in after],
        "set by functions": found,
    }


def state_of_layers(coordinator: ClusterCoordinator, world: World) -> Any:
    layer, (x, _) = world.normalize, data()

    def mean() -> Any:
        return keras.ops.convert_to_numpy(layer.moving_mean)

    def normalize() -> Any:
        layer(keras.ops.convert_to_tensor(x), training=True)
        world.counter.count.assign(world.counter.count + 3)
        return mean()

    at_worker = coordinator.schedule(normalize).fetch()
    coordinator.join()
    return {"worker": at_worker, "chief": mean(), "count": int(world.counter.count)}


def run_inside(coordinator: ClusterCoordinator, world: World) -> Any:
    strategy = coordinator.strategy

    def function() -> Any:
        def replica(x: Any) -> Any:
            return x * phalanx.get_replica_context().num_replicas_in_sync

        inside = strategy.run(replica, args=(keras.ops.ones(2),))
        return strategy.reduce("SUM", inside, axis=0), phalanx.get_strategy() is strategy

    return coordinator.schedule(function).fetch()


def own_batches(coordinator: ClusterCoordinator, world: World) -> Any:
    """A dataset of the backend's usual kind."""
    x, y = data()

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return SAMPLES // BATCH

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return x[rows], y[rows]

    strategy = coordinator.strategy

    def make() -> Any:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        return strategy.experimental_distribute_dataset(Batches())

    def first(iterator: Any) -> Any:
        images, labels = next(iterator)
        return images, labels

    iterator = iter(coordinator.create_per_worker_dataset(make))
    images, labels = coordinator.schedule(first, args=(iterator,)).fetch()
    return bool(np.array_equal(images, x[:BATCH]) and np.array_equal(labels, y[:BATCH]))


def training(coordinator: ClusterCoordinator, world: World) -> Any:
    steps = steps_of(world)
    losses = []
    for epoch in range(12):
        world.accuracy.reset_state()
        batches = batches_of(epoch)
        values = [coordinator.schedule(steps, args=(batches[n : n + 2],)) for n in range(0, len(batches), 2)]
        coordinator.join()
        losses.append(float(np.mean(coordinator.fetch(values))))
    return {
        "losses": losses,
        "accuracy": float(world.accuracy.result()),
        "counted": float(world.accuracy.count),
        "iterations": int(world.optimizer.iterations),
        "global_step": coordinator.strategy.global_step,
    }


def training_like_one_process(coordinator: ClusterCoordinator, world: World) -> Any:
    """With one worker the numbers are those of Keras; the learning rate is set on the way."""
    steps = steps_of(world)
    plain = World(contextlib.nullcontext())
    plain_steps = steps_of(plain)
    for epoch in range(3):
        for each in (world, plain):
            each.optimizer.learning_rate = 0.02 / (epoch + 1)
        for n in range(0, SAMPLES // BATCH, 3):
            coordinator.schedule(steps, args=(batches_of(epoch)[n : n + 3],))
            plain_steps(batches_of(epoch)[n : n + 3])
        coordinator.join()
    return {
        name: [keras.ops.convert_to_numpy(variable) for variable in variables]
        for each, kind in ((world, "job"), (plain, "plain"))
        for name, variables in (
            (f"{kind} weights", each.model.variables),
            (f"{kind} optimizer", each.optimizer.variables),
            (f"{kind} metric", each.accuracy.variables),
        )
    }


def made_later(coordinator: ClusterCoordinator, world: World) -> Any:
    """Workers without a program get what is made after the coordinator, and after functions have run."""
    coordinator.schedule(lambda: 1)
    coordinator.join()
    with coordinator.strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        mean = keras.metrics.Mean()
        words = keras.layers.StringLookup()
    words.adapt(np.array([["red"], ["blue"], ["red"]]))
    weights = model.layers[-1].kernel

    def function() -> tuple[float, bool, bool]:
        mean.update_state([2.0, 4.0])
        predicted = keras.ops.convert_to_numpy(model(np.ones((1, 2), "float32")))
        return float(predicted[0, 0]), model.layers[-1].kernel is weights, model is world.model

    values = coordinator.fetch([coordinator.schedule(function) for _ in range(4)])
    coordinator.join()
    model.layers[-1].kernel.assign(keras.ops.full((2, 1), 3.0))
    changed = coordinator.schedule(function).fetch()
    numbers = coordinator.schedule(lambda: keras.ops.convert_to_numpy(words(np.array([["blue"], ["red"]])))).fetch()
    return {"values": values, "changed": changed, "mean": float(mean.result()), "numbers": numbers.tolist()}


CASES: dict[str, Callable[[ClusterCoordinator, World], Any]] = {
    case.__name__: case
    for case in (
        *(results, results_are_arguments, all_workers, errors, errors_with_other_arguments, what_does_not_travel),
        *(own_datasets, own_values, metrics, functions_are_kept, values_that_the_program_sets, run_inside, own_batches),
        *(state_of_layers, own_numbers),
        *(training, training_like_one_process),
        changes_after_errors,
        made_later,
    )
}


def main() -> None:
    serve_if_asked()
    folder = Path(sys.argv[1])
    strategy = phalanx.ParameterServerStrategy()
    world = World(strategy.scope())
    coordinator = ClusterCoordinator(strategy)
    assert ClusterCoordinator(strategy) is coordinator
    for name in sys.argv[2:]:
        (folder / name).write_bytes(pickle.dumps(CASES[name](coordinator, world)))


if __name__ == "__main__":
    main()
