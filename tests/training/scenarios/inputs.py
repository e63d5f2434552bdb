"""Every kind of input that `fit` accepts. Inputs yield global batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import layers

import phalanx
from tests.support.seeds import set_random_seed
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
    weights,
)
from tests.training.scenarios.registry import BACKENDS, ON_TENSORFLOW, ONE_BACKEND, Setting, scenario


def _generate(rounds: int = 1) -> Iterator[Any]:
    x, y, weight = features(), labels(), weights()
    for _ in range(rounds):
        for start in range(0, SAMPLES, BATCH):
            rows = slice(start, start + BATCH)
            yield x[rows], y[rows], weight[rows]


@scenario(needs=("tensorflow",), quick=ON_TENSORFLOW)
def tf_dataset(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((features(), labels())).batch(BATCH)
    model = compiled(setting, metrics=["accuracy"])
    found = fitted_on(model, data, validation_data=data)
    return found | {
        "evaluate": model.evaluate(data, verbose=0, return_dict=True),
        "predict": model.predict(data, verbose=0),
    }


@scenario(needs=("tensorflow",), quick=ON_TENSORFLOW)
def validation_data_without_a_batch(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    few = tf.data.Dataset.from_tensor_slices((features()[:2], labels()[:2])).batch(4, drop_remainder=True)
    model = compiled(setting, metrics=["accuracy"])
    return fitted_on(model, features(), y=labels(), batch_size=BATCH, validation_data=few)


@scenario(needs=("tensorflow",))
def tf_dataset_repeated_with_steps(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((features(), labels())).batch(BATCH).repeat()
    return fitted_on(compiled(setting), data, steps_per_epoch=4, class_weight={0: 1.0, 1: 2.0, 2: 0.5})


@scenario(needs=("tensorflow",))
def tf_dataset_shuffled_by_seed(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((features(), labels())).shuffle(50, seed=4).batch(BATCH)
    return fitted_on(compiled(setting), data)


class Pages(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return features()[rows], labels()[rows]


@scenario(quick=ONE_BACKEND)
def py_dataset(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, metrics=["accuracy"])
    found = fitted_on(model, Pages(workers=1), class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    return found | {
        "evaluate": model.evaluate(Pages(workers=1), verbose=0, return_dict=True),
        "predict": model.predict(Pages(workers=1), verbose=0),
    }


class DrawsWhenBuilt(layers.Layer):
    def build(self, input_shape: Any) -> None:
        self.inner = layers.Dense(CLASSES, activation="softmax")  # its seed is drawn now
        self.inner.build(input_shape)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


@scenario(quick=("torch",), worlds=(2,))
def shuffled_batches_from_which_a_model_is_built(setting: Setting) -> dict[str, Any]:
    """Keras shuffles a `PyDataset` and draws the seeds of weights from one generator, in this order."""
    set_random_seed(3)
    return fitted_on(compiled(setting, lambda: keras.Sequential([DrawsWhenBuilt()])), Pages(), shuffle=True)


class Copier(keras.Sequential):  # type: ignore[misc]
    """Expects as many items as its dataset's elements have, and learns to return its inputs."""

    items: int

    def train_step(self, *arguments: Any) -> Any:
        """Receives the state on JAX, and only the data on other backends."""
        assert len(arguments[-1]) == self.items
        return super().train_step(*arguments)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        return keras.ops.mean(keras.ops.square(x - y_pred))


@scenario(quick=ONE_BACKEND)
def generator_whose_elements_have_absent_parts(setting: Setting) -> dict[str, Any]:
    """They are passed to a custom `train_step`, so that `x, y = data` works."""
    found = {}
    for absent in ((None,), (None, None)):
        model = compiled(setting, lambda: Copier([keras.layers.Dense(FEATURES)]), loss=None)
        model.items = 1 + len(absent)
        elements = ((x, *absent) for x, *_ in _generate(rounds=3))
        found[f"{model.items} items"] = fitted_on(model, elements, steps_per_epoch=3)
    return found


class ShortPages(Pages):
    """Nine batches, the last of one sample."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * 4, (index + 1) * 4)
        return features()[rows], labels()[rows]


def _fitted_twice(setting: Setting, build: Any, data: Any, **arguments: Any) -> dict[str, Any]:
    """Return the results of `fit` for a model that it builds itself and for one that is already built."""
    random.seed(5 if setting.rank == 0 else None)  # the chief's counts
    model = compiled(setting, build)
    first = fitted_on(model, data, shuffle=True, **arguments)
    second = fitted_on(model, data, shuffle=True, **arguments)
    return {"first": first, "second": second}


def _unbuilt() -> Any:
    return keras.Sequential([keras.layers.Dense(CLASSES, activation="softmax", kernel_initializer="ones")])


@scenario()
def numbers_drawn_after_shuffled_arrays(setting: Setting) -> dict[str, Any]:
    """What a program that splits its data at random draws next. TensorFlow and PyTorch shuffle with other
    generators."""
    set_random_seed(3)
    model = compiled(setting, classifier)
    history = fitted_on(model, features(), y=labels(), shuffle=True)
    return {**history, "drawn": np.random.permutation(20)}


@scenario()
def py_dataset_shuffled(setting: Setting) -> dict[str, Any]:
    return _fitted_twice(setting, classifier, ShortPages())


@scenario()
def py_dataset_shuffled_for_a_model_without_shapes(setting: Setting) -> dict[str, Any]:
    return _fitted_twice(setting, _unbuilt, ShortPages(), steps_per_epoch=6)


# Keras's pool carries batches of the pass that it began to see a model's shapes into the first epoch, elsewhere.
@scenario(backends=("tensorflow",))
def py_dataset_shuffled_in_a_pool(setting: Setting) -> dict[str, Any]:
    return _fitted_twice(setting, classifier, ShortPages(workers=2))


def _shuffled_loader(setting: Setting, **options: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    if setting.rank == 0:
        torch.manual_seed(5)
    else:
        torch.seed()
    samples = TensorDataset(torch.from_numpy(features()), torch.from_numpy(labels()))
    return DataLoader(samples, **{"batch_size": 5, "shuffle": True, **options})


@scenario(needs=("torch",))
def data_loader_shuffled(setting: Setting) -> dict[str, Any]:
    data = _shuffled_loader(setting)
    return _fitted_twice(setting, classifier, data, validation_data=_shuffled_loader(setting, shuffle=False))


@scenario(needs=("torch",))
def data_loader_shuffled_for_a_model_without_shapes(setting: Setting) -> dict[str, Any]:
    return _fitted_twice(setting, _unbuilt, _shuffled_loader(setting, drop_last=True))


@scenario(needs=("torch",))
def data_loader_shuffled_with_steps(setting: Setting) -> dict[str, Any]:
    return _fitted_twice(setting, classifier, _shuffled_loader(setting), steps_per_epoch=4)


@scenario(needs=("torch",))
def data_loader_shuffled_by_a_generator_of_its_own(setting: Setting) -> dict[str, Any]:
    import torch

    own = torch.Generator().manual_seed(2)
    return _fitted_twice(setting, classifier, _shuffled_loader(setting, generator=own, batch_size=11))


@scenario(needs=("torch",), worlds=(2,))
def data_loader_shuffled_with_workers(setting: Setting) -> dict[str, Any]:
    return _fitted_twice(setting, classifier, _shuffled_loader(setting, num_workers=1, batch_size=11))


class _Buckets:
    """A batch sampler that shuffles when its iterator is created, and not with the first batch."""

    def __init__(self, shuffle: Any) -> None:
        self._shuffle = shuffle

    def __iter__(self) -> Any:
        batches = [list(range(start, min(start + 8, SAMPLES))) for start in range(0, SAMPLES, 8)]
        self._shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return -(-SAMPLES // 8)


@scenario(backends=("torch",))
def data_loader_shuffled_by_batches_at_once(setting: Setting) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def shuffled(batches: list[Any]) -> None:
        batches[:] = [batches[index] for index in torch.randperm(len(batches))]

    set_random_seed(3)
    samples = TensorDataset(torch.from_numpy(features()), torch.from_numpy(labels()))
    found = {}
    for name, shuffle in (("random", random.shuffle), ("numpy", np.random.shuffle), ("torch", shuffled)):
        loader = DataLoader(samples, batch_sampler=_Buckets(shuffle))
        found[name] = fitted_on(compiled(setting), loader, epochs=3)
        found[f"{name} in parts"] = fitted_on(compiled(setting), loader, epochs=3, steps_per_epoch=2)
    return {**found, "drawn": [random.random(), np.random.random(), float(torch.rand(()))]}


@scenario(needs=("torch",), worlds=(2, 3))
def data_drawn_from_torch_between_methods(setting: Setting) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset, random_split

    def draw(samples: int) -> Any:
        return torch.randn(samples, FEATURES).numpy()

    torch.manual_seed(6)  # on other backends it may be imported after the job has begun
    model = compiled(setting, metrics=["accuracy"])
    single = [model.train_on_batch(draw(6), labels(6), return_dict=True) for _ in range(3)]
    part, rest = random_split(TensorDataset(torch.from_numpy(features()), torch.from_numpy(labels())), [23, 10])
    loaders = DataLoader(part, batch_size=BATCH, shuffle=True), DataLoader(rest, batch_size=BATCH)
    result = fitted_on(model, loaders[0], validation_data=loaders[1])
    evaluated = model.evaluate(draw(7), labels(7), verbose=0, return_dict=True)
    model.predict(draw(5), verbose=0)
    # What a layer draws differs between the replicas, and from one process; what the program draws next is the same.
    dropout = compiled(setting, lambda: keras.Sequential([layers.Dropout(0.5), layers.Dense(3, "softmax")]))
    for _ in range(2):
        dropout.train_on_batch(draw(6), labels(6))
    dropout.fit(draw(8), labels(8), verbose=0)
    dropout.fit(draw(8), labels(8), verbose=0)
    return {"single": single, "evaluate": evaluated, **result}


@scenario(needs=("torch",), quick=ONE_BACKEND)
def data_loader(setting: Setting) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    samples = TensorDataset(torch.from_numpy(features()), torch.from_numpy(labels()))
    model = compiled(setting, metrics=["accuracy"])
    data = DataLoader(samples, batch_size=BATCH)
    return fitted_on(model, data) | {"evaluate": model.evaluate(data, verbose=0, return_dict=True)}


@scenario(needs=("torch",), backends=("torch",))
def data_loader_whose_sampler_ends_before_its_length(setting: Setting) -> dict[str, Any]:
    from torch.utils.data import Sampler

    class Half(Sampler):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(features())

        def __iter__(self) -> Any:
            return iter(range(len(self) // 2))

    # The epoch ends between two updates, at a step that does not look like the last one.
    optimizer = keras.optimizers.SGD(0.2, gradient_accumulation_steps=3)
    model = compiled(setting, optimizer=optimizer, metrics=["accuracy"])
    return fitted_on(model, _shuffled_loader(setting, shuffle=False, sampler=Half()))


@scenario(quick=ONE_BACKEND)
def generator(setting: Setting) -> dict[str, Any]:
    return fitted_on(compiled(setting, metrics=["accuracy"]), _generate(2), steps_per_epoch=3)


@scenario(quick=BACKENDS)
def generators_begin_before_the_callbacks(setting: Setting) -> dict[str, Any]:
    """Keras reads two batches first, even without an epoch."""
    model = compiled(setting, optimizer=keras.optimizers.SGD(0.1))
    model.fit(features(), labels(), batch_size=16, shuffle=False, verbose=0)  # now it is built
    random.seed(4)
    factor = 1.0

    def batches() -> Any:
        while True:
            yield factor * (1.0 + random.random()) * features(8), labels(8)

    class Change(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            nonlocal factor
            factor += 1.0

    def fit(initial_epoch: int) -> Any:
        options = {"steps_per_epoch": 3, "epochs": 2, "initial_epoch": initial_epoch, "verbose": 0}
        return model.fit(batches(), callbacks=[Change()], **options).history

    history = [fit(2), fit(0)]
    # On TensorFlow, Keras reads ahead as far as its threads get.
    drawn = 0.0 if keras.backend.backend() == "tensorflow" else random.random()
    return {"history": history, "drawn": drawn, "weights": model.get_weights()}


@scenario()
def generator_predicted(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    return {"predict": model.predict(((x,) for x, _, _ in _generate()), verbose=0)}


@scenario(needs=("pandas",))
def pandas_frame(setting: Setting) -> dict[str, Any]:
    import pandas

    frame = pandas.DataFrame(features(), columns=[f"c{i}" for i in range(FEATURES)])
    model = compiled(setting)
    history = model.fit(
        frame,
        pandas.Series(labels()),
        sample_weight=pandas.Series(weights()),
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    return {"history": history.history, "predict": model.predict(frame, batch_size=BATCH, verbose=0)}


@scenario()
def tensors_of_the_backend(setting: Setting) -> dict[str, Any]:
    model = compiled(setting)
    x, y = keras.ops.convert_to_tensor(features()), keras.ops.convert_to_tensor(labels())
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {"history": history.history, "weights": model.get_weights()}


@scenario(quick=BACKENDS, quick_of_three=True)
def fewer_samples_than_replicas(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, metrics=["accuracy"])
    x, y = features(1), labels(1)
    history = model.fit(x, y, epochs=2, verbose=0, shuffle=False)
    return {
        "history": history.history,
        "weights": model.get_weights(),
        "predict": model.predict(x, verbose=0),
        "evaluate": model.evaluate(x, y, verbose=0, return_dict=True),
    }


@scenario(plain=False)
def pipelines_of_each_rank(setting: Setting) -> dict[str, Any]:
    """`distribute_datasets_from_function`: rank 0 has one batch more than the others, and all batches are used."""
    model = compiled(setting)
    samples = 12 if setting.rank == 0 else 8
    x, y = features(samples, seed=setting.rank), labels(samples, seed=setting.rank)

    class Own(keras.utils.PyDataset):
        def __len__(self) -> int:
            return samples // 4

        def __getitem__(self, index: int) -> Any:
            return x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]

    data = setting.strategy.distribute_datasets_from_function(lambda context: Own())
    found = fitted_on(model, data)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations.value)) == 6
    return found


@scenario(quick=ONE_BACKEND)
def datasets_that_a_function_creates(setting: Setting) -> dict[str, Any]:
    """`DatasetCreator`, in `fit` with validation data, `evaluate` and `predict`; also without a strategy."""
    x, y = features(24), labels(24)

    class Part(keras.utils.PyDataset):
        def __init__(self, context: Any) -> None:
            super().__init__()
            self._share = context.get_per_replica_batch_size(12)
            self._id = context.input_pipeline_id

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            start = 12 * index + self._share * self._id
            return x[start : start + self._share], y[start : start + self._share]

    data, model = phalanx.DatasetCreator(Part), compiled(setting, metrics=["accuracy"])
    found = fitted_on(model, data, validation_data=phalanx.DatasetCreator(Part))
    return found | {"evaluate": model.evaluate(data, verbose=0, return_dict=True)}


def _merged_pipelines(setting: Setting, sizes: list[int]) -> dict[str, Any]:
    ends = np.cumsum([0, *sizes])
    start, stop = (0, ends[-1]) if setting.alone else ends[setting.rank : setting.rank + 2]

    class One(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return features(12)[start:stop], labels(12)[start:stop]

    data: Any = One()
    if not setting.alone:
        data = setting.strategy.distribute_datasets_from_function(lambda context: One())
    return fitted_on(compiled(setting, metrics=["accuracy"]), data)


@scenario(worlds=(2,))
def pipelines_of_two_ranks_merge_as_one_batch(setting: Setting) -> dict[str, Any]:
    """Local batches of 5 and 3 samples form a global batch of 8."""
    return _merged_pipelines(setting, [5, 3])


@scenario(worlds=(3,))
def pipelines_of_three_ranks_merge_as_one_batch(setting: Setting) -> dict[str, Any]:
    return _merged_pipelines(setting, [5, 3, 4])


@scenario()
def shuffled_between_other_passes(setting: Setting) -> dict[str, Any]:
    """On PyTorch, each pass over any data draws from the generator that shuffles."""
    set_random_seed(3)
    model = compiled(setting)
    shuffled = {"batch_size": 8, "shuffle": True, "epochs": 3}
    found = [fitted_on(model, features(), y=labels(), validation_split=0.3, **shuffled)]
    model.evaluate(features(), labels(), batch_size=7, verbose=0)
    found.append(fitted_on(model, features(), y=labels(), validation_data=(features(), labels()), **shuffled))
    model.evaluate(ShortPages(), verbose=0)
    model.predict(features(), batch_size=7, verbose=0)
    model.predict(((x,) for x, _, _ in _generate()), verbose=0)
    found.append(fitted_on(model, features(), y=labels(), **shuffled))
    model.train_on_batch(features(), labels())
    fitted_on(model, features(), y=labels())
    found.append(fitted_on(model, features(), y=labels(), **shuffled))
    return {str(number): one for number, one in enumerate(found)}


class Reshuffled(ShortPages):
    """As in many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self._order = np.arange(9)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(int(self._order[index]))

    def on_epoch_end(self) -> None:
        np.random.default_rng(1).shuffle(self._order)


@scenario()
def py_dataset_that_reshuffles_itself_is_predicted_as_it_is(setting: Setting) -> dict[str, Any]:
    model, data = compiled(setting), Reshuffled()
    first = model.predict(data, verbose=0)
    return {"predict": first, "again": model.predict(data, verbose=0), "fit": fitted_on(model, data)}
