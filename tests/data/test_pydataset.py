import os
import threading

import numpy as np
import pytest

from phalanx.errors import ConfigurationError
from tests.data.merging import WORLD_SIZES, assert_same_batches, keras_batches, merged_epoch, ranks_of, shard_input

keras = pytest.importorskip("keras")

X = np.arange(46.0, dtype="float32").reshape(23, 2)
Y = np.arange(23)


class Batches(keras.utils.PyDataset):
    def __init__(self, batch_size=4, fail_at=None, weights=False, **options):
        super().__init__(**options)
        self.batch_size = batch_size
        self.fail_at = fail_at
        self.weights = weights
        self.calls = []
        self.order = np.arange(23)
        self.random = np.random.default_rng(5)

    def __len__(self):
        return -(-23 // self.batch_size)

    def __getitem__(self, index):
        if index == self.fail_at:
            raise OSError(f"disk of batch {index} is gone, pid {os.getpid()}")
        rows = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return (X[rows], Y[rows], Y[rows] * 1.0) if self.weights else (X[rows], Y[rows])

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


class Reshuffled(Batches):
    def on_epoch_end(self):
        self.order = self.random.permutation(23)


class Endless(keras.utils.PyDataset):
    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return np.full((5, 2), index), np.full(5, index)


OPTIONS = {
    "plain": {},
    "threads": {"workers": 2, "max_queue_size": 3},
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("batch_size", [4, 7, 30])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_local_batches_of_all_ranks_are_the_batches_of_keras(world_size, batch_size, options):
    expected = keras_batches(Batches(batch_size))
    ranks = ranks_of(lambda: (Batches(batch_size, **options),), world_size)
    assert ranks[0].num_batches == len(expected)
    assert ranks[0].is_uniform
    for epoch in range(2):
        assert_same_batches(merged_epoch(ranks, epoch), expected)


@pytest.mark.parametrize("shuffle", [False, True])
def test_worker_processes_cut_the_batches_themselves(shuffle):
    ranks = ranks_of(lambda: (Batches(workers=1, use_multiprocessing=True),), 2, shuffle=shuffle)
    got = merged_epoch(ranks, 0)
    assert sorted(np.concatenate([batch[1] for batch in got])) == list(range(23))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_shuffled_batches_come_in_the_same_order_on_all_ranks(options):
    ranks = ranks_of(lambda: (Batches(**options),), 3, shuffle=True)
    orders = [[batch[1][0] for batch in merged_epoch(ranks, epoch)] for epoch in range(3)]
    assert all(sorted(order) == [0, 4, 8, 12, 16, 20] for order in orders)
    assert orders[0] != orders[1]


def test_the_hooks_are_called_as_keras_fit_calls_them():
    dataset = Batches()
    sharded = shard_input(dataset, rank=0, world_size=1, seed=0)
    list(sharded.epoch(0))
    list(sharded.epoch(1))
    # Keras resets its iterator before the first epoch, which calls on_epoch_end.
    assert dataset.calls == ["end", "begin", "end", "begin", "end"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("steps", [None, 3])
def test_a_dataset_that_reshuffles_itself_is_never_read_beyond_the_epoch(options, steps):
    alone = ranks_of(lambda: (Reshuffled(),), 1, steps_per_epoch=steps)
    ranks = ranks_of(lambda: (Reshuffled(**options),), 3, steps_per_epoch=steps)
    for epoch in range(3):
        assert_same_batches(merged_epoch(ranks, epoch), merged_epoch(alone, epoch))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_with_steps_an_epoch_goes_on_where_the_last_one_stopped(options):
    ranks = ranks_of(lambda: (Batches(**options),), 2, steps_per_epoch=3)
    firsts = [[batch[1][0] for batch in merged_epoch(ranks, epoch)] for epoch in range(3)]
    assert firsts == [[0, 4, 8], [12, 16, 20], [0, 4, 8]]


def test_an_endless_dataset_needs_steps_and_goes_on_for_ever():
    with pytest.raises(ConfigurationError, match="must specify the `steps_per_epoch`"):
        shard_input(Endless(), rank=0, world_size=1, seed=0)
    for options in OPTIONS.values():
        ranks = ranks_of(lambda options=options: (Endless(**options),), 2, steps_per_epoch=2)
        assert [[batch[1][0] for batch in merged_epoch(ranks, epoch)] for epoch in range(3)] == [
            [0, 1],
            [2, 3],
            [4, 5],
        ]


def test_class_weights_are_looked_up_for_each_batch():
    weights = {0: 3.0, 5: 0.5}
    expected = keras_batches(Batches(), class_weight=weights)
    assert_same_batches(merged_epoch(ranks_of(lambda: (Batches(),), 3, class_weight=weights), 0), expected)
    sharded = shard_input(Batches(weights=True), class_weight=weights, rank=0, world_size=1, seed=0)
    with pytest.raises(ValueError, match="You cannot specify `class_weight` and `sample_weight`"):
        list(sharded.epoch(0))


@pytest.mark.parametrize(
    "options", [*OPTIONS.values(), {"workers": 1, "use_multiprocessing": True}], ids=[*OPTIONS, "processes"]
)
def test_what_the_dataset_raises_reaches_the_training_loop(options):
    sharded = shard_input(Batches(fail_at=2, **options), rank=0, world_size=2, seed=0)
    seen = []
    with pytest.raises(OSError, match="disk of batch 2 is gone") as raised:
        seen.extend(sharded.epoch(0))
    assert len(seen) == 2
    trace = "".join(__import__("traceback").format_exception(raised.value))
    assert "in __getitem__" in trace, "the traceback names the line of the dataset that raised"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_epoch_that_is_broken_off_leaves_no_thread(options):
    before = set(threading.enumerate())
    epoch = shard_input(Batches(1, **options), rank=0, world_size=1, seed=0).epoch(0)
    next(epoch)
    epoch.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"y": Y}, "y"), ({"sample_weight": Y}, "sample_weight"), ({"batch_size": 3}, "batch_size")],
)
def test_what_the_dataset_brings_itself_is_refused(arguments, name):
    with pytest.raises(ValueError, match=f"When providing `x` as a PyDataset, `{name}` should not be passed"):
        shard_input(Batches(), **arguments, rank=0, world_size=1, seed=0)


def test_an_empty_dataset_is_refused():
    class Empty(Batches):
        def __len__(self):
            return 0

    with pytest.raises(ConfigurationError, match="length 0"):
        shard_input(Empty(), rank=0, world_size=1, seed=0)


def test_ranks_that_shuffle_differently_have_different_fingerprints():
    def order_of(seed):
        dataset = Batches()
        dataset.order = np.random.default_rng(seed).permutation(23)
        sharded = shard_input(dataset, rank=0, world_size=2, seed=0)
        next(sharded.epoch(0))
        return sharded.fingerprint()

    assert order_of(1) == order_of(1)
    assert order_of(1) != order_of(2)
