"""PyTorch: tensors, in-place forms, gradients, optimizers."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import phalanx.horovod.torch as hvd
from phalanx.errors import UnsupportedError
from tests.support.traces import Events, named, traced

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def _of(rank: int, shape, dtype=torch.float32) -> torch.Tensor:
    return torch.randint(1, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _all(shape, dtype=torch.float32) -> list[torch.Tensor]:
    return [_of(rank, shape, dtype) for rank in range(hvd.size())]


def check_allreduce_of_every_dtype_in_place_and_not() -> None:
    for dtype, shape in itertools.product(DTYPES, [(), (17,), (3, 4, 5)]):
        expected = torch.stack([each.double() for each in _all(shape, dtype)]).sum(0)
        mine = _of(hvd.rank(), shape, dtype)
        merged = hvd.allreduce(mine, op=hvd.Sum)
        assert merged.dtype == dtype
        assert torch.equal(merged.double(), expected)
        assert torch.equal(mine, _of(hvd.rank(), shape, dtype)), "the input stays"
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        assert torch.equal(mine.double(), expected)


def check_tensors_that_are_not_contiguous() -> None:
    mine = _of(hvd.rank(), (4, 3)).t()
    expected = torch.stack(_all((4, 3))).sum(0).t()
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), expected)
    assert torch.equal(hvd.allreduce_(mine, op=hvd.Sum), expected)
    assert torch.equal(hvd.allgather(_of(hvd.rank(), (4, 3)).t()), torch.cat([each.t() for each in _all((4, 3))]))


def check_handles_out_of_order() -> None:
    tensors = [torch.full((3,), float(i)) for i in range(20)]
    order = list(range(20)) if hvd.rank() % 2 else list(reversed(range(20)))
    handles = {i: hvd.allreduce_async_(tensors[i], name=f"t{i}", op=hvd.Sum) for i in order}
    while not hvd.poll(handles[7]):
        pass
    for i in range(20):
        assert hvd.synchronize(handles[i]) is tensors[i]
        assert tensors[i].tolist() == [i * hvd.size()] * 3


def check_grouped_and_other_operations() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [_of(rank, (3,)), _of(rank, (2, 2), torch.float64)]
    for merged, shape in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), [(3,), (2, 2)], strict=True):
        assert torch.equal(merged.double(), torch.stack(_all(shape)).sum(0).double())
    assert hvd.grouped_allreduce_(tensors, op=hvd.Max)[0] is tensors[0]
    gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert hvd.broadcast(torch.tensor([rank]), size - 1).tolist() == [size - 1]
    mine = torch.tensor([float(rank)])
    assert hvd.broadcast_(mine, size - 1) is mine
    assert mine.item() == size - 1
    received, counts = hvd.alltoall(torch.full((size,), float(rank)), torch.ones(size, dtype=torch.int32))
    assert received.tolist() == list(map(float, range(size)))
    assert counts.tolist() == [1] * size
    assert hvd.alltoall(torch.full((size,), float(rank))).tolist() == received.tolist()
    assert hvd.reducescatter(torch.ones(size + 1), op=hvd.Sum).tolist() == [size] * (2 if rank == 0 else 1)
    assert hvd.synchronize(hvd.reducescatter_async(torch.ones(size), op=hvd.Average)).tolist() == [1.0]
    hvd.barrier()
    assert hvd.join() in range(size)


def check_what_is_no_dense_tensor_is_refused() -> None:
    for wrong in (np.ones(2), [1.0], None):
        with pytest.raises(TypeError, match="takes PyTorch tensors"):
            hvd.allreduce(wrong)
    with pytest.raises(UnsupportedError, match="sparse_allreduce_async"):
        hvd.allreduce(torch.eye(2).to_sparse())


def check_differences_raise_on_every_rank() -> None:
    last = hvd.rank() == hvd.size() - 1
    for tensor, words in (
        (torch.ones(3 if last else 2), "Mismatched shapes"),
        (torch.ones(3, dtype=torch.float64 if last else torch.float32), "Mismatched data types"),
    ):
        with pytest.raises(RuntimeError, match=words):
            hvd.allreduce(tensor, name="differs")
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched root ranks"):
        hvd.broadcast(torch.ones(2), hvd.rank())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_compression() -> None:
    mine = torch.tensor([1.0, 2.0, 3.0]) * (hvd.rank() + 1)
    merged = hvd.allreduce(mine, compression=hvd.Compression.fp16)
    assert merged.dtype == torch.float32
    assert torch.allclose(merged, torch.tensor([1.0, 2.0, 3.0]) * (hvd.size() + 1) / 2, rtol=1e-3)


def check_gradients_of_collectives() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.ones(size, 2, requires_grad=True)
    (hvd.allreduce(mine, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, sum(range(1, size + 1))))
    mine.grad = None
    (hvd.allreduce(mine) * (rank + 1)).sum().backward()
    assert torch.allclose(mine.grad, torch.full_like(mine, sum(range(1, size + 1)) / size))
    mine.grad = None
    (hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)).sum().backward()
    assert torch.allclose(mine.grad, torch.full_like(mine, 1.5 * size))
    mine.grad = None
    a, b = hvd.grouped_allreduce([mine, mine * 2], op=hvd.Sum)
    (a + b).sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, 3.0 * size))

    rows = torch.ones(rank + 1, 3, requires_grad=True)
    gathered = hvd.allgather(rows)
    weights = torch.arange(len(gathered), dtype=torch.float32)[:, None].expand_as(gathered)
    gathered.backward(weights)
    start = sum(range(1, rank + 1))
    assert torch.equal(rows.grad, weights[start : start + rank + 1])

    mine.grad = None
    hvd.broadcast(mine, size - 1).backward(torch.full_like(mine, 2.0))
    assert torch.equal(mine.grad, torch.full_like(mine, 2.0 if rank == size - 1 else 0.0))
    mine.grad = None
    received, _ = hvd.alltoall(mine, [1] * size)
    received.backward(torch.full_like(received, rank + 1.0))
    assert mine.grad[:, 0].tolist() == [r + 1.0 for r in range(size)]
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        mine.grad = None
        part = hvd.reducescatter(mine, op=op)
        part.backward(torch.full_like(part, rank + 1.0))
        assert mine.grad[:, 0].tolist() == [(r + 1.0) * factor for r in range(size)]
    with pytest.raises(NotImplementedError, match="no gradient"):
        hvd.allreduce(mine, op=hvd.Max).sum().backward()


def check_gradients_of_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.full((size, 2), rank + 1.0, requires_grad=True)

    def twice(function):
        (first,) = torch.autograd.grad((function(x**3) ** 2).sum() / 2, x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    every = torch.arange(1.0, size + 1)
    expected = 6 * (rank + 1.0) * size * (every**3).sum() + 3 * (rank + 1.0) ** 2 * size * (3 * every**2).sum()
    torch.testing.assert_close(twice(lambda value: hvd.allreduce(value, op=hvd.Sum)), expected.expand(size, 2))
    for function in (hvd.allgather, hvd.reducescatter, lambda value: hvd.broadcast(value, 0)):
        with pytest.raises(NotImplementedError, match="gradient of the gradient"):
            twice(function)
    found = twice(hvd.SyncBatchNorm(2))
    x = every.repeat_interleave(size)[:, None].repeat(1, 2).requires_grad_()  # of all ranks, in one process
    torch.testing.assert_close(found, twice(nn.BatchNorm1d(2))[rank * size : (rank + 1) * size])


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch: 4 rows for each rank."""
    generator = torch.Generator().manual_seed(step)
    rows = 4 * hvd.size()
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def _mine(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(part[hvd.rank() :: hvd.size()] for part in batch)


def _same(left: nn.Module, right: nn.Module, rtol: float = 1e-5) -> None:
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


def check_distributed_optimizers_train_as_one_process_on_the_global_batch() -> None:
    loss_of = nn.CrossEntropyLoss()
    for make, options in itertools.product(
        OPTIMIZERS.values(),
        (
            {},
            {"gradient_predivide_factor": float(hvd.size())},
            {"num_groups": 2},
            {"groups": 3},
            {"op": hvd.Sum},
        ),
    ):
        model, reference = _model(hvd.rank()), _model(0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        _same(model, reference)
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), named_parameters=model.named_parameters(), **options
        )
        alone = make(reference.parameters())
        for step in range(4):
            optimizer.zero_grad()
            x, y = _mine(_data(step))
            factor = 1 / hvd.size() if options.get("op") is hvd.Sum else 1.0
            (factor * loss_of(model(x), y)).backward()
            optimizer.step()
            alone.zero_grad()
            x, y = _data(step)
            loss_of(reference(x), y).backward()
            alone.step()
        _same(model, reference)
        assert isinstance(optimizer, type(alone))


def check_backward_passes_per_step_and_synchronize_before_clipping() -> None:
    loss_of = nn.CrossEntropyLoss()
    model, reference = _model(), _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
    )
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    events: Events = []
    with traced(hvd, events):
        for step in range(3):
            optimizer.zero_grad()
            alone.zero_grad()
            for part in range(2):
                x, y = _mine(_data(10 * step + part))
                loss_of(model(x), y).backward()
                x, y = _data(10 * step + part)
                loss_of(reference(x), y).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            alone.step()
    _same(model, reference)
    for rank in range(hvd.size()):
        assert [len(named(events, name, rank)) for name in ("backward", "merge", "apply")] == [3, 3, 3]


def check_misuse_of_the_optimizer_is_told() -> None:
    model = _model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match="unique"):
        hvd.DistributedOptimizer(sgd, [(name, p) for name, p in named] + [named[0]])
    with pytest.raises(ValueError, match="not named"):
        hvd.DistributedOptimizer(sgd, named[1:])
    with pytest.raises(ValueError, match="sequence of tuples"):
        hvd.DistributedOptimizer(sgd, list(model.parameters()))
    with pytest.raises(ValueError, match="Average"):
        hvd.DistributedOptimizer(sgd, named, op=hvd.Sum, gradient_predivide_factor=2.0)
    optimizer = hvd.DistributedOptimizer(sgd, named)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer, named)
    x, _ = _mine(_data(0))
    model(x).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        model(x).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def check_parameters_that_only_some_ranks_use() -> None:
    """A rank that has not computed a gradient counts as zero."""
    layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))
    for layer in layers:
        nn.init.ones_(layer.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        layers[hvd.rank() % 2](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    odd = hvd.size() // 2
    expected = [1 - 2 * (hvd.size() - odd) / hvd.size(), 1 - 2 * odd / hvd.size(), 1.0]
    for layer, value in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.weight, torch.full((1, 2), value))


def check_sparse_gradients_gathered_and_dense() -> None:
    for dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True)
        start = table.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=dense
        )
        for step in range(2):
            optimizer.zero_grad()
            if step == 0 or hvd.rank() == 0:  # in the second step only rank 0 has a gradient
                table(torch.tensor([hvd.rank(), 9])).sum().backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
        change = start - table.weight.detach()
        torch.testing.assert_close(change[9], torch.full((3,), 1.0 + 1 / hvd.size()))
        torch.testing.assert_close(change[0], torch.full((3,), 2.0 / hvd.size()))
        torch.testing.assert_close(change[8], torch.zeros(3))


def check_compressed_gradients() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.fp16
    )
    x, y = _mine(_data(0))
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.synchronize()
    reference = _model()
    x, y = _data(0)
    nn.CrossEntropyLoss()(reference(x), y).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, rtol=5e-3, atol=1e-4)


def check_large_models_travel_in_several_buckets() -> None:
    model = nn.Sequential(*[nn.Linear(1500, 1500, bias=False) for _ in range(3)])  # 9 MB each
    hvd.broadcast_parameters(model.named_parameters(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    assert len(optimizer._hvd_reducer.buckets) == 3
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.full((2, 1500), float(hvd.rank() + 1))
        model(x).sum().backward()
        own = [parameter.grad for parameter in model.parameters()]
        optimizer.synchronize()
        for parameter in model.parameters():
            assert hvd.allgather(parameter.grad[:1]).unique(dim=0).shape[0] == 1, "the same on every rank"
        assert all(a is b.grad for a, b in zip(own, model.parameters(), strict=True)), "in place"


def check_adasum_optimizer_merges_steps() -> None:
    if hvd.size() & (hvd.size() - 1):
        return
    layer = nn.Linear(hvd.size(), 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters(), op=hvd.Adasum
    )
    x = torch.zeros(1, hvd.size())
    x[0, hvd.rank()] = 3.0  # orthogonal gradients are added
    layer(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.full((1, hvd.size()), -3.0))
    with pytest.raises(AssertionError, match="not supported"), optimizer.skip_synchronize():
        pass


def check_an_adasum_optimizer_in_a_process_set() -> None:
    group = hvd.add_process_set([0])
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters(), op=hvd.Adasum, process_set=group
    )
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        layer(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before - 2 * (hvd.rank() + 1.0))
    hvd.remove_process_set(group)


def check_the_newest_optimizer_of_a_model_takes_over() -> None:
    """As where it is made inside of the function of `hvd.elastic.run`, which is called again."""
    model = _model()
    optimizers = []
    for step in range(3):
        optimizers.append(
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        )
        x, y = _mine(_data(step))
        for _ in range(2):
            optimizers[-1].zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizers[-1].step()
    assert _is_the_same_everywhere(model)
    x, y = _mine(_data(9))
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizers[0].step()  # merges later than it did, that is all
    assert _is_the_same_everywhere(model)


def check_what_one_rank_alone_makes_and_does_not_use_is_in_nobodys_way() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 4), hvd.SyncBatchNorm(4), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())

    spare = make() if hvd.rank() == 0 else None
    model, optimizer = make()
    hvd.broadcast_parameters(model.state_dict(), 0)
    x, y = _mine(_data(0))
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.step()
    assert _is_the_same_everywhere(model)
    del spare


def check_ranks_use_two_optimizers_first_in_different_orders() -> None:
    """As where the first batches of two ranks are of different tasks."""
    towers = [nn.ParameterList(torch.zeros(2) for _ in range(3)) for _ in range(2)]
    optimizers = []
    for number, tower in enumerate(towers):
        named = [(f"{number}.{name}", parameter) for name, parameter in tower.named_parameters()]
        groups = [[parameter] for parameter in tower]  # a bucket for each, so that the first ones begin in the hooks
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(tower, lr=1.0), named, op=hvd.Sum, groups=groups))
    mine = hvd.rank() % 2
    sum(parameter.sum() for parameter in towers[mine]).backward()
    for number, (optimizer, tower) in enumerate(zip(optimizers, towers, strict=True)):
        optimizer.step()
        users = len(range(number, hvd.size(), 2))
        assert [parameter.tolist() for parameter in tower] == [[-users, -users]] * 3


def check_parameters_that_differ_between_ranks_are_told() -> None:
    last = hvd.rank() == hvd.size() - 1
    for width, depth in ((3 if last else 2, 1), (2, 2 if last else 1)):
        model = nn.ModuleList(nn.Linear(2, width) for _ in range(depth))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        sum(parameter.sum() for parameter in model.parameters()).backward()
        with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched (shapes|groups)"):
            optimizer.step()


def check_layers_frozen_and_unfrozen_after_the_optimizer_was_made() -> None:
    model = _model()
    first = next(layer for layer in model if isinstance(layer, nn.Linear))
    first.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5), model.named_parameters()
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        x, y = _mine(_data(number))
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()

    start = first.weight.detach().clone()
    step(0)
    assert torch.equal(first.weight, start)
    first.requires_grad_(True)
    step(1)
    assert not torch.equal(first.weight, start)
    assert _is_the_same_everywhere(model)
    first.requires_grad_(False)
    start = first.weight.detach().clone()
    step(2)
    step(3)
    assert torch.equal(first.weight, start), "weight decay and momentum leave frozen layers alone"
    assert _is_the_same_everywhere(model)


def _is_the_same_everywhere(model: nn.Module) -> bool:
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return hvd.allgather(weights[None]).unique(dim=0).shape[0] == 1


def check_tensors_that_are_conjugated_views() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(hvd.broadcast(tensor.conj(), 0), torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal(hvd.broadcast(tensor.conj().imag, 0), torch.tensor([-2.0, 1.0]))


def check_broadcast_of_optimizer_state_of_parameters_with_odd_names() -> None:
    for name in ("tensor", "odd", "dict"):
        parameter = nn.Parameter(torch.full((2,), float(hvd.rank())))
        optimizer = torch.optim.Adam([(name, parameter)], lr=0.1 * (hvd.rank() + 1))
        if hvd.rank() == 0:
            parameter.sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.1


def check_broadcast_of_optimizer_state() -> None:
    for make in (
        *OPTIMIZERS.values(),
        lambda p: torch.optim.Adagrad(p, lr=0.05),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    ):
        model = _model()
        optimizer = make(model.parameters())
        if hvd.rank() == 0:  # as after loading a checkpoint there
            for group in optimizer.param_groups:
                group["lr"] = np.float64(0.125)
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_parameters(list(model.parameters()), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.125
        optimizer.param_groups[0]["lr"] = 0.125
        states = hvd.allgather_object(optimizer.state_dict())
        assert str(states[0]) == str(states[-1])
        # And it goes on from there.
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        wrapped.zero_grad()
        model(torch.ones(2, 6) * hvd.rank()).sum().backward()
        wrapped.step()
        assert hvd.allgather(next(model.parameters())[:1].detach()).unique(dim=0).shape[0] == 1
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(_model().parameters()), 0)


def check_broadcast_of_a_state_that_is_empty_leaves_sparse_gradients_sparse() -> None:
    for make in (torch.optim.SparseAdam, torch.optim.SGD):
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(make(table.parameters(), lr=0.5), table.named_parameters())
        hvd.broadcast_parameters(table.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0, table)
        before = table.weight.detach().clone()
        table(torch.tensor([1])).sum().backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
        changed = torch.tensor([[0.0], [0.5], [0.0], [0.0]]).expand(4, 2)
        torch.testing.assert_close(table.weight.detach(), before - changed)


def check_broadcast_of_an_optimizer_in_the_middle_of_its_passes() -> None:
    """As where an elastic job changes its members between two backward passes."""
    parameter = nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("p", parameter)], backward_passes_per_step=2, op=hvd.Sum)
    parameter.sum().backward()
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.zero_grad()
    for _ in range(2):
        parameter.sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-2.0 * hvd.size()] * 2


def check_an_optimizer_in_a_process_set() -> None:
    group = hvd.add_process_set(range(hvd.size() - 1))
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=group
    )
    x, y = _mine(_data(0))
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.step()
    rows = hvd.allgather(next(model.parameters())[:1].detach()).unique(dim=0)
    assert rows.shape[0] == (1 if hvd.size() == 1 else 2), "the last rank trains alone"
    hvd.remove_process_set(group)


def check_learning_rate_schedulers_take_the_optimizer() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.8), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, y = _mine(_data(0))
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.4


def check_learning_rate_schedulers_may_be_made_before() -> None:
    """They put a `step` of their own into the place of the optimizer's."""
    for op in (hvd.Average, hvd.Adasum) if hvd.size() == 2 else (hvd.Average,):
        model = _model()
        plain = torch.optim.SGD(model.parameters(), lr=0.8)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
        for step in range(2):
            optimizer.zero_grad()
            x, y = _mine(_data(step))
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.2
        assert hvd.allgather(next(model.parameters())[:1].detach()).unique(dim=0).shape[0] == 1


def check_a_scheduler_that_was_made_before_outlives_loaded_states() -> None:
    for op in (hvd.Average, hvd.Adasum):
        model = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=op)
        rates = []
        for from_root in (True, False):
            if from_root:
                hvd.broadcast_optimizer_state(optimizer, 0)
            else:
                optimizer.load_state_dict(optimizer.state_dict())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there was no step
                scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert hvd.allgather_object(rates) == [[0.5, 0.25]] * hvd.size()


def check_a_closure_that_computes_nothing_takes_what_was_merged() -> None:
    model, reference = nn.Linear(600, 600), nn.Linear(600, 600)
    hvd.broadcast_parameters(model.state_dict(), 0)
    reference.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.full((2, 600), float(hvd.rank()))).mean()
        loss.backward()
        optimizer.step(lambda loss=loss: loss)
        optimizer.zero_grad()
        alone.zero_grad()
        sum(reference(torch.full((2, 600), float(rank))).mean() / hvd.size() for rank in range(hvd.size())).backward()
        alone.step()
    _same(model, reference)


def check_a_closures_gradients_are_merged() -> None:
    model, reference = _model(), _model()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), model.named_parameters())
    alone = torch.optim.LBFGS(reference.parameters(), max_iter=3)

    def closure(optimizer, model, x, y):
        def compute():
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(x), y)
            loss.backward()
            # What LBFGS sees of the loss is this rank's part.
            return hvd.allreduce(loss.detach(), name="loss") if optimizer is not alone else loss

        return compute

    optimizer.step(closure(optimizer, model, *_mine(_data(0))))
    alone.step(closure(alone, reference, *_data(0)))
    _same(model, reference, rtol=1e-3)


def check_elastic_sampler_deals_out_what_is_left() -> None:
    data = list(range(10 * hvd.size() + 1))
    sampler = hvd.elastic.ElasticSampler(data, seed=3)
    first = hvd.allgather_object(list(sampler))
    assert sorted({index for part in first for index in part}) == data
    assert len({len(part) for part in first}) == 1 == len({len(sampler), len(first[0])})
    sampler.record_batch(0, 4)
    sampler.record_batch(1, 4)
    state = sampler.state_dict()
    again = hvd.elastic.ElasticSampler(data, seed=3)
    again.load_state_dict(state)
    left = {index for part in hvd.allgather_object(list(again)) for index in part}
    done = {part[i] for part in first for i in range(8)}
    assert left == set(data) - done
    again.set_epoch(1)
    assert len(again) == 11
    assert list(again) != first[hvd.rank()]


def check_elastic_sampler_unites_what_ranks_name() -> None:
    data = list(range(12 * hvd.size()))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler, batch=0)
    sampler.record_batch(0, 2)
    assert sampler.get_indices(1, 2) == list(sampler)[2:4]
    sampler.record_indices(list(sampler)[4 : 5 + hvd.rank()])  # as many as the rank is high
    everybodys = hvd.allgather_object([*list(sampler)[:2], *list(sampler)[4 : 5 + hvd.rank()]])
    done = {index for part in everybodys for index in part}
    state.commit()
    sampler.record_batch(1, 1)  # not committed
    state.restore()
    assert set(sampler.remaining_indices) == set(data) - done
    left = {index for part in hvd.allgather_object(list(sampler)) for index in part}
    assert left == set(data) - done
    sampler.record_batch(0, 1)
    rest = hvd.allgather_object(list(sampler)[:1])
    state.commit()
    state.sync()
    assert set(sampler.remaining_indices) == set(data) - done - {part[0] for part in rest}


def check_elastic_state_is_kept_given_back_and_given_to_others() -> None:
    rank = hvd.rank()
    model = _model(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parts = {"scheduler": scheduler, "extra": _model(7 + rank), "step": rank, "list": [rank]}
    state = hvd.elastic.TorchState(model, optimizer, **parts)

    def step() -> None:
        optimizer.zero_grad()
        model(_data(rank)[0]).square().sum().backward()
        optimizer.step()

    step()
    scheduler.step()
    state.step += 10
    state.commit()
    kept = [p.detach().clone() for p in model.parameters()]
    moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    step()
    state.step, state.list[0] = -1, -1
    state.restore()
    assert (state.step, state.list) == (rank + 10, [rank])
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)
    step()
    state.restore()
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments), "the stored state is shared with no one"
    state.sync()
    alike = [*model.parameters(), *state.extra.parameters(), optimizer.state_dict()["state"][0]["exp_avg"]]
    for tensor in alike:
        assert torch.equal(tensor.detach(), hvd.broadcast(tensor.detach(), 0))
    assert (state.step, state.list) == (10, [0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    state.step = -1
    state.restore()
    assert state.step == 10, "what was given is kept"
    state.extra = _model(3)
    _same(state.extra, _model(3))
    nn.init.zeros_(state.extra[0].weight)
    state.restore()
    _same(state.extra, _model(3))


def check_elastic_handlers_of_ones_own() -> None:
    from phalanx.horovod.torch.elastic import state as states

    class Counter:
        def __init__(self, value: int):
            self.value = value

    class CounterHandler(states.StateHandler):
        def __init__(self, value: Counter):
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self.saved = self.value.value

        def restore(self) -> None:
            self.value.value = self.saved

        def sync(self) -> None:
            self.value.value = hvd.broadcast_object(self.value.value, 0)

    before = states.get_handler_registry()
    states.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        state = hvd.elastic.TorchState(counter=Counter(hvd.rank()))
        state.counter.value += 5
        state.restore()
        assert state.counter.value == hvd.rank()
        state.sync()
        assert state.counter.value == 0
    finally:
        states.set_handler_registry(before)


def check_elastic_run_in_a_job_of_fixed_members() -> None:
    state = hvd.elastic.ObjectState(step=hvd.rank())
    calls = []

    @hvd.elastic.run
    def train(state, more: int) -> int:
        calls.append(state.step)
        state.step += more
        state.commit()
        return state.step

    assert train(state, more=2) == 2
    assert calls == [0]
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched shapes"):
        hvd.elastic.run(lambda state: hvd.allreduce(torch.ones(1 + hvd.rank()), name="wrong"))(state)


def check_sync_batch_norm_is_that_of_one_process_on_the_whole_batch() -> None:
    rank, size = hvd.rank(), hvd.size()
    for shape, dtype, options in (
        ((5,), torch.float64, {}),
        ((5, 3, 2), torch.float64, {"momentum": None}),
        ((5, 4), torch.float64, {"affine": False}),
        ((5, 4), torch.float64, {"track_running_stats": False}),
        ((5, 4), torch.float32, {}),
    ):
        generator = torch.Generator().manual_seed(1)
        rows = [2 * r + 3 for r in range(size)]
        whole = torch.randn(sum(rows), *shape, generator=generator, dtype=dtype) * 3 + 100
        weights = torch.randn(whole.shape, generator=generator, dtype=dtype)
        mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        sync = hvd.SyncBatchNorm(5, **options).to(dtype)
        plain = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}[len(shape)](5, **options).to(dtype)
        if sync.affine:
            for layer in (sync, plain):
                nn.init.constant_(layer.weight, 1.5)
                nn.init.constant_(layer.bias, -0.5)
        tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        for _ in range(2):
            x, own = whole.clone().requires_grad_(), whole[mine].clone().requires_grad_()
            y, part = plain(x), sync(own)
            (y * weights).sum().backward()
            (part * weights[mine]).sum().backward()
            torch.testing.assert_close(part, y[mine], **tolerance)
            torch.testing.assert_close(own.grad, x.grad[mine], **tolerance)
        if sync.affine:
            for a, b in zip(sync.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(hvd.allreduce(a.grad, op=hvd.Sum), b.grad, **tolerance)
        for a, b in zip(sync.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b, **tolerance)
        sync.eval()
        plain.eval()
        if sync.track_running_stats:
            torch.testing.assert_close(sync(whole), plain(whole), **tolerance)
    half = hvd.SyncBatchNorm(5)(torch.randn(4, 5, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="takes \\(samples, 5"):
        hvd.SyncBatchNorm(5)(torch.randn(4, 6))


def check_a_model_with_sync_batch_norm_trains_as_one_process() -> None:
    def model(norm) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 8), norm(8), nn.Linear(8, 3))

    loss_of = nn.CrossEntropyLoss()
    ours, reference = model(hvd.SyncBatchNorm), model(nn.BatchNorm1d)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        alone.zero_grad()
        x, y = _mine(_data(step))
        loss_of(ours(x), y).backward()
        optimizer.step()
        x, y = _data(step)
        loss_of(reference(x), y).backward()
        alone.step()
    _same(ours, reference, rtol=1e-4)
