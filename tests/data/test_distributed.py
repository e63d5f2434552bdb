import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from phalanx.data import DatasetCreator, InputContext, distribute_dataset, distribute_from_function
from phalanx.data.distributed_dataset import DatasetDistribution, Members
from phalanx.errors import ConfigurationError, UnsupportedError
from tests.data.merging import shard_input

X = np.arange(22.0).reshape(11, 2)
Y = np.arange(11)


def batches():
    for first in range(0, 11, 4):
        yield (
            X[first : first + 4],
            Y[first : first + 4],
            Y[first : first + 4],
            "kept"[:0] or Y[first : first + 4],
        )


def dataset():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def test_a_custom_loop_gets_its_part_of_each_element_whatever_its_structure():
    parts = [
        list(distribute_dataset(batches(), DatasetDistribution(rank=rank, world_size=3, seed=0))) for rank in range(3)
    ]
    for number, elements in enumerate(zip(*parts, strict=True)):
        assert all(isinstance(element, tuple) and len(element) == 4 for element in elements)
        together = np.concatenate([element[1] for element in elements])
        assert together.tolist() == Y[4 * number : 4 * number + 4].tolist()


@pytest.mark.parametrize("given", [[(X[:4], Y[:4]), (X[4:8], Y[4:8])], (X, Y)])
def test_a_list_of_batches_is_refused(given):
    with pytest.raises(ConfigurationError, match="of arrays or batches cannot be"):
        distribute_dataset(given, DatasetDistribution(rank=0, world_size=2, seed=0))
    with pytest.raises(ConfigurationError, match="of arrays or batches cannot be"):
        distribute_from_function(lambda context: given, DatasetDistribution(rank=0, world_size=2, seed=0))


def test_a_dataset_follows_the_members_of_an_elastic_job():
    part = [2, 3]
    members = Members(lambda: tuple(part), lambda epoch: epoch)
    data = distribute_dataset(dataset(), DatasetDistribution(rank=2, world_size=3, seed=0, members=members))
    open_one = iter(data)
    assert next(open_one)[1].tolist() == [3]
    part[:] = 1, 2
    with pytest.raises(UnsupportedError, match=r"members of the job have changed.*phalanx\.elastic\.run"):
        next(open_one)
    assert [element[1].tolist() for element in data] == [[2, 3], [6, 7], [10]]


def test_a_member_that_joins_shuffles_as_the_others():
    torch = pytest.importorskip("torch")

    def shuffled(chiefs):
        loader = torch.utils.data.DataLoader(torch.arange(40), batch_size=8, shuffle=True)
        return distribute_dataset(
            loader, DatasetDistribution(rank=0, world_size=1, seed=3, members=Members(lambda: (0, 1), chiefs))
        )

    old, new = shuffled(lambda epoch: epoch), shuffled(lambda epoch: 1)
    first = [batch.tolist() for batch in old]
    second = [batch.tolist() for batch in old]
    assert first != second == [batch.tolist() for batch in new]


def test_a_rank_without_a_sample_gets_empty_arrays():
    parts = [
        list(distribute_dataset(batches(), DatasetDistribution(rank=rank, world_size=5, seed=0))) for rank in range(5)
    ]
    assert [len(part[0][0]) for part in parts] == [1, 1, 1, 1, 0]
    assert parts[4][0][0].shape == (0, 2)


def test_a_tf_dataset_keeps_its_length_and_spec_and_can_be_read_again():
    distributed = distribute_dataset(dataset(), DatasetDistribution(rank=1, world_size=2, seed=0))
    assert len(distributed) == distributed.cardinality == 3
    assert [spec.shape.as_list() for spec in distributed.element_spec] == [[None, 2], [None]]
    for _ in range(2):
        assert [part[1].tolist() for part in distributed] == [[2, 3], [6, 7], [10]]
    assert distribute_dataset(distributed, DatasetDistribution(rank=1, world_size=2, seed=0)) is distributed
    assert "DATA" in distributed.explain()


def test_a_creator_makes_each_ranks_own_dataset():
    seen = []

    def create(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.get_per_replica_batch_size(8)))
        return batches()

    creator = DatasetCreator(create)
    for rank in range(2):
        source = shard_input(creator, steps_per_epoch=3, rank=rank, world_size=2, seed=0)
        assert [share.size for share in source.shares(0)] == [4, 4, 3]
    assert seen == [(2, 0, 4), (2, 1, 4)]
    creator()
    assert seen[-1] == (1, 0, 8)
    with pytest.raises(ConfigurationError, match="dataset_fn is 3; pass a function"):
        DatasetCreator(3)
    with pytest.raises(ConfigurationError, match="returned a ndarray"):
        shard_input(DatasetCreator(lambda context: X), rank=0, world_size=1, seed=0)


def test_unknown_and_endless_lengths():
    unknown = distribute_dataset(batches(), DatasetDistribution(rank=0, world_size=2, seed=0))
    assert unknown.cardinality == -2
    with pytest.raises(TypeError, match="length of this Python generator is unknown"):
        len(unknown)
    endless = distribute_dataset(dataset().repeat(), DatasetDistribution(rank=0, world_size=2, seed=0))
    assert endless.cardinality == -1
    iterator = iter(endless)
    assert len([next(iterator) for _ in range(7)]) == 7


def test_leaves_are_converted_to_the_backend():
    distributed = distribute_dataset(
        dataset(), DatasetDistribution(rank=0, world_size=2, seed=0, convert=lambda a: ("tensor", a))
    )
    x, _ = next(iter(distributed))
    assert x[0] == "tensor"


def test_a_function_makes_each_rank_s_own_dataset():
    contexts = []

    def function(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(4)
        data = dataset().unbatch().shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(size)

    parts = [
        distribute_from_function(function, DatasetDistribution(rank=rank, world_size=2, seed=0)) for rank in range(2)
    ]
    assert contexts == [InputContext(2, 0, 2), InputContext(2, 1, 2)]
    assert [[element[1].tolist() for element in part] for part in parts] == [
        [[0, 2], [4, 6], [8, 10]],
        [[1, 3], [5, 7], [9]],
    ]


@pytest.mark.parametrize("own", [True, False])
def test_fit_takes_a_distributed_dataset(own):
    if own:
        data = distribute_from_function(lambda context: dataset(), DatasetDistribution(rank=1, world_size=2, seed=0))
    else:
        data = distribute_dataset(dataset(), DatasetDistribution(rank=1, world_size=2, seed=0))
    sharded = shard_input(data, rank=1, world_size=2, seed=0)
    for epoch in range(2):
        read = list(sharded.epoch(epoch))
        assert [batch.size for batch in read] == ([4, 4, 3] if own else [2, 2, 1])
        assert [batch.global_size for batch in read] == ([None] * 3 if own else [4, 4, 3])
    assert sharded.is_uniform is not own
    assert (sharded.fingerprint is None) is own
    assert len(sharded.description.explain().splitlines()) == 3


def test_what_one_rank_reads_alone_tells_the_others_nothing():
    torch = pytest.importorskip("torch")

    def function(context: InputContext):
        data = torch.utils.data.TensorDataset(torch.arange(11))
        return torch.utils.data.DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))

    data = distribute_from_function(function, DatasetDistribution(rank=1, world_size=2, seed=0))
    sharded = shard_input(data, rank=1, world_size=2, seed=0)
    assert (sharded.samples, sharded.sampled_values.size, sharded.is_in_memory) == (None, 0, False)
    assert sharded.position.next_pass.randomness == b""
    sharded.reshard(0, 3)
    assert [batch.size for batch in sharded.epoch(0)] == [4, 4, 3]
    text = sharded.description.explain()
    assert "rank 2 reads all of the torch DataLoader that its own function returned" in text


def test_one_rank_alone_may_read_a_generator_that_fills_its_arrays_again():
    def function(context: InputContext):
        array = np.zeros((2, 1))
        for number in range(3):
            array[:] = number
            yield (array,)

    data = distribute_from_function(function, DatasetDistribution(rank=1, world_size=2, seed=0))
    assert [x[0, 0] for (x,) in list(data)] == [0, 1, 2]


def test_the_context_is_that_of_tf_distribute():
    context = InputContext(num_input_pipelines=3, input_pipeline_id=1, num_replicas_in_sync=3)
    assert context.get_per_replica_batch_size(6) == 2
    with pytest.raises(ConfigurationError, match="`global_batch_size` 7 is not divisible by `num_replicas_in_sync`"):
        context.get_per_replica_batch_size(7)
    assert str(context) == "InputContext(input pipeline id 1, total: 3)"


def test_ranks_whose_data_end_early_get_batches_without_samples():
    meeting, flags = threading.Barrier(2, timeout=30), [False, False]

    def iterated(rank: int) -> list[tuple[int, ...]]:
        def any_rank(flag: bool) -> bool:
            flags[rank] = flag
            meeting.wait()
            found = any(flags)
            meeting.wait()
            return found

        class Own(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 1 + 2 * rank

            def __getitem__(self, index: int):
                return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]

        data = distribute_from_function(
            lambda _: Own(), DatasetDistribution(rank=rank, world_size=2, seed=0, any_rank=any_rank)
        )
        return [x.shape for _ in range(2) for x, _ in data]

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(iterated, range(2))
    assert second == [(4, 2), (4, 2), (3, 2)] * 2
    assert first == [(4, 2), (0, 2), (0, 2)] * 2


def test_a_rank_without_any_data_gets_batches_without_samples():
    tf = pytest.importorskip("tensorflow")
    left = [True]

    def own(_: InputContext):
        data = {"x": np.zeros((2, 3), "float32"), "name": np.array(["a", "b"])}
        return tf.data.Dataset.from_tensor_slices(data).batch(2).take(0)

    data = distribute_from_function(
        own, DatasetDistribution(rank=1, world_size=2, seed=0, any_rank=lambda _: left.pop() if left else False)
    )
    (batch,) = list(data)
    assert (batch["x"].shape, batch["x"].dtype) == ((0, 3), np.float32)
    assert batch["name"].shape == (0,)


def test_a_rank_without_any_data_that_cannot_be_imitated_is_told_so():
    data = distribute_from_function(
        lambda _: (_ for _ in ()), DatasetDistribution(rank=1, world_size=2, seed=0, any_rank=lambda own: True)
    )
    with pytest.raises(ConfigurationError, match="of rank 1 has no batch at all"):
        list(data)


def test_a_rank_without_any_data_says_so_when_the_others_have_some():
    own = distribute_from_function(
        lambda context: (part for part in ()), DatasetDistribution(rank=1, world_size=2, seed=0)
    )
    source = shard_input(own, rank=1, world_size=2, seed=0)
    assert list(source.epoch(0)) == []
    with pytest.raises(ConfigurationError, match="gave no batch on rank 1 of 2"):
        source.placeholder_batch()
