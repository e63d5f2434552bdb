import itertools
import time

import keras
import numpy as np
import pytest

from phalanx.arrays.tree import leaves
from phalanx.data import AutoShardPolicy, distribute_dataset
from phalanx.data.distributed_dataset import DatasetDistribution
from phalanx.data.numbered_batches import NumberedBatches
from phalanx.errors import ConfigurationError, UnsupportedError
from tests.data.merging import WORLD_SIZES, assert_same_batches, keras_batches, merged_epoch, ranks_of, shard_input
from tests.launcher.conftest import wait_until


@pytest.fixture(autouse=True, scope="module")
def _tensorflow():
    """It takes seconds to import, and would in each process of pytest-xdist, were it imported to collect the tests."""
    global tf, Policy
    tf = pytest.importorskip("tensorflow")
    Policy = tf.data.experimental.AutoShardPolicy


@pytest.fixture(autouse=True)
def _no_seed_of_the_program():
    """Other tests of this process may have set one, which each pipeline draws another seed from."""
    tf.random.set_seed(None)


X = np.arange(46.0, dtype="float32").reshape(23, 2)
Y = np.arange(23)


def dataset(batch_size=4):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)


def with_policy(data, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def by_files(data):
    return with_policy(data, Policy.FILE)


KINDS = {
    "slices": dataset,
    "unknown length": lambda: dataset().filter(lambda x, y: True),
    "drop_remainder": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True),
    "dict": lambda: tf.data.Dataset.from_tensor_slices(({"a": X, "b": Y}, Y)).batch(7).prefetch(1),
    "x only": lambda: tf.data.Dataset.from_tensor_slices(X).batch(30),
    "generator": lambda: tf.data.Dataset.from_generator(
        lambda: iter([(X[:5], Y[:5]), (X[:1], Y[:1])]),
        output_signature=(tf.TensorSpec((None, 2)), tf.TensorSpec((None,), tf.int64)),
    ),
    "seeded": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=4).batch(5),
    "DATA": lambda: with_policy(dataset(), Policy.DATA),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_the_local_batches_of_all_ranks_are_the_batches_of_keras(name, world_size):
    expected = keras_batches(KINDS[name]())
    ranks = ranks_of(lambda: (KINDS[name](),), world_size)
    assert all(rank.source.traits.policy is AutoShardPolicy.DATA for rank in ranks)
    known = name not in ("unknown length", "generator")
    assert ranks[0].is_uniform is known
    assert ranks[0].num_batches == (len(expected) if known else None)
    assert_same_batches(merged_epoch(ranks, 0), expected)
    assert ranks[0].num_batches == len(expected)


def captures():
    offset = tf.Variable(0, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(23, dtype=tf.int64), tf.range(23, dtype=tf.int64)), -1
    )
    data = tf.data.Dataset.range(23).map(lambda i: table.lookup(i) + offset).shuffle(23)
    return data.map(lambda i: tf.py_function(lambda j: j, [i], tf.int64)).batch(4)


def nested_shuffle():
    return tf.data.Dataset.range(4).interleave(lambda i: tf.data.Dataset.range(6 * i, 6 * i + 6).shuffle(6))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23).batch(4),
        lambda: dataset(1).unbatch().shuffle(10).shuffle(10).map(lambda x, y: (x, y)).batch(4).prefetch(2),
        lambda: nested_shuffle().batch(4),
        lambda: (
            tf.data.Dataset.from_generator(lambda: iter(range(23)), output_signature=tf.TensorSpec((), tf.int64))
            .shuffle(23)
            .batch(4)
        ),
        lambda: tf.data.Dataset.from_tensor_slices(np.arange(20_000)).shuffle(20_000).batch(4_000),
        lambda: (
            tf.data.Dataset.from_tensor_slices([f"{i:09}" for i in range(9_000)])
            .shuffle(9_000)
            .map(lambda text: tf.strings.to_number(text, tf.int64))
            .batch(4_000)
        ),
        lambda: tf.data.Dataset.range(23).shuffle(23, seed=1).shuffle(3).batch(4),
        captures,
    ],
    ids=["shuffle", "two", "in an interleave", "of a generator", "large", "strings", "seeded before", "captures"],
)
def test_shuffles_without_a_seed_are_the_same_on_all_ranks_and_differ_between_epochs(make):
    ranks = ranks_of(lambda: (make(),), 3)
    orders = [np.concatenate([batch[-1] for batch in merged_epoch(ranks, epoch)]).tolist() for epoch in range(2)]
    total = len(orders[0])
    assert sorted(orders[0]) == list(range(total)), "each sample once"
    assert sorted(orders[1]) == list(range(total))
    assert orders[0] != list(range(total))
    assert len({rank.fingerprint() for rank in ranks}) == 1


def test_shuffles_without_a_seed_differ_between_epochs_and_seeds():
    def orders(seed):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23).batch(23)
        sharded = shard_input(data, rank=0, world_size=2, seed=seed)
        return [next(sharded.epoch(epoch)).data[1].tolist() for epoch in range(2)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert orders(1)[0] != orders(1)[1]


def test_shuffled_data_too_large_to_seed_is_told_apart_by_its_fingerprint(monkeypatch):

    monkeypatch.setattr("phalanx.data.tf_data_source.RESEED_LIMIT_BYTES", 10)
    ranks = ranks_of(lambda: (tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23).batch(23),), 2)
    for rank in ranks:
        next(rank.epoch(0))
    assert ranks[0].fingerprint() != ranks[1].fingerprint()


def test_with_steps_the_iterator_goes_on_across_epochs():
    ranks = ranks_of(lambda: (dataset().repeat(),), 2, steps_per_epoch=4)
    firsts = [[batch[1][0] for batch in merged_epoch(ranks, epoch)] for epoch in range(3)]
    assert firsts == [[0, 4, 8, 12], [16, 20, 0, 4], [8, 12, 16, 20]]


@pytest.mark.parametrize("known", [True, False])
def test_steps_that_end_with_the_data_restart_it(known):
    make = dataset if known else lambda: dataset().filter(lambda x, y: True)
    sharded = shard_input(make(), steps_per_epoch=3, rank=0, world_size=2, seed=0)
    firsts = [[batch.data[1][0] for batch in sharded.epoch(epoch)] for epoch in range(3 if known else 4)]
    # As in Keras, only the next epoch finds that data of unknown length have ended.
    assert firsts == [[0, 4, 8], [12, 16, 20], *([[0, 4, 8]] if known else [[], [0, 4, 8]])]


def test_endless_files_need_steps(record_files):
    data = tf.data.TFRecordDataset(record_files).repeat().batch(4)
    with pytest.raises(ConfigurationError, match="never ends"):
        shard_input(data, rank=0, world_size=2, seed=0)
    sharded = shard_input(data, steps_per_epoch=30, rank=0, world_size=2, seed=0)
    assert [len(list(sharded.epoch(epoch))) for epoch in range(2)] == [30, 30]


def test_endless_data_needs_steps():
    with pytest.raises(ConfigurationError, match="infinitely repeating dataset, you must specify the `steps_per"):
        shard_input(dataset().repeat(), rank=0, world_size=2, seed=0)


def test_peek_takes_nothing_away():
    sharded = shard_input(dataset(), rank=1, world_size=2, seed=0)
    assert sharded.peek().data[1].tolist() == [2, 3]
    assert [batch.size for batch in sharded.epoch(0)] == [2, 2, 2, 2, 2, 1]


def test_peek_can_open_the_data_again_as_keras_does_when_it_builds_a_model():
    plain = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=4).batch(23)
    first, again = (next(iter(plain))[1].numpy().tolist() for _ in range(2))
    for restart, expected in [(False, first), (True, again)]:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=4).batch(23)
        sharded = shard_input(data, rank=0, world_size=1, seed=0)
        assert sharded.peek(restart=restart).data[1].tolist() == first
        assert next(sharded.epoch(0)).data[1].tolist() == expected


def test_class_weights_become_sample_weights():
    expected = keras_batches(dataset(), class_weight={0: 3.0, 22: 0.5})
    got = merged_epoch(ranks_of(lambda: (dataset(),), 2, class_weight={0: 3.0, 22: 0.5}), 0)
    assert_same_batches(got, expected)
    for data, message in [
        (dataset().map(lambda x, y: (x, y, y)), "`class_weight` and `sample_weight`"),
        (dataset().map(lambda x, y: (x, tf.zeros((4, 3, 3)))), "3 or more dimensions"),
        (dataset().map(lambda x, y: x), "`class_weight` needs elements"),
    ]:
        with pytest.raises(ValueError, match=message):
            shard_input(data, class_weight={0: 1.0}, rank=0, world_size=1, seed=0)


def test_sparse_and_ragged_elements_become_dense():
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), tf.ragged.constant([[1, 2]] * 23)))
    got = merged_epoch(ranks_of(lambda: (data.batch(23),), 2), 0)
    np.testing.assert_array_equal(got[0][0], X)
    np.testing.assert_array_equal(got[0][1], [[1, 2]] * 23)


def test_ragged_elements_of_several_lengths_are_refused():
    data = tf.data.Dataset.from_tensor_slices((X, tf.ragged.constant([[1], [2, 3]] * 11 + [[4]])))
    with pytest.raises(UnsupportedError, match="rows of several lengths"):
        merged_epoch(ranks_of(lambda: (data.batch(23),), 2), 0)


@pytest.mark.parametrize("make", [lambda: dataset().unbatch(), lambda: tf.data.Dataset.range(5)])
def test_elements_that_are_no_batches_are_refused(make):
    with pytest.raises(ConfigurationError, match=r"no batches.*\.batch\(batch_size\)"):
        shard_input(make(), rank=0, world_size=2, seed=0)


def test_a_number_beside_a_batch_is_told_apart():
    with pytest.raises(ConfigurationError, match=r"give each sample that number: `tf.repeat"):
        shard_input(dataset().map(lambda x, y: ((x, 3.0), y)), rank=0, world_size=2, seed=0)


def test_arguments_that_do_not_go_with_a_dataset():
    with pytest.raises(ValueError, match=r"`batch_size` should not be passed.*global batch"):
        shard_input(dataset(), batch_size=4, rank=0, world_size=2, seed=0)


# Policies, with real files: 5 files of 7 records, "f3-6" is the last record of file 3.


@pytest.fixture
def record_files(tmp_path):
    names = [str(tmp_path / f"{number}.tfrecord") for number in range(5)]
    for number, name in enumerate(names):
        with tf.io.TFRecordWriter(name) as writer:
            for record in range(7):
                writer.write(f"f{number}-{record}".encode())
    return names


@pytest.fixture
def text_files(tmp_path):
    names = [str(tmp_path / f"{number}.txt") for number in range(5)]
    for number, name in enumerate(names):
        with open(name, "w") as file:
            file.writelines(f"f{number}-{record}\n" for record in range(7))
    return names


ALL = {f"f{number}-{record}".encode() for number, record in itertools.product(range(5), range(7))}


def test_nothing_is_read_ahead_of_a_first_batch_that_comes_again():
    """On one rank a second shuffle would have begun when the next iterator is opened, and on another not yet."""

    def opened():
        read = []

        def elements():
            for number in range(8):
                read.append(number)
                yield np.float32([number])

        spec = tf.TensorSpec((1,), tf.float32)
        data = tf.data.Dataset.from_generator(elements, output_signature=spec).shuffle(50, seed=1).batch(4).repeat(3)
        return shard_input(data, rank=0, world_size=2).source.cursor, read

    cursor, read = opened()
    running = cursor._open_pass(0)
    next(running)
    wait_until(lambda: len(read) > 8, lambda: f"{len(read)} elements were read")
    cursor, read = opened()
    first = cursor._open_first()
    next(first)
    time.sleep(0.3)  # threads would have read more by then
    assert len(read) == 8


def records(sharded, epoch=0):
    parts = list(sharded.epoch(epoch))
    for part in parts:
        assert part.global_size is None
    return [list(leaves(part.data)[0][: part.size]) for part in parts]


PIPELINES = {
    "TFRecordDataset": lambda names: tf.data.TFRecordDataset(names),
    "shuffled list_files": lambda names: tf.data.Dataset.list_files(names).interleave(
        tf.data.TFRecordDataset, cycle_length=2
    ),
    "parallel interleave": lambda names: tf.data.Dataset.from_tensor_slices(names).interleave(
        tf.data.TFRecordDataset, num_parallel_calls=2
    ),
    "mapped and shuffled": lambda names: tf.data.TFRecordDataset(names).map(lambda r: r).shuffle(9),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_files_are_divided_over_ranks(record_files, pipeline, world_size):
    ranks = ranks_of(lambda: (by_files(PIPELINES[pipeline](record_files).batch(6)),), world_size)
    seen = []
    for number, rank in enumerate(ranks):
        assert rank.source.traits.policy is AutoShardPolicy.FILE
        assert not rank.is_uniform
        assert rank.fingerprint is None
        batches = records(rank)
        own = set(range(5)[number::world_size])
        assert {int(record[1:2]) for batch in batches for record in batch} == own
        assert max(map(len, batches)) == -(-6 // world_size) if 6 % world_size else 6 // world_size
        seen += itertools.chain(*batches)
        assert sorted(itertools.chain(*records(rank, 1))) == sorted(itertools.chain(*batches))
    assert sorted(seen) == sorted(ALL), "each record once"


def test_text_files_are_divided_too(text_files):
    ranks = ranks_of(lambda: (by_files(tf.data.TextLineDataset(text_files).batch(4)),), 2)
    assert sorted(itertools.chain(*(batch for rank in ranks for batch in records(rank)))) == sorted(ALL)
    assert f"rank 1 reads {text_files[1]}, {text_files[3]}" in ranks[0].description.explain()
    assert "FILE (tf.data.Dataset): each of the 2 replicas reads its own files; it reads 5 files" in (
        ranks[0].description.policy_line
    )


def test_local_batch_sizes_take_turns_so_that_each_step_is_a_global_batch(record_files):
    ranks = ranks_of(lambda: (by_files(tf.data.TFRecordDataset(record_files[:4]).batch(7)),), 2)
    sizes = [[len(batch) for batch in records(rank)] for rank in ranks]
    assert sizes == [[4, 3, 4, 3], [3, 4, 3, 4]]


@pytest.mark.parametrize("pipeline", ["TFRecordDataset", "parallel interleave", "mapped and shuffled"])
def test_by_default_files_are_read_as_by_one_process(record_files, pipeline):
    make = lambda: PIPELINES[pipeline](record_files).batch(6)  # noqa: E731
    ranks = ranks_of(lambda: (make(),), 2)
    assert ranks[0].source.traits.policy is AutoShardPolicy.DATA
    assert "so its batches are those of one process" in ranks[0].description.policy_line
    batches = merged_epoch(ranks, 0)
    if "shuffled" not in pipeline:
        assert_same_batches(batches, keras_batches(make()))
    assert sorted(itertools.chain(*(batch[0] for batch in batches))) == sorted(ALL)


def test_the_file_policy_demands_files(record_files):
    with pytest.raises(ConfigurationError, match="its source is not a list of files"):
        shard_input(by_files(dataset()), rank=0, world_size=2, seed=0)
    with pytest.raises(ConfigurationError, match="it reads 5 files, fewer than the 6 replicas"):
        shard_input(by_files(tf.data.TFRecordDataset(record_files).batch(2)), rank=0, world_size=6, seed=0)
    data = tf.data.Dataset.from_tensor_slices(record_files).map(tf.io.read_file).batch(2)
    with pytest.raises(ConfigurationError, match="TensorFlow finds no file reader"):
        shard_input(by_files(data), rank=0, world_size=2, seed=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_off_gives_every_rank_all_data_in_its_share_of_the_batch(world_size):
    ranks = ranks_of(lambda: (with_policy(dataset(6), Policy.OFF),), world_size)
    for rank in ranks:
        assert rank.source.traits.policy is AutoShardPolicy.OFF
        batches = list(rank.epoch(0))
        assert np.concatenate([batch.data[1] for batch in batches]).tolist() == list(range(23))
        assert max(batch.size for batch in batches) == -(-6 // world_size)
    first = [next(rank.epoch(1)).size for rank in ranks]
    assert sum(first) == 6, "the local batches of a step add up to the global batch"


def test_the_hint_becomes_a_shard_of_the_rank():
    def make():
        data = tf.data.Dataset.range(12).shard(tf.data.experimental.SHARD_HINT, tf.data.experimental.SHARD_HINT)
        return with_policy(data.batch(4), Policy.HINT)

    ranks = ranks_of(lambda: (make(),), 2)
    assert [np.concatenate([b.data[0] for b in rank.epoch(0)]).tolist() for rank in ranks] == [
        [0, 2, 4, 6, 8, 10],
        [1, 3, 5, 7, 9, 11],
    ]


def test_other_file_lists_have_other_signatures(record_files):
    def signature(names):
        data = tf.data.TFRecordDataset(names).batch(4)
        return shard_input(by_files(data), rank=0, world_size=2, seed=0).description.signature

    assert signature(record_files) == signature(list(record_files))
    assert signature(record_files) != signature(record_files[::-1])


def test_policy_values_are_those_of_tensorflow():
    assert {policy.name: policy.value for policy in AutoShardPolicy} == {policy.name: policy.value for policy in Policy}


SHUFFLES = {
    "seeded": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=4).batch(5),
    "without a seed": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23).batch(5),
    "of unknown length": lambda: (
        tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=4).batch(5).filter(lambda x, y: True)
    ),
    "one order": lambda: (
        tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=4, reshuffle_each_iteration=False).batch(5)
    ),
}


@pytest.mark.parametrize("opens_as_keras", [False, True])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(("epoch", "done"), [(0, 0), (0, 2), (1, 0), (2, 3), (3, 1)])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_one_that_comes_later_reads_the_order_of_that_pass(shuffle, epoch, done, looks, opens_as_keras):
    """A shuffle chooses another order for each iterator that is created."""

    def make(data, rank=0, world_size=2):
        request = {"rank": rank, "world_size": world_size, "seed": 3, "opens_as_keras": opens_as_keras}
        sharded = shard_input(data, **request)
        if looks:  # as where a model is built from a batch, and probed with it
            sharded.peek(restart=True)
            sharded.peek()
        return sharded

    data = SHUFFLES[shuffle]()
    list(make(data).epoch(0))  # in a call of another method, which one that comes later does not repeat
    member = make(data)
    for index in range(epoch):
        list(member.epoch(index))
    walk = member.epoch(epoch)
    for _ in range(done + 1):
        expected = next(walk)
    later = make(SHUFFLES[shuffle]())
    later.position.resume_epoch(member.position.running_epoch, done)
    found = next(later.epoch(epoch, done))
    np.testing.assert_array_equal(found.data[1], expected.data[1])


def flipped(x):
    if tf.random.uniform(()) > 0.5:
        x = -x
    return x, x + tf.random.normal(())


def mixed(layer):
    def augment(x):
        out = layer({"images": tf.reshape(tf.repeat(x, 8), (2, 2, 2)), "labels": tf.one_hot(tf.cast(x, tf.int32), 4)})
        return out["images"], out["labels"]

    return augment


@pytest.mark.parametrize("kind", ["tensorflow", "keras"])
def test_maps_in_threads_draw_random_numbers_in_the_order_of_the_elements(kind):
    """The threads race for them, so ranks would read something else."""

    def make(threads):
        keras.utils.set_random_seed(3)
        layer = keras.layers.MixUp(data_format="channels_last", seed=2)
        options = tf.data.Options()
        options.threading.private_threadpool_size = 8
        data = tf.data.Dataset.range(400).map(lambda number: tf.cast(number % 4, tf.float32))
        data = data.map(flipped if kind == "tensorflow" else mixed(layer), num_parallel_calls=threads)
        return shard_input(data.batch(50).with_options(options), rank=0, world_size=2, seed=1)

    def read(sharded):
        return [leaf for epoch in range(2) for batch in sharded.epoch(epoch) for leaf in leaves(batch.data[:2])]

    expected = read(make(None))
    for _ in range(2):
        for found, wanted in zip(read(make(8)), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("opens_as_keras", [False, True])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_one_that_reads_only_some_batches_reads_those_of_that_pass(shuffle, opens_as_keras):
    """On parameter servers another worker may have the last batch of a pass, or all of them."""

    def make():
        request = {"is_read_by_all": True, "seed": 3, "opens_as_keras": opens_as_keras}
        return NumberedBatches(shard_input(SHUFFLES[shuffle](), **request))

    one, other = make(), make()
    for epoch, taken in enumerate(((), (0, 2), (1,), (0, 3))):
        for worker in (one, other):
            worker.start_epoch(epoch)
        expected = [one.batch(number).data[1] for number in range(5)]
        for number in taken:
            np.testing.assert_array_equal(other.batch(number).data[1], expected[number])
        for worker in (one, other):
            worker.end_epoch(5)


def test_a_custom_loop_reads_shuffled_passes_in_the_order_of_the_dataset():
    """Keras's `fit` opens one pass more than it reads, after which a seeded shuffle is in another order."""

    def shuffled():
        return tf.data.Dataset.range(16).shuffle(16, seed=1).batch(4)

    plain = shuffled()
    expected = [[element.numpy().tolist() for element in plain] for _ in range(3)]
    ranks = [distribute_dataset(shuffled(), DatasetDistribution(rank=rank, world_size=2, seed=0)) for rank in range(2)]
    for epoch in expected:
        parts = zip(*ranks, strict=True)
        assert [[*first.tolist(), *second.tolist()] for first, second in parts] == epoch
