import numpy as np
import pytest

from phalanx.errors import ConfigurationError
from tests.data.merging import (
    SEED,
    WORLD_SIZES,
    assert_same_batches,
    keras_batches,
    merged_epoch,
    ranks_of,
    shard_input,
)

SAMPLES = 23
X = np.random.default_rng(0).random((SAMPLES, 4)).astype("float32")
Y = np.arange(SAMPLES)
W = np.linspace(0, 1, SAMPLES).astype("float32")


def _frame():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": np.arange(SAMPLES), "b": np.arange(SAMPLES) / 2}), pandas.Series(Y)


def _jax():
    jax = pytest.importorskip("jax")
    return jax.numpy.asarray(X), jax.numpy.asarray(Y)


def _torch():
    torch = pytest.importorskip("torch")
    return torch.tensor(X, requires_grad=True), torch.tensor(Y)


def _tensorflow():
    tf = pytest.importorskip("tensorflow")
    return tf.constant(X), tf.constant(Y)


def _ragged():
    tf = pytest.importorskip("tensorflow")
    return tf.RaggedTensor.from_row_lengths(tf.range(float(SAMPLES) * 3), [3] * SAMPLES), tf.constant(Y)


def _sparse():
    sparse = pytest.importorskip("scipy.sparse")
    return sparse.csr_matrix(np.eye(SAMPLES, 5, dtype="float32")), Y


INPUTS = {
    "x": lambda: (X,),
    "x, y": lambda: (X, Y),
    "x, y, weights": lambda: (X, Y, W),
    "float64 is cast": lambda: (X.astype("float64"), Y),
    "integers": lambda: (Y, Y.astype("uint8")),
    "two inputs": lambda: ([X, Y], Y),
    "nested": lambda: ({"a": X, "b": (Y, X)}, {"p": Y, "q": Y}),
    "weights per output": lambda: (X, {"p": Y, "q": Y}, {"p": W, "q": W}),
    "one weight for outputs": lambda: (X, [Y, Y], W),
    "not contiguous": lambda: (np.asfortranarray(X)[:, ::2], Y[::-1]),
    "pandas": _frame,
    "jax": _jax,
    "scipy": _sparse,
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("batch_size", [4, 7, None, 23, 100])
def test_the_local_batches_of_all_ranks_are_the_batches_of_keras(name, world_size, batch_size):
    make = INPUTS[name]
    expected = keras_batches(*make(), batch_size=batch_size)
    ranks = ranks_of(make, world_size, batch_size=batch_size)
    assert all(rank.num_batches == len(expected) for rank in ranks)
    assert all(rank.is_uniform for rank in ranks)
    for epoch in range(2):
        assert_same_batches(merged_epoch(ranks, epoch), expected)


@pytest.mark.parametrize("make", [_torch, _tensorflow, _ragged], ids=["torch", "tensorflow", "ragged"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_tensors_of_a_backend_are_read_as_numpy_arrays(make, shuffle):
    got = merged_epoch(ranks_of(make, 3, batch_size=7, shuffle=shuffle), 0)
    x = np.concatenate([batch[0] for batch in got])
    y = np.concatenate([batch[1] for batch in got])
    expected = np.arange(SAMPLES * 3.0).reshape(-1, 3) if make is _ragged else X
    np.testing.assert_array_equal(x, expected[y])
    assert sorted(y) == list(range(SAMPLES))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_without_shuffling_a_batch_is_a_view(world_size):
    for rank in ranks_of(lambda: (X, Y), world_size, batch_size=8):
        for batch in rank.epoch(0):
            assert np.shares_memory(batch.data[0], X)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_shuffling_is_the_same_for_every_world_size_and_differs_between_epochs(world_size, shuffle):
    alone = ranks_of(lambda: (X, Y), 1, batch_size=4, shuffle=shuffle)
    ranks = ranks_of(lambda: (X, Y), world_size, batch_size=4, shuffle=shuffle)
    orders = []
    for epoch in range(3):
        expected = merged_epoch(alone, epoch)
        assert_same_batches(merged_epoch(ranks, epoch), expected)
        orders.append(np.concatenate([batch[1] for batch in expected]))
        assert sorted(orders[-1]) == list(range(SAMPLES)), "each sample once"
        if shuffle == "batch":
            assert [sorted(batch[1]) for batch in expected] == [
                list(range(first, min(first + 4, SAMPLES))) for first in range(0, SAMPLES, 4)
            ]
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])


def test_the_order_of_an_epoch_depends_on_its_number_alone():
    resumed = shard_input(X, Y, batch_size=4, shuffle=True, rank=0, world_size=1, seed=SEED)
    whole = shard_input(X, Y, batch_size=4, shuffle=True, rank=0, world_size=1, seed=SEED)
    first, second = list(whole.epoch(0)), list(whole.epoch(1))
    assert len(first) == 6
    for a, b in zip(resumed.epoch(1), second, strict=True):
        np.testing.assert_array_equal(a.data[1], b.data[1])


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("world_size", [1, 3])
def test_with_steps_an_epoch_goes_on_where_the_last_one_stopped_as_in_keras(steps, world_size, recwarn):
    from keras.src.trainers.epoch_iterator import EpochIterator

    reference = EpochIterator(X, Y, batch_size=4, steps_per_epoch=steps)
    ranks = ranks_of(lambda: (X, Y), world_size, batch_size=4, steps_per_epoch=steps)
    assert ranks[0].num_batches == steps
    for epoch in range(6):
        expected = [buffer[0] for _, _, buffer in reference]
        assert_same_batches(merged_epoch(ranks, epoch), expected)


def test_without_a_batch_size_the_steps_divide_the_data():
    sharded = shard_input(X, Y, steps_per_epoch=5, rank=0, world_size=1, seed=0)
    assert [batch.size for batch in sharded.epoch(0)] == [5, 5, 5, 5, 3]


def test_more_steps_than_data_end_the_epoch_with_a_warning_on_the_chief():
    chief, other = ranks_of(lambda: (X, Y), 2, batch_size=10, steps_per_epoch=5)
    with pytest.warns(UserWarning, match=r"ran out of data in epoch 1, after 3 batches where 5 were"):
        assert len(list(chief.epoch(0))) == 3
    assert len(list(other.epoch(0))) == 3


def test_class_weights_become_sample_weights():
    y = Y % 3
    weights = {0: 1.0, 1: 2.0}
    expected = keras_batches(X, y, class_weight=weights, batch_size=5)
    got = merged_epoch(ranks_of(lambda: (X, y), 3, class_weight=weights, batch_size=5), 0)
    assert_same_batches(got, expected)
    assert set(got[0][2]) == {1.0, 2.0}


def test_fewer_samples_than_ranks_leave_the_last_ranks_empty():
    ranks = ranks_of(lambda: (X[:2], Y[:2]), 5)
    assert [next(rank.epoch(0)).size for rank in ranks] == [1, 1, 0, 0, 0]
    assert_same_batches(merged_epoch(ranks, 1), [(X[:2], Y[:2])])


def test_an_epoch_that_is_broken_off_leaves_the_next_one_whole():
    sharded = shard_input(X, Y, batch_size=4, rank=0, world_size=1, seed=0)
    epoch = sharded.epoch(0)
    next(epoch)
    epoch.close()
    assert len(list(sharded.epoch(1))) == 6


def test_peek_leaves_the_first_batch_in_place():
    sharded = shard_input(X, Y, batch_size=4, rank=1, world_size=3, seed=0)
    peeked = sharded.peek()
    np.testing.assert_array_equal(peeked.data[0], next(sharded.epoch(0)).data[0])


def test_a_stand_in_has_no_samples_but_the_shapes_of_the_data():
    sharded = shard_input(X, Y, batch_size=4, rank=1, world_size=3, seed=0)
    batch = sharded.placeholder_batch()
    assert batch.size == 0
    assert batch.data[0].shape == (1, 4)
    assert batch.data[1].shape == (1,)


def test_signatures_tell_ranks_with_other_data_apart():
    def signature(x, **options):
        return shard_input(x, rank=0, world_size=2, seed=0, **options).description.signature

    assert signature(X) == signature(X + 1)
    assert signature(X) != signature(X[:22])
    assert signature(X) != signature(X[:, :3])
    assert signature(X) != signature(X, batch_size=16)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, Y[:5]), {}, ValueError, r"Data cardinality is ambiguous.*'x' sizes: 23"),
        ((X[:0],), {}, ConfigurationError, "x holds 0 samples"),
        ((X,), {"batch_size": 0}, ConfigurationError, "batch_size must be at least 1"),
        ((X,), {"steps_per_epoch": 0}, ConfigurationError, "steps_per_epoch must be at least 1"),
        ((X, Y, W), {"class_weight": {0: 1.0}}, ValueError, "You cannot specify `class_weight` and `sample_weight`"),
        ((X, [Y, Y]), {"class_weight": {0: 1.0}}, ValueError, "only supported for Models with a single"),
        (
            (X, np.zeros((SAMPLES, 4, 3))),
            {"class_weight": {0: 1.0}},
            ValueError,
            r"not supported for targets of 3 or more dimensions.*\(23, 4, 3\)",
        ),
        (([[1, 2], [3, 4]],), {}, TypeError, r"The input x is list.*numpy.array\(x\)"),
        ((iter([X]),), {}, TypeError, r"list_iterator.*\(batch for batch in iterator\)"),
        (("text",), {}, TypeError, r"The input x is str.*tf.data.Dataset"),
        ((None,), {}, TypeError, "NoneType"),
        ((X, "y"), {}, TypeError, "`y` is not an array: it is str"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, error, message):
    import re

    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        shard_input(*arguments, **options, rank=0, world_size=2, seed=0)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world_size):
    with pytest.raises(ConfigurationError, match="rank must be 0 to world_size - 1"):
        shard_input(X, rank=rank, world_size=world_size, seed=0)


def test_explain_says_what_each_rank_reads():
    sharded = shard_input(X, Y, batch_size=8, shuffle=True, rank=0, world_size=3, seed=0)
    lines = sharded.description.explain().splitlines()
    assert lines[0] == sharded.description.policy_line
    assert lines[0].startswith("Input sharding: DATA (arrays): each of the 3 replicas takes its part")
    assert lines[1] == "  rank 0 indexes samples 0 to 2 of each 8 of the 23, in an order shuffled alike on every rank"
    assert len(lines) == 4


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool", ">i4"])
def test_large_batches_lie_where_backends_need_not_copy_them(dtype):
    x = (np.random.default_rng(1).random((48, 128, 300)) * 100).astype(dtype)
    source = shard_input(x, np.arange(48), batch_size=32, shuffle=True, rank=0, world_size=2, seed=SEED)
    for batch in source.epoch(0):
        images, numbers = batch.data[:2]
        np.testing.assert_array_equal(images, x[numbers])
        assert images.dtype == x.dtype
        assert images.ctypes.data % 64 == 0
