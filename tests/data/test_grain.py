import numpy as np
import pytest

from phalanx.errors import ConfigurationError
from tests.data.merging import WORLD_SIZES, assert_same_batches, keras_batches, merged_epoch, ranks_of, shard_input

grain = pytest.importorskip("grain")

X = np.arange(46.0, dtype="float32").reshape(23, 2)


class Rows(grain.sources.RandomAccessDataSource):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return X[index], np.int64(index)


KINDS = {
    "MapDataset": lambda: grain.MapDataset.source(Rows()).shuffle(seed=3).batch(4),
    "IterDataset": lambda: grain.MapDataset.source(Rows()).to_iter_dataset().batch(4),
    "DataLoader": lambda: grain.DataLoader(
        data_source=Rows(),
        sampler=grain.samplers.IndexSampler(23, num_epochs=1, seed=1, shuffle=True),
        operations=[grain.transforms.Batch(4)],
    ),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_the_local_batches_of_all_ranks_are_the_batches_of_keras(name, world_size):
    expected = keras_batches(KINDS[name]())
    ranks = ranks_of(lambda: (KINDS[name](),), world_size)
    assert ranks[0].num_batches == (len(expected) if name == "MapDataset" else None)
    assert ranks[0].is_uniform is (name == "MapDataset")
    for epoch in range(2):
        assert_same_batches(merged_epoch(ranks, epoch), expected)


def test_endless_data_needs_steps():
    with pytest.raises(ConfigurationError, match="must specify the `steps_per_epoch`"):
        shard_input(KINDS["MapDataset"]().repeat(), rank=0, world_size=2, seed=0)
