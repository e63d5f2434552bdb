import itertools
import threading
import traceback
import warnings

import numpy as np
import pytest

from phalanx.data import ShardedInput
from phalanx.data.distributed_dataset import make_per_rank_source
from phalanx.data.input_position import EpochStart
from phalanx.data.input_request import InputRequest
from phalanx.data.source import SourceTraits, StreamCursor, StreamSource
from phalanx.errors import ConfigurationError
from tests.data.merging import WORLD_SIZES, assert_same_batches, keras_batches, merged_epoch, ranks_of, shard_input

SIZES = [7, 7, 2, 1]


def batches(sizes=SIZES, seed=0):
    random = np.random.default_rng(seed)
    for size in sizes:
        yield random.random((size, 3), dtype="float32"), random.permutation(size)


def endless():
    count = 0
    while True:
        yield np.full((4, 1), count), np.arange(4) + count
        count += 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_local_batches_of_all_ranks_are_the_batches_of_keras(world_size):
    ranks = ranks_of(lambda: (batches(),), world_size)
    assert ranks[0].num_batches is None
    assert not ranks[0].is_uniform
    assert_same_batches(merged_epoch(ranks, 0), keras_batches(batches()))
    assert ranks[0].num_batches == len(SIZES), "known once the data was read to its end"


@pytest.mark.parametrize("element", [lambda: {"a": np.ones((5, 2))}, lambda: (np.ones((5, 2)),)])
def test_elements_without_targets(element):
    ranks = ranks_of(lambda: ((element() for _ in range(2)),), 3)
    assert len(merged_epoch(ranks, 0)) == 2


def test_tensors_are_converted():
    torch = pytest.importorskip("torch")
    sharded = shard_input(((torch.ones(4, 2), torch.ones(4)) for _ in range(1)), rank=0, world_size=1, seed=0)
    (batch,) = sharded.epoch(0)
    assert isinstance(batch.data[0], np.ndarray)


def test_with_steps_no_epoch_reads_more_than_its_batches():
    source = endless()
    sharded = shard_input(source, steps_per_epoch=3, rank=0, world_size=2, seed=0)
    for epoch in range(3):
        assert [batch.data[0][0, 0] for batch in sharded.epoch(epoch)] == [3 * epoch + step for step in range(3)]
    assert next(source)[0][0, 0] == 9, "the generator stands where training stopped"


def test_each_pass_begins_with_the_first_two_batches_as_in_keras():
    def first(epoch):
        return [int(batch.data[0][0, 0]) for batch in epoch]

    ended = shard_input((batch for batch in itertools.islice(endless(), 4)), rank=0, world_size=2, seed=0)
    assert [first(ended.epoch(epoch)) for epoch in range(3)] == [[0, 1, 2, 3], [0, 1], [0, 1]]
    validation = shard_input(endless(), steps_per_epoch=3, rank=0, world_size=2, seed=0)
    seen = []
    for _ in range(3):
        validation.position.reset()
        seen.append(first(validation.epoch(0)))
    assert seen == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_the_chief_warns_of_an_epoch_that_ends_early():
    chief, other = ranks_of(lambda: (batches(),), 2, steps_per_epoch=5)
    with pytest.warns(UserWarning, match=r"ran out of data in epoch 1, after 4 batches where 5.*PyDataset"):
        assert len(list(chief.epoch(0))) == 4
    assert len(list(other.epoch(0))) == 4


def test_peek_takes_nothing_away():
    sharded = shard_input(batches(), rank=0, world_size=2, seed=0)
    first = sharded.peek()
    np.testing.assert_array_equal(sharded.peek().data[0], first.data[0])
    read = list(sharded.epoch(0))
    assert len(read) == len(SIZES)
    np.testing.assert_array_equal(read[0].data[0], first.data[0])


def test_an_empty_generator_is_an_error():
    sharded = shard_input(batches([]), rank=0, world_size=1, seed=0)
    with pytest.raises(ConfigurationError, match="The input is empty: Python generator gave no batch"):
        list(sharded.epoch(0))
    with pytest.raises(ConfigurationError, match="The input is empty"):
        shard_input(batches([]), rank=0, world_size=1, seed=0).peek()


def test_what_the_generator_raises_comes_with_its_traceback():
    def failing():
        for _ in range(2):
            yield np.ones((4, 1)), np.ones(4)
        raise OSError("the disk is gone")

    epoch = shard_input(failing(), rank=0, world_size=2, seed=0).epoch(0)
    for _ in range(2):
        next(epoch)
    with pytest.raises(OSError, match="the disk is gone") as raised:
        next(epoch)
    assert "in failing" in "".join(traceback.format_exception(raised.value))


def test_the_generator_runs_in_the_callers_thread_and_no_further_than_asked():
    taken = []

    def batches():
        for number in range(9):
            taken.append((number, threading.current_thread()))
            yield np.ones((4, 1)), np.ones(4)

    epoch = shard_input(batches(), rank=0, world_size=2, seed=0).epoch(0)
    for _ in range(4):
        next(epoch)
    assert taken == [(number, threading.current_thread()) for number in range(4)]


def test_a_share_is_not_changed_by_what_the_generator_does_next():
    def batches():
        x = np.zeros((5, 2))
        for number in range(4):
            x[:] = number
            yield (x,)

    shares = list(shard_input(batches(), rank=1, world_size=2, seed=0).epoch(0))
    # As in Keras, the first two are read before the first is used.
    assert [share.data[0][0, 0] for share in shares] == [1, 1, 2, 3]


def test_ranks_that_read_different_data_have_different_fingerprints():
    def fingerprints(seed):
        sharded = shard_input(batches(seed=seed), rank=1, world_size=2, seed=0)
        return [sharded.fingerprint() for _ in sharded.epoch(0)]

    assert fingerprints(1) == fingerprints(1)
    assert fingerprints(1)[0] != fingerprints(2)[0]
    sharded = shard_input(batches(), rank=0, world_size=2, seed=0)
    assert "Give each shuffle a seed" in sharded.description.disagreement
    assert shard_input(batches(), rank=0, world_size=1, seed=0).fingerprint is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_weight": np.ones(3)}, "as a generator, `sample_weight` should not be passed"),
        ({"y": np.ones(3)}, "as a generator, `y` should not be passed"),
        ({"batch_size": 4}, "as a generator, `batch_size` should not be passed"),
        ({"class_weight": {0: 1.0}}, "`class_weight` is not supported for generator"),
    ],
)
def test_arguments_that_do_not_go_with_a_generator(options, message):
    with pytest.raises(ValueError, match=message):
        shard_input(batches(), **options, rank=0, world_size=1, seed=0)


@pytest.mark.parametrize("element", [[np.ones(2), np.ones(2)], 3.0])
def test_elements_must_be_tuples_as_in_keras(element):
    sharded = shard_input((element for _ in range(1)), rank=0, world_size=1, seed=0)
    with pytest.raises(ValueError, match="the generator must return a tuple"):
        list(sharded.epoch(0))


def test_what_was_read_in_an_evaluation_can_be_read_again():
    """A member was lost in the middle: the others begin the evaluation again, cut for themselves."""
    sharded = shard_input(endless(), steps_per_epoch=3, rank=0, world_size=2, seed=0)
    sharded.peek()
    with sharded.recording() as rewind:
        walk = sharded.epoch(0)
        assert [next(walk).data[0][0, 0] for _ in range(2)] == [0, 1]
        walk.close()
        rewind()
        sharded.reshard(0, 1)
        assert [(len(batch.data[0]), batch.data[0][0, 0]) for batch in sharded.epoch(0)] == [(4, 0), (4, 1), (4, 2)]
    assert sharded.position.next_pass.consumed == 3
    assert [batch.data[0][0, 0] for batch in sharded.epoch(1)] == [3, 4, 5], "and the next one goes on after it"


def test_of_data_that_others_have_not_begun_nothing_is_read():
    """Another generator may draw from the same random numbers."""
    read = []
    sharded = shard_input((read.append(batch) or batch for batch in endless()), steps_per_epoch=2, rank=0, world_size=2)
    sharded.position.resume_between_epochs(EpochStart(0, 0))
    assert not read


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("evaluations", range(4))
def test_one_that_comes_later_catches_up_with_former_evaluations(evaluations, looks):
    """The next evaluation begins with the two batches that Keras reads first, and continues after what was taken."""
    first, later = (shard_input(endless(), steps_per_epoch=3, rank=rank, world_size=2, seed=0) for rank in range(2))

    def evaluate(sharded, index):
        sharded.position.reset()
        return [batch.data[0][0, 0] for batch in sharded.epoch(index)]

    for index in range(evaluations):
        evaluate(first, index)
    if looks:
        later.peek()
    later.position.resume_between_epochs(first.position.next_pass)
    expected = [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]][evaluations]
    assert evaluate(first, evaluations) == evaluate(later, evaluations) == expected
    assert later.position.next_pass == first.position.next_pass


@pytest.mark.parametrize("steps", [None, 3], ids=["whole passes", "three steps"])
@pytest.mark.parametrize("done", range(3))
@pytest.mark.parametrize("epochs", range(4))
def test_one_that_comes_later_reads_the_rest_of_the_same_epoch(epochs, done, steps):
    """Epochs after the end of the generator have the two batches that Keras reads first, and no others."""

    def five():
        five_batches = (batch for batch in itertools.islice(endless(), 5))
        return shard_input(five_batches, steps_per_epoch=steps, rank=0, world_size=1, seed=0)

    def values(batches):
        return [batch.data[0][0, 0] for batch in batches]

    first, later, later_still = five(), five(), five()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data end
        for index in range(epochs):
            list(first.epoch(index))
        first.start_epoch(epochs)
        walk = first.epoch(epochs, 0)
        begun = values(itertools.islice(walk, done))
        later.position.resume_epoch(first.position.running_epoch, len(begun))
        assert later.position.running_epoch == first.position.running_epoch
        later_still.position.resume_epoch(later.position.running_epoch, len(begun))
        assert values(later.epoch(epochs, len(begun))) == values(later_still.epoch(epochs, len(begun))) == values(walk)
        assert later.position.next_epoch == later_still.position.next_epoch == first.position.next_epoch
        later_still.position.resume_between_epochs(first.position.next_epoch)
        assert values(later_still.epoch(epochs + 1)) == values(first.epoch(epochs + 1))


def test_a_generator_cannot_go_back():
    """A `fit` that failed is tried again with the same distributed dataset."""
    elements = endless()
    cursor = StreamCursor(lambda key: elements, is_single_pass=True)
    list(cursor.read(0, 0, 6))
    with pytest.raises(ConfigurationError, match="has been read further than to where training continues"):
        cursor.resume(0, 2, 0)


def test_whether_batches_are_compared_follows_the_number_of_ranks():
    sharded = shard_input(endless(), steps_per_epoch=2, rank=0, world_size=1, seed=0)
    assert sharded.fingerprint is None
    sharded.reshard(0, 2)
    next(sharded.epoch(0))
    assert sharded.fingerprint is not None
    assert isinstance(sharded.fingerprint(), int)
    sharded.reshard(0, 1)
    assert sharded.fingerprint is None


def test_so_can_what_an_input_function_of_this_rank_made():
    stream = StreamSource(
        lambda key: source, SourceTraits("generator", "generator"), InputRequest(None), is_single_pass=True
    )
    source = endless()
    sharded = ShardedInput(make_per_rank_source(stream), InputRequest(None, rank=0, world_size=2, steps_per_epoch=3))
    with sharded.recording() as rewind:
        walk = sharded.epoch(0)
        assert [next(walk).data[0][0, 0] for _ in range(2)] == [0, 1]
        walk.close()
        rewind()
        assert [batch.data[0][0, 0] for batch in sharded.epoch(0)] == [0, 1, 2]
    assert sharded.position.next_pass.consumed == 3
