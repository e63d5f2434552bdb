"""What a ledger counts, and what has no numbers to count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import phalanx.data
from phalanx.data import shard_input
from phalanx.data.input_request import InputRequest
from phalanx.data.sample_ledger import SampleLedger
from phalanx.errors import ConfigurationError

torch = pytest.importorskip("torch")
data = torch.utils.data

Count = Callable[..., bool]


def count_step(ledger: SampleLedger, *step: Any) -> bool:
    return ledger.count_step(*step)


def hold_and_count(ledger: SampleLedger, *step: Any) -> bool:
    held = ledger.hold_local_step(*step, ["worker/0", "worker/1"])
    ledger.count_held(["worker/0", "worker/1"])
    return held


@pytest.mark.parametrize("count", [count_step, hold_and_count])
def test_a_sample_that_is_drawn_twice_for_a_batch_is_used_twice(count: Count) -> None:
    samples = data.TensorDataset(torch.arange(4.0).reshape(4, 1), torch.zeros(4))
    source = shard_input(InputRequest(data.DataLoader(samples, batch_size=4, sampler=[2, 2, 0, 2, 1, 2])))
    ledger = SampleLedger.create(source)
    assert ledger is not None
    for step, batch in enumerate(source.epoch(0)):
        assert count(ledger, source, step, (batch.size - 1, 1))
    ledger.end_epoch(0)
    np.testing.assert_array_equal(ledger.epochs[0], [1, 1, 4, 0])


class Keyed(data.Dataset):
    """Its samples have keys that are no numbers of samples: sizes to load them in, or names, or numbers of its own."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: Any) -> Any:
        return torch.ones(1), torch.ones(1)


class Keys(data.Sampler):
    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


@pytest.mark.parametrize("count", [count_step, hold_and_count])
@pytest.mark.parametrize("keys", [[(0, 224), (1, 128), (2, 224)], ["a", "b", "c"], [(0, "a"), "b", (1,)], [10, 20, 30]])
def test_keys_that_are_no_numbers_of_samples_are_not_counted(keys: list[Any], count: Count) -> None:
    source = shard_input(InputRequest(data.DataLoader(Keyed(), batch_size=3, sampler=Keys(keys))))
    ledger = SampleLedger.create(source)
    assert ledger is not None
    next(source.epoch(0))
    assert not count(ledger, source, 0, (2, 1))
    assert SampleLedger.newest() is None
    with pytest.raises(ConfigurationError, match="There is no ledger"):
        phalanx.data.ledger()
