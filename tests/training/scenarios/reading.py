"""When and where data is read: as plain Keras reads it, in the caller's thread and never ahead of the step."""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import phalanx
from tests.training.scenarios.common import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    classifier,
    compiled,
    features,
    fitted_on,
    labels,
)
from tests.training.scenarios.inputs import ShortPages
from tests.training.scenarios.registry import BACKENDS, EACH_KIND, ON_TENSORFLOW, ONE_BACKEND, Setting, add, scenario

BATCHES = 6
SIZE = 4


class Refilled(keras.utils.PyDataset):
    """Fills one buffer and returns it, again and again."""

    def __init__(self) -> None:
        super().__init__()
        # Not aligned: XLA may read aligned memory in place, also in plain Keras, while the buffer is filled again.
        self._x = np.zeros(SIZE * FEATURES + 1, np.float32)[1:].reshape(SIZE, FEATURES)
        self._y = np.zeros(SIZE + 1, np.int32)[1:]

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * SIZE, (index + 1) * SIZE)
        self._x[:], self._y[:] = features()[rows], labels()[rows]
        return self._x, self._y


@scenario(quick=EACH_KIND)
def py_dataset_that_fills_one_buffer(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, metrics=["accuracy"])
    found = fitted_on(model, Refilled(), validation_data=Refilled())
    return found | {
        "evaluate": model.evaluate(Refilled(), verbose=0, return_dict=True),
        "predict": model.predict(Refilled(), verbose=0),
    }


def _refilled() -> Iterator[Any]:
    data = Refilled()
    for index in range(BATCHES):
        yield data[index]


@scenario(quick=ONE_BACKEND)
def generator_that_fills_one_buffer(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    found = fitted_on(model, _refilled(), epochs=1)
    return found | {
        "evaluate": model.evaluate(_refilled(), verbose=0, return_dict=True),
        "predict": model.predict(((x,) for x, _ in _refilled()), verbose=0),
    }


@scenario(backends=("jax", "tensorflow"), quick=("jax",))
def py_dataset_that_fills_one_buffer_for_several_steps_at_once(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, steps_per_execution=4)
    found = fitted_on(model, Refilled())
    return found | {
        "evaluate": model.evaluate(Refilled(), verbose=0, return_dict=True),
        "predict": model.predict(Refilled(), verbose=0),
    }


class InDatabase(keras.utils.PyDataset):
    """Reads over a connection that only the thread which opened it may use."""

    def __init__(self, *, any_thread: bool) -> None:
        super().__init__()
        self._connection = sqlite3.connect(":memory:", check_same_thread=not any_thread)
        self._connection.execute("create table samples (number integer primary key, x blob, y integer)")
        rows = [(i, x.tobytes(), int(y)) for i, (x, y) in enumerate(zip(features(), labels(), strict=True))]
        self._connection.executemany("insert into samples values (?, ?, ?)", rows)

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index: int) -> Any:
        query = "select x, y from samples where number >= ? and number < ? order by number"
        rows = self._connection.execute(query, (index * BATCH, (index + 1) * BATCH)).fetchall()
        return np.stack([np.frombuffer(x, np.float32) for x, _ in rows]), np.array([y for _, y in rows], np.int32)


@scenario(quick=ONE_BACKEND)
def data_bound_to_a_thread(setting: Setting) -> dict[str, Any]:
    # Keras on TensorFlow reads in TensorFlow's threads.
    data = InDatabase(any_thread=setting.alone and setting.backend == "tensorflow")
    model = compiled(setting)
    found = fitted_on(model, data, validation_data=data)
    return found | {
        "evaluate": model.evaluate(data, verbose=0, return_dict=True),
        "predict": model.predict(data, verbose=0),
    }


def _encoder(setting: Setting) -> Any:
    with setting.scope():
        return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(FEATURES, activation="tanh")])


def _encoded(encoder: Any) -> Iterator[Any]:
    x, y = features(), labels()
    for _ in range(4):
        for start in range(0, SAMPLES, BATCH):
            rows = slice(start, start + BATCH)
            yield encoder.predict(x[rows], verbose=0), y[rows]


@scenario(quick=ONE_BACKEND)
def generator_that_predicts_with_another_model(setting: Setting) -> dict[str, Any]:
    encoder = _encoder(setting)
    model = compiled(setting, classifier)
    found = fitted_on(model, _encoded(encoder), steps_per_epoch=3)
    return found | {"evaluate": model.evaluate(_encoded(encoder), steps=3, verbose=0, return_dict=True)}


@scenario(quick=ONE_BACKEND)
def py_dataset_that_predicts_with_another_model(setting: Setting) -> dict[str, Any]:
    encoder = _encoder(setting)

    class Encoded(Refilled):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return encoder.predict_on_batch(x), y

    return fitted_on(compiled(setting), Encoded(), validation_data=Encoded())


@scenario(backends=("torch",), quick=("torch",))
def generator_that_predicts_with_the_model_itself(setting: Setting) -> dict[str, Any]:
    """On JAX plain Keras cannot; on TensorFlow it reads at any time, in another thread."""
    model = compiled(setting)

    def mined() -> Iterator[Any]:
        x, y = features(), labels()
        for step in range(6):
            rows = np.argsort(model.predict(x, verbose=0)[:, step % 3], kind="stable")[:7]
            yield x[rows], y[rows]

    return fitted_on(model, mined(), steps_per_epoch=3)


@scenario(quick=ONE_BACKEND, needs=("torch",), error=dict.fromkeys(BACKENDS, ("UnsupportedError", "torch DataLoader")))
def samples_that_predict_with_another_model(setting: Setting) -> dict[str, Any]:
    """Each replica loads its own samples."""
    import torch

    encoder = _encoder(setting)

    class Encoded(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            return encoder.predict(features()[index : index + 1], verbose=0)[0], labels()[index]

    return fitted_on(compiled(setting), torch.utils.data.DataLoader(Encoded(), batch_size=BATCH))


@scenario(quick=ONE_BACKEND, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "in a thread, while another one")))
def py_dataset_whose_workers_predict(setting: Setting) -> dict[str, Any]:
    encoder = _encoder(setting)

    class Encoded(Refilled):
        def __getitem__(self, index: int) -> Any:
            rows = slice(index * SIZE, (index + 1) * SIZE)
            return encoder.predict(features()[rows], verbose=0), labels()[rows]

    data = Encoded()
    data.workers = 2
    return fitted_on(compiled(setting), data)


class Augmented(Refilled):
    """Draws random numbers for each batch."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + np.random.normal(size=x.shape).astype("float32"), y


@scenario(quick=EACH_KIND)
def py_dataset_that_draws_random_numbers(setting: Setting) -> dict[str, Any]:
    """The same number of batches is read as in Keras, by models that are built and by others."""
    model = compiled(setting, metrics=["accuracy"])
    first = fitted_on(model, Augmented(), epochs=2)
    second = fitted_on(model, Augmented(), validation_data=Augmented())
    return {
        "first": first,
        "second": second,
        "evaluate": model.evaluate(Augmented(), verbose=0, return_dict=True),
        "predict": model.predict(Augmented(), verbose=0),
        "drawn": np.random.normal(size=3),
    }


def _drawn(count: int, size: int = SIZE) -> Iterator[Any]:
    import torch

    for _ in range(count):
        yield torch.randn(size, FEATURES).numpy(), torch.randint(CLASSES, (size,)).numpy()


class Drawn(Refilled):
    """Draws each batch from PyTorch."""

    def __getitem__(self, index: int) -> Any:
        return next(_drawn(1))


# On TensorFlow, Keras reads ahead in a thread, and which of two generators draws first is not known.
@scenario(backends=("jax", "torch"), needs=("torch",), worlds=(2, 3))
def data_drawn_from_torch_while_it_is_read(setting: Setting) -> dict[str, Any]:
    import torch

    torch.manual_seed(4)
    model = compiled(setting, metrics=["accuracy"])
    streams = fitted_on(model, _drawn(8), epochs=2, steps_per_epoch=4, validation_data=_drawn(4), validation_steps=2)
    datasets = fitted_on(model, Drawn(), validation_data=Drawn())
    return {
        "streams": streams,
        "datasets": datasets,
        "evaluate": model.evaluate(Drawn(), verbose=0, return_dict=True),
        "predict": model.predict(_drawn(3), verbose=0),
        "drawn": torch.randn(3).numpy(),
    }


class _Watcher(keras.callbacks.Callback):
    """Draws on the chief alone, and predicts there."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = [random.random()]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import torch

        loader = torch.utils.data.DataLoader(_Noisy(), batch_size=3)
        self.drawn += [random.random(), np.random.normal(), float(torch.randn(())), float(next(iter(loader))[0][0, 0])]
        assert len(set(self.drawn)) == len(self.drawn)
        self.model.predict(torch.randn(3, FEATURES).numpy(), verbose=0)


class _Noisy:
    """A map-style dataset that draws for each sample, of which each replica loads its own."""

    def __len__(self) -> int:
        return 33

    def __getitem__(self, index: int) -> Any:
        import torch

        noise = torch.randn(FEATURES) + random.random() + np.random.normal()
        return torch.from_numpy(features()[index]) + noise, int(labels()[index])


@scenario(needs=("torch",), worlds=(2, 3), plain=False)
def what_one_replica_draws_from_torch_alone(setting: Setting) -> dict[str, Any]:
    """Layers, chief callbacks and samples of a DataLoader draw, and the data read after them are the same all the
    same."""
    import torch

    def build() -> Any:
        return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)])

    torch.manual_seed(4)
    model = compiled(setting, build, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    first = fitted_on(model, _drawn(12), epochs=3, steps_per_epoch=4, callbacks=[phalanx.callbacks.OnChief(_Watcher)])
    loader = torch.utils.data.DataLoader(_Noisy(), batch_size=BATCH, shuffle=True)
    second = fitted_on(model, loader, epochs=2)
    third = fitted_on(model, Drawn(), validation_data=Drawn())
    drawn = [random.random(), np.random.normal(), *torch.randn(3).numpy()]
    return {"first": first, "second": second, "third": third, "drawn": drawn}


@scenario(backends=("torch",), worlds=(2, 3), plain=False)
def numbers_that_a_loss_draws_for_each_sample(setting: Setting) -> dict[str, Any]:
    """Replicas have parts of unequal size, and so draw unequally often."""

    def noisy(y: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y, y_pred) * np.random.uniform(0.9, 1.1, len(y))[0]

    random.seed(4)
    np.random.seed(4)
    model = compiled(setting, loss=noisy)
    found = fitted_on(model, Refilled())
    x = np.random.normal(size=(9, FEATURES)).astype("float32")
    model.fit(x, np.random.randint(CLASSES, size=9), batch_size=5, verbose=0)
    return {**found, "drawn": [random.random(), np.random.random()]}


def _numbered(count: int | None, taken: list[int]) -> Iterator[Any]:
    x, y = features(), labels()
    for number in itertools.count() if count is None else range(count):
        taken.append(number)
        rows = np.arange(number * 5, number * 5 + 5) % SAMPLES
        yield x[rows], y[rows]


def _steps(model: Any) -> int:
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations.value))


def _validated(count: int | None, steps: int | None) -> Callable[[Setting], dict[str, Any]]:
    """By a generator of so many batches, in so many steps."""

    def run(setting: Setting) -> dict[str, Any]:
        taken: list[int] = []
        model = compiled(setting, metrics=["accuracy"])
        data = _numbered(count, taken)
        return fitted_on(
            model, features(), y=labels(), epochs=3, batch_size=BATCH, validation_data=data, validation_steps=steps
        ) | {"taken": len(taken)}

    return run


# On TensorFlow Keras reads ahead, as far as TensorFlow's threads come.
for _name, _arguments in {"without_an_end": (None, 3), "to_its_end": (4, None), "past_its_end": (4, 3)}.items():
    _quick = EACH_KIND if _name == "past_its_end" else ONE_BACKEND
    add(f"generator_for_validation_{_name}", _validated(*_arguments), backends=EACH_KIND, quick=_quick)


@scenario(backends=("jax", "tensorflow"))
def generator_for_validation_that_ends(setting: Setting) -> dict[str, Any]:
    data = _numbered(4, [])
    return fitted_on(compiled(setting), features(), y=labels(), epochs=3, batch_size=BATCH, validation_data=data)


def _ending(count: int, steps: int | None) -> Callable[[Setting], dict[str, Any]]:
    """A generator of so many batches, in epochs of so many steps."""

    def run(setting: Setting) -> dict[str, Any]:
        taken: list[int] = []
        model = compiled(setting, metrics=["accuracy"], jit_compile=setting.backend != "torch")
        found = fitted_on(model, _numbered(count, taken), epochs=4, steps_per_epoch=steps)
        return found | {"taken": len(taken), "steps": _steps(model)}

    return run


for _name, _arguments in {"after_one_epoch": (4, None), "in_an_epoch": (5, 3), "with_an_epoch": (6, 3)}.items():
    _quick = EACH_KIND if _name == "in_an_epoch" else ONE_BACKEND
    add(f"generator_that_ends_{_name}", _ending(*_arguments), quick=_quick)


def _groups(make: Callable[[list[int]], Any], steps: int | None) -> Callable[[Setting], dict[str, Any]]:
    """Groups of two steps, of which the last one of an epoch may have a single one."""

    def run(setting: Setting) -> dict[str, Any]:
        taken: list[int] = []
        model = compiled(setting, metrics=["accuracy"], steps_per_execution=2, jit_compile=True)
        return fitted_on(model, make(taken), epochs=3, steps_per_epoch=steps) | {
            "taken": len(taken),
            "steps": _steps(model),
            "evaluate": model.evaluate(make([]), steps=steps, verbose=0, return_dict=True),
            "predict": model.predict(make([]), steps=steps, verbose=0),
        }

    return run


def _of_unknown_length(taken: list[int]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((features(), labels())).batch(5).filter(lambda x, y: True)


PARTIAL_GROUPS: dict[str, tuple[Callable[[list[int]], Any], dict[str, Any]]] = {
    "of_pages": (lambda taken: ShortPages(), {"backends": ("jax", "tensorflow")}),
    "of_a_generator": (lambda taken: _numbered(9, taken), {"backends": ("jax",)}),
    "of_unknown_length": (_of_unknown_length, {"backends": ("jax", "tensorflow"), "needs": ("tensorflow",)}),
}
for _data, (_make, _options) in PARTIAL_GROUPS.items():
    for _name, _number in {"3": 3, "5": 5, "all": None}.items():
        _quick = ("jax",) if (_data, _name) == ("of_pages", "all") else ()
        add(f"partial_groups_{_data}_in_epochs_of_{_name}_steps", _groups(_make, _number), quick=_quick, **_options)


@scenario(needs=("tensorflow",))
def epochs_that_end_where_data_of_unknown_length_do(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((features(30), labels(30))).batch(5).filter(lambda x, y: True)
    model = compiled(setting, jit_compile=setting.backend != "torch")
    return fitted_on(model, data, epochs=5, steps_per_epoch=3) | {"steps": _steps(model)}


@scenario(needs=("torch",), quick=ONE_BACKEND)
def data_loader_that_pads_to_the_longest_sample(setting: Setting) -> dict[str, Any]:
    import torch

    lengths = np.random.default_rng(4).integers(1, 9, 20)
    tokens = [torch.arange(1, 1 + int(length)) for length in lengths]

    def collate(samples: list[Any]) -> Any:
        x = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        return x, torch.stack([y for _, y in samples])

    def build() -> Any:
        inputs = keras.Input((None,), dtype="int32")
        embedded = keras.layers.Embedding(10, 4)(inputs)
        mean = keras.layers.GlobalAveragePooling1D()(embedded)  # over the padding, too
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(mean))

    samples = list(zip(tokens, torch.from_numpy(labels(20)), strict=True))
    data = torch.utils.data.DataLoader(samples, batch_size=8, collate_fn=collate)
    return fitted_on(compiled(setting, build), data)


@scenario(needs=("tensorflow",), quick=ON_TENSORFLOW)
def files_are_read_as_by_one_process(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    names = []
    for number in range(3):
        path = setting.shared / f"{setting.rank}-{number}.txt"
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in features(11, seed=number)))
        names.append(str(path))

    def parse(line: Any) -> Any:
        values = tf.strings.to_number(tf.strings.split(line, ","))
        x = tf.ensure_shape(values, (FEATURES,))
        return x, tf.cast(x[0] > 0, tf.int32)

    data = tf.data.TextLineDataset(names).map(parse).batch(8)
    model = compiled(setting)
    return fitted_on(model, data) | {"evaluate": model.evaluate(data, verbose=0, return_dict=True)}
