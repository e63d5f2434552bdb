import itertools

import numpy as np
import pytest

from phalanx.data import distribute_dataset
from phalanx.data.distributed_dataset import DatasetDistribution
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters
from tests.data.merging import WORLD_SIZES, assert_same_batches, keras_batches, merged_epoch, ranks_of, shard_input

torch = pytest.importorskip("torch")
data = torch.utils.data

X = torch.arange(46.0).reshape(23, 2)
Y = torch.arange(23)


class Recording(data.Dataset):
    """A map-style dataset that knows which samples were asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 23

    def __getitem__(self, index):
        self.asked.append(int(index))
        return X[index], Y[index]


class Stream(data.IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


def loader(**options):
    return data.DataLoader(data.TensorDataset(X, Y), **{"batch_size": 4, **options})


KINDS = {
    "map": loader,
    "drop_last": lambda: loader(drop_last=True),
    "batch sampler": lambda: data.DataLoader(data.TensorDataset(X, Y), batch_sampler=[[1, 2, 3], [4], [5, 6, 7, 8, 0]]),
    "batches made by the dataset": lambda: data.DataLoader(
        [(X[i : i + 5], Y[i : i + 5]) for i in range(0, 23, 5)], batch_size=None
    ),
    "iterable": lambda: data.DataLoader(Stream(), batch_size=4),
    "seeded": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_the_local_batches_of_all_ranks_are_the_batches_of_keras(name, world_size):
    expected = keras_batches(KINDS[name]())
    ranks = ranks_of(lambda: (KINDS[name](),), world_size)
    assert ranks[0].is_uniform is (name != "iterable")
    if name != "iterable":
        assert ranks[0].num_batches == len(expected)
    assert_same_batches(merged_epoch(ranks, 0), expected)


def test_a_loader_with_its_own_generator_keeps_the_order_that_it_has_without_phalanx():
    plain = KINDS["seeded"]()
    ranks = ranks_of(lambda: (KINDS["seeded"](),), 3)
    for rank in ranks:
        rank.peek()
    for epoch in range(3):
        expected = [tuple(tensor.numpy() for tensor in batch) for batch in plain]
        if data_adapters.opens_extra_iterator("torch"):
            iter(plain)  # as Keras does after each epoch
        assert_same_batches(merged_epoch(ranks, epoch), expected)


@pytest.mark.parametrize("steps", [2, 6], ids=["within a pass", "with a pass"])
def test_evaluations_draw_what_keras_draws(steps):
    plain = KINDS["seeded"]()
    ranks = [
        shard_input(KINDS["seeded"](), steps_per_epoch=steps, rank=rank, world_size=2, seed=0) for rank in range(2)
    ]
    for _ in range(3):
        expected = [tuple(tensor.numpy() for tensor in batch) for batch in itertools.islice(plain, steps)]
        if steps == 6 and data_adapters.opens_extra_iterator("torch"):
            iter(plain)  # which Keras drops when the next evaluation begins
        for rank in ranks:
            rank.position.reset()
        assert_same_batches(merged_epoch(ranks, 0), expected)


def test_custom_loops_have_the_order_of_the_plain_loader():
    def make():
        return loader(batch_size=23, shuffle=True, generator=torch.Generator().manual_seed(3))

    plain, distributed = make(), distribute_dataset(make(), DatasetDistribution(rank=0, world_size=1, seed=0))
    for _ in range(3):
        for expected, found in zip(plain, distributed, strict=True):
            np.testing.assert_array_equal(found[0], expected[0].numpy())


def noisy(**options):
    class Noisy(data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.rand(()), index

    return data.DataLoader(Noisy(), batch_size=2, num_workers=1, **options)


def noise_of(sharded, epoch):
    return [float(batch.data[0][0]) for batch in sharded.epoch(epoch)]


def test_workers_of_a_loader_draw_other_numbers_in_each_epoch():
    sharded = shard_input(noisy(), steps_per_epoch=3, rank=0, world_size=1, seed=0)
    assert not set(noise_of(sharded, 0)) & set(noise_of(sharded, 1))


def test_workers_draw_the_same_on_all_ranks_where_each_makes_whole_batches():
    def collate(samples):
        return data.default_collate(samples)

    ranks = [shard_input(noisy(collate_fn=collate), rank=rank, world_size=2, seed=0) for rank in range(2)]
    for batches in zip(*(rank.epoch(0) for rank in ranks), strict=True):
        assert len(batches) == 2
        assert len({rank.fingerprint() for rank in ranks}) == 1


def test_opening_a_loader_draws_nothing_from_torchs_generator():
    """It is opened again where training resumes in the middle of an epoch."""
    before = torch.get_rng_state()
    next(shard_input(loader(shuffle=True), rank=0, world_size=1, seed=0).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def pair(batch):
    return [np.asarray(part) for part in batch.data[:2]]


def of_a_sampler():
    """The generator is that of the sampler only, and no one drew from it yet."""
    own = torch.Generator().manual_seed(3)
    return (loader(sampler=data.RandomSampler(range(23), generator=own)),)


@pytest.mark.parametrize("make", [lambda: (KINDS["seeded"](),), of_a_sampler], ids=["loader", "sampler"])
def test_one_that_comes_later_is_given_the_generators_state_and_so_the_same_order(make):
    old, late, between = (shard_input(*make(), rank=0, world_size=1, seed=0) for _ in range(3))
    for epoch in range(2):
        list(old.epoch(epoch))
    between.position.resume_between_epochs(old.position.next_epoch)
    running = old.epoch(2)
    begun = [next(running), next(running)]
    assert_same_batches([pair(next(between.epoch(2)))], [pair(begun[0])])
    late.peek()
    late.position.resume_epoch(old.position.running_epoch, len(begun))
    assert_same_batches(list(map(pair, late.epoch(2, len(begun)))), list(map(pair, running)))
    for epoch in (3, 4):
        assert_same_batches(list(map(pair, late.epoch(epoch))), list(map(pair, old.epoch(epoch))))


def test_the_order_of_a_pass_cannot_be_continued_from_other_generators():
    seeded, plain = shard_input(KINDS["seeded"](), rank=0, world_size=1), shard_input(loader(), rank=0, world_size=1)
    list(itertools.islice(seeded.epoch(0), 2))
    with pytest.raises(ConfigurationError, match="The data draw the order of a pass from other random generators"):
        plain.position.resume_epoch(seeded.position.running_epoch, 2)
    plain.position.resume_between_epochs(seeded.position.next_pass)  # nothing has been read of it


def test_without_generators_of_its_own_a_loader_has_no_state_to_give():
    sharded = shard_input(loader(shuffle=True), rank=0, world_size=1, seed=0)
    assert sharded.position.running_epoch.randomness == sharded.position.next_epoch.randomness == b""


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sampler", ["shuffle", "weighted"])
def test_shuffling_is_the_same_on_all_ranks_and_differs_between_epochs(world_size, sampler):
    def make():
        torch.seed()  # every process has its own state
        if sampler == "shuffle":
            return (loader(shuffle=True),)
        return (loader(sampler=data.WeightedRandomSampler(torch.ones(23), 23, replacement=False)),)

    alone, ranks = ranks_of(make, 1), ranks_of(make, world_size)
    orders = []
    for epoch in range(2):
        expected = merged_epoch(alone, epoch)
        assert_same_batches(merged_epoch(ranks, epoch), expected)
        orders.append(np.concatenate([batch[1] for batch in expected]).tolist())
        assert sorted(orders[-1]) == list(range(23))
    assert orders[0] != orders[1]


def test_a_rank_loads_only_its_own_samples():
    datasets = [Recording() for _ in range(3)]
    for rank, dataset in enumerate(datasets):
        sharded = shard_input(data.DataLoader(dataset, batch_size=6, shuffle=True), rank=rank, world_size=3, seed=0)
        assert len(list(sharded.epoch(0))) == 4
    assert sorted(itertools.chain(*(dataset.asked for dataset in datasets))) == list(range(23))


def test_the_program_s_random_state_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    sharded = shard_input(loader(), rank=0, world_size=2, seed=0)
    sharded.source.rows(0, 0)
    assert torch.rand(1) == expected


def test_workers_and_collation_are_kept():
    def collate(samples):
        return torch.stack([x for x, _ in samples]) * 2, torch.stack([y for _, y in samples])

    ranks = ranks_of(lambda: (loader(num_workers=1, collate_fn=collate),), 2)
    got = merged_epoch(ranks, 0)
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in got]), X.numpy() * 2)


def test_with_steps_an_epoch_goes_on_where_the_last_one_stopped():
    ranks = ranks_of(lambda: (loader(),), 2, steps_per_epoch=3)
    assert [[batch[1][0] for batch in merged_epoch(ranks, epoch)] for epoch in range(3)] == [
        [0, 4, 8],
        [12, 16, 20],
        [0, 4, 8],
    ]


def test_dictionaries_are_inputs():
    samples = [{"a": X[i], "b": Y[i]} for i in range(23)]
    (batch, *_) = merged_epoch(ranks_of(lambda: (data.DataLoader(samples, batch_size=4),), 3), 0)
    np.testing.assert_array_equal(batch[1], [0, 1, 2, 3])


def test_a_distributed_sampler_has_divided_the_samples_already():
    def make(rank, world_size=2):
        sampler = data.DistributedSampler(Y, num_replicas=2, rank=rank, shuffle=False)
        return shard_input(
            data.DataLoader(data.TensorDataset(X, Y), batch_size=4, sampler=sampler),
            rank=rank,
            world_size=world_size,
            seed=0,
        )

    batches = list(make(1).epoch(0))
    assert [batch.size for batch in batches] == [4, 4, 4]
    assert batches[0].global_size is None
    assert batches[0].data[1].tolist() == [1, 3, 5, 7]
    with pytest.raises(ConfigurationError, match=r"DistributedSampler is for rank 1 of 2, but this is rank 1 of 3"):
        make(1, 3)


def test_a_collation_of_the_program_sees_the_global_batch():
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return torch.stack([x for x, _ in samples[:-1]]), torch.stack([y for _, y in samples[:-1]])

    got = merged_epoch(ranks_of(lambda: (loader(collate_fn=collate),), 3), 0)
    assert set(seen) == {4, 3}
    assert [len(batch[0]) for batch in got] == [3, 3, 3, 3, 3, 2]


def test_peek_reads_one_batch():
    sharded = shard_input(loader(), rank=1, world_size=2, seed=0)
    np.testing.assert_array_equal(sharded.peek().data[1], [2, 3])


def test_class_weights_are_refused_as_in_keras():
    with pytest.raises(ValueError, match="`class_weight` is not supported for torch DataLoader"):
        shard_input(loader(), class_weight={0: 1.0}, rank=0, world_size=1, seed=0)


def test_fingerprints_are_of_the_order():
    def fingerprint(order):
        sharded = shard_input(
            data.DataLoader(data.TensorDataset(X, Y), batch_size=4, sampler=order),
            rank=0,
            world_size=2,
            seed=0,
        )
        next(sharded.epoch(0))
        return sharded.fingerprint()

    assert fingerprint(list(range(23))) == fingerprint(list(range(23)))
    assert fingerprint(list(range(23))) != fingerprint(list(range(22, -1, -1)))


def sample_of(dataset):
    return shard_input(data.DataLoader(dataset, batch_size=4), rank=0, world_size=2, seed=0).sampled_values


def test_other_subsets_and_other_tensors_are_told_apart():
    tensors = data.TensorDataset(X, Y)
    chosen = sample_of(data.Subset(tensors, [5, 1, 3]))
    assert not np.allclose(chosen, sample_of(data.Subset(tensors, [5, 1, 4])), rtol=1e-3)
    nested = data.Subset(data.Subset(tensors, [0, 5, 1, 3]), [1, 2, 3])
    np.testing.assert_array_equal(sample_of(nested), chosen)
    assert not np.allclose(sample_of(tensors), sample_of(data.TensorDataset(X + 1, Y)))


def test_of_other_datasets_only_what_was_chosen_is_looked_at():
    asked = Recording()
    assert sample_of(asked).size == 0
    assert sample_of(data.Subset(asked, range(3))).size
    assert sample_of(data.Subset({"a": 1, "b": 2}, ["a", "b"])).size
    assert not asked.asked
