"""Keras's data adapters: which arrays Keras accepts, which dtypes they get, in which order samples are visited.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.arrays.tree import leaves
from phalanx.errors import ConfigurationError

NUM_BATCHES_FOR_SHAPES = 2
"""Number of batches that Keras reads at once from a generator, and on TensorFlow from a PyDataset, to find shapes."""


def is_arrays(x: Any, y: Any, sample_weight: Any) -> bool:
    """Whether Keras accepts these as arrays in memory (NumPy, pandas, SciPy, tensors of any backend)."""
    from keras.src.trainers.data_adapters import array_data_adapter

    return bool(array_data_adapter.can_convert_arrays((x, y, sample_weight)))


def standardize_arrays(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    steps_per_epoch: int | None,
    class_weight: dict[int, float] | None,
) -> tuple[Any, int, int]:
    """Check and pack arrays as Keras does.

    Returns: The packed structure `x`, `(x, y)` or `(x, y, sample_weight)` of Keras `Sliceable`s (which cast
        floats to `keras.config.floatx()`), the number of samples, and the batch size (32 if not given).
    Raises: ValueError with Keras's own message: lengths that differ, weights given twice.
    """
    from keras.src.trainers.data_adapters import array_data_adapter, array_slicing

    if class_weight is not None:
        check_class_weight_targets(y)
    adapter = array_data_adapter.ArrayDataAdapter(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps=steps_per_epoch,
        class_weight=class_weight,
    )
    # NumPy on every backend: batches are sliced and compared on the host.
    sliceables = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="numpy")
    return sliceables, int(adapter._num_samples), int(adapter.batch_size)


def shuffled_orders(
    samples: int, batch_size: int, shuffle: bool | str, *, reads_ahead: bool
) -> Iterator[np.ndarray[Any, Any]]:
    """Return the orders in which Keras would visit the samples of arrays, pass after pass, on the current backend.

    Keras's own iterator shuffles the indices of the samples, and so draws the same random numbers: a program seeded
    with `keras.utils.set_random_seed` sees the same batches as without Phalanx. Without a seed, any order will do on
    TensorFlow. It is drawn here, because starting a pass through a tf.data.Dataset takes 20 ms.

    Args:
        samples: Number of samples.
        batch_size: Size of the global batch.
        shuffle: The `shuffle` argument of `fit`: True, False or "batch".
        reads_ahead: Whether Keras would have read one batch before the first pass, to build the model. Its random
            numbers are drawn by this call, the others pass by pass.
    """
    import keras
    from keras.src.trainers.epoch_iterator import EpochIterator

    if shuffle != "batch" and keras.backend.backend() == "tensorflow" and not _tensorflow_is_seeded():
        generator = np.random.default_rng()
        return (generator.permutation(samples) for _ in itertools.count())
    # In one batch, unless only rows within batches are shuffled: the order is the same and available at once.
    size = batch_size if shuffle == "batch" else samples
    passes = EpochIterator(np.arange(samples), batch_size=size, shuffle=shuffle)
    if keras.backend.backend() == "torch":
        # The sampler does not include what opening a pass draws (`draw_loader_seed`).
        sampler = passes.data_adapter.get_torch_dataloader().batch_sampler
        if reads_ahead:
            next(iter(sampler))
        return (np.concatenate([np.asarray(batch) for batch in sampler]) for _ in itertools.count())
    passes._get_iterator = {
        "jax": passes.data_adapter.get_jax_iterator,
        # Once for all passes, as Keras does: creating one takes some 80 ms.
        "tensorflow": functools.cache(passes.data_adapter.get_tf_dataset),
    }[keras.backend.backend()]
    if reads_ahead:
        next(next(passes._enumerate_iterator())[2])
        passes.reset()
    return (
        np.concatenate([np.asarray(next(batches)) for _, _, batches in passes._enumerate_iterator()])
        for _ in itertools.count()
    )


def _tensorflow_is_seeded() -> bool:
    # The public functions that reveal the seed also draw a number from it.
    from tensorflow.python.eager import context

    return context.global_seed() is not None


def class_weights(y: Any, class_weight: dict[int, float]) -> Any:
    """Return the weight of each sample of `y`, a NumPy array of shape (samples,) and dtype floatx."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    check_class_weight_targets(y)
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def tf_class_weights(class_weight: dict[int, float]) -> Any:
    """Return a function for `tf.data.Dataset.map` that adds the weight of each sample."""
    from keras.src.trainers.data_adapters import tf_dataset_adapter

    return tf_dataset_adapter.make_class_weight_map_fn(class_weight)


def check_class_weight_targets(y: Any) -> None:
    """Raises: ValueError unless `y` is one array of class labels that `class_weight` can be looked up for."""
    arrays = leaves(y)
    if y is None or len(arrays) != 1 or isinstance(y, (list, tuple, dict)):
        raise ConfigurationError(
            "`class_weight` is only supported for Models with a single output. Pass `sample_weight` with one "
            "array for each output instead."
        )
    shape = tuple(arrays[0].shape)
    if len(shape) > 2:
        raise ConfigurationError(
            "`class_weight` is not supported for targets of 3 or more dimensions: they need one label per "
            f"sample, of shape (samples,), (samples, 1) or (samples, classes); got y of shape {shape}. "
            "Pass `sample_weight` of the targets' shape instead."
        )


def ordered_enqueuer(dataset: Any, workers: int, use_multiprocessing: bool, max_queue_size: int) -> Any:
    """Create Keras's worker pool for a PyDataset, which yields `dataset[0], dataset[1], ...`."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

    return OrderedEnqueuer(
        dataset, workers=workers, use_multiprocessing=use_multiprocessing, max_queue_size=max_queue_size
    )


def opens_extra_iterator(kind: str) -> bool:
    """Whether Keras opens another iterator of a dataset of known length at the end of a pass, and drops it.

    `EpochIterator` does so if it iterates over the dataset itself. Otherwise it opens a generator, which does not
    start.

    Args:
        kind: `tensorflow` for a tf.data.Dataset, `torch` for a DataLoader.
    """
    import keras

    return bool(keras.backend.backend() == kind)


def draw_loader_seed() -> None:
    """Draw the random number that opening a pass over any data draws on PyTorch.

    Keras's PyTorch trainer reads everything through DataLoaders, whose iterators first draw a seed for workers. The
    order of the next shuffled pass depends on the numbers that follow.
    """
    import keras

    if keras.backend.backend() == "torch":
        import torch

        torch.empty((), dtype=torch.int64).random_()


def loaders_are_read_by_tf_data() -> bool:
    """Whether Keras turns a DataLoader into a tf.data.Dataset.

    Keras then opens a pass before each `fit`, `evaluate` and `predict`, to find the structure of the batches, and
    reads ahead to the end.
    """
    import keras

    return bool(keras.backend.backend() == "tensorflow")
