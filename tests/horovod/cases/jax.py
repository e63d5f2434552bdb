"""JAX: arrays outside of compiled functions, and Optax's optimizers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx.horovod.jax as hvd


def check_arrays_go_in_and_come_out() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (jnp.int32, jnp.float16, jnp.bfloat16, jnp.float32):
        merged = hvd.allreduce(jnp.full((2, 3), rank + 1, dtype), op=hvd.Sum)
        assert isinstance(merged, jax.Array)
        assert merged.dtype == dtype
        np.testing.assert_array_equal(np.asarray(merged, np.float32), sum(range(1, size + 1)))
    assert hvd.allgather(jnp.ones((rank + 1, 2))).shape == (sum(range(1, size + 1)), 2)
    assert hvd.broadcast(jnp.array([rank]), size - 1).tolist() == [size - 1]
    received, counts = hvd.alltoall(jnp.full((size,), rank), jnp.ones(size, jnp.int32))
    assert received.tolist() == list(range(size))
    assert counts.tolist() == [1] * size
    assert hvd.reducescatter(jnp.ones(size), op=hvd.Sum).tolist() == [size]
    handle = hvd.allreduce_async(jnp.ones(2), name="later", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [size] * 2
    assert hvd.allreduce(jnp.ones(3), compression=hvd.Compression.fp16).dtype == jnp.float32


def check_inside_a_compiled_function_it_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="second jitted function"):
        jax.jit(lambda x: hvd.allreduce(x))(jnp.ones(2))
    with pytest.raises(NotImplementedError, match="outside"):
        jax.grad(lambda x: hvd.allreduce(x).sum())(jnp.ones(2))


def check_parameters_are_broadcast() -> None:
    params = {"w": jnp.full((2, 2), float(hvd.rank())), "b": [jnp.array(hvd.rank()), hvd.rank()]}
    params = hvd.broadcast_parameters(params, root_rank=hvd.size() - 1)
    assert all((np.asarray(leaf) == hvd.size() - 1).all() for leaf in jax.tree.leaves(params))
    state = hvd.broadcast_parameters({"key": jax.random.key(hvd.rank()), "step": 3})
    assert jax.random.uniform(state["key"]) == jax.random.uniform(jax.random.key(0))
    assert state["step"] == 3


class _Transformation(NamedTuple):
    """An optimizer as Optax makes them: gradient descent with momentum."""

    init: Any
    update: Any


def _momentum(rate: float) -> _Transformation:
    def update(updates, state, params=None):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, updates)
        return jax.tree.map(lambda m: -rate * m, state), state

    return _Transformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def check_an_optimizer_trains_as_one_process() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4 * hvd.size(), 3)), rng.normal(size=(4 * hvd.size(),))
    gradient = jax.jit(jax.grad(lambda p, x, y: jnp.mean((x @ p["w"] + p["b"] - y) ** 2)))
    start = {"w": jnp.ones(3), "b": jnp.zeros(())}
    ours, alone = hvd.DistributedOptimizer(_momentum(0.1)), _momentum(0.1)
    assert isinstance(ours, _Transformation)
    mine = slice(hvd.rank(), None, hvd.size())
    one, two = start, start
    state_one, state_two = ours.init(one), alone.init(two)
    for _ in range(5):
        updates, state_one = ours.update(gradient(one, x[mine], y[mine]), state_one, one)
        one = jax.tree.map(jnp.add, one, updates)
        updates, state_two = alone.update(gradient(two, x, y), state_two, two)
        two = jax.tree.map(jnp.add, two, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, two)
    with pytest.raises(NotImplementedError, match="second jitted function"):
        jax.jit(ours.update)(start, state_one, start)


def check_optimizers_of_optax_train_as_one_process() -> None:
    optax = pytest.importorskip("optax", reason="Optax is not installed")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4 * hvd.size(), 3)), rng.normal(size=(4 * hvd.size(),))
    gradient = jax.jit(jax.grad(lambda p, x, y: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] + p["b"] - y) ** 2)))
    start = {
        "w": jnp.asarray(rng.normal(size=(3, 4))),
        "v": jnp.asarray(rng.normal(size=4)),
        "b": jnp.zeros(()),
    }
    mine = slice(hvd.rank(), None, hvd.size())
    adamw = optax.adamw(0.05, weight_decay=0.1)
    sgd = optax.sgd(0.1, momentum=0.9, nesterov=True)
    accumulating = optax.MultiSteps(optax.adam(0.05), every_k_schedule=2).gradient_transformation()
    for alone, several in (
        (adamw, [hvd.DistributedOptimizer(adamw), optax.chain(hvd.DistributedOptimizer(optax.identity()), adamw)]),
        (sgd, [hvd.DistributedOptimizer(sgd, gradient_predivide_factor=2.0)]),
        (accumulating, [hvd.DistributedOptimizer(accumulating)]),
    ):
        for ours in several:
            one, two = hvd.broadcast_parameters(jax.tree.map(lambda a: a + hvd.rank(), start)), start
            state_one, state_two = ours.init(one), alone.init(two)
            for _ in range(6):
                updates, state_one = ours.update(gradient(one, x[mine], y[mine]), state_one, one)
                one = optax.apply_updates(one, updates)
                updates, state_two = alone.update(gradient(two, x, y), state_two, two)
                two = optax.apply_updates(two, updates)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, two)
            everybodys = hvd.allgather_object(jax.tree.map(np.asarray, one))
            assert all((each[name] == one[name]).all() for each in everybodys for name in one), "the same bits"
    with_clipping = hvd.DistributedOptimizer(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)))
    updates, _ = with_clipping.update(jnp.full(4, float(hvd.rank())), with_clipping.init(jnp.ones(4)), jnp.ones(4))
    np.testing.assert_allclose(np.linalg.norm(updates), 0.1, rtol=1e-5)
    sums = hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum, compression=hvd.Compression.fp16)
    updates, _ = sums.update(jnp.ones(3), sums.init(jnp.ones(3)), jnp.ones(3))
    np.testing.assert_allclose(updates, -float(hvd.size()))
    with pytest.raises(NotImplementedError, match="second jitted function"):
        jax.jit(sums.update)(jnp.ones(3), sums.init(jnp.ones(3)), jnp.ones(3))


def check_elastic_state_of_arrays() -> None:
    state = hvd.elastic.ObjectState(params={"w": jnp.full(3, float(hvd.rank()))}, step=hvd.rank())
    state.params = jax.tree.map(lambda a: a + 1, state.params)
    state.restore()
    assert state.params["w"].tolist() == [hvd.rank()] * 3
    state.sync()
    assert isinstance(state.params["w"], jax.Array)
    assert (state.params["w"].tolist(), state.step) == ([0.0] * 3, 0)


def check_integers_that_do_not_fit_are_refused() -> None:
    assert hvd.broadcast(np.array([2**31 - 1]), 0).tolist() == [2**31 - 1]
    for value in (np.array([2**40 + 5]), np.array([2**63 + 1], np.uint64)):
        with pytest.raises(ValueError, match="jax_enable_x64"):
            hvd.broadcast(value, 0)
    assert hvd.allreduce(np.ones(1, np.float32), op=hvd.Sum)[0] == hvd.size()
