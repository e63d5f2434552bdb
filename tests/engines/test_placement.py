"""Where variables and batches lie on a mesh, and what is said of layouts that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import pytest

from phalanx.engines.spmd.automatic_layouts import automatic_layout
from phalanx.engines.spmd.placement import DATA, MODEL, REPLICA, SHARD, Placement, make_mesh
from phalanx.errors import ConfigurationError


@dataclass
class Variable:
    path: str
    shape: tuple[int, ...]


KERNEL, BIAS, ODD = Variable("mlp/up/kernel", (64, 256)), Variable("mlp/up/bias", (256,)), Variable("odd", (63, 33))


def devices(count: int) -> list[str]:
    return [f"cpu:{number}" for number in range(count)]


def sharded(level: int, *shape: int) -> Placement:
    return Placement(make_mesh(shape, (REPLICA, SHARD), devices(shape[0] * shape[1])), (REPLICA, SHARD), SHARD, level)


def laid_out(**layouts: tuple[Any, ...]) -> Placement:
    mesh = make_mesh((2, 2), (DATA, MODEL), devices(4))
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, layout in layouts.items():
        layout_map[key] = layout
    return Placement(mesh, (DATA,), DATA, layout_map=layout_map)


@pytest.mark.parametrize(
    ("level", "at_rest", "slot", "gradient"),
    [
        (1, (None, None), (None, SHARD), (None, None)),
        (2, (None, None), (None, SHARD), (None, SHARD)),
        (3, (None, SHARD), (None, SHARD), (None, SHARD)),
    ],
)
def test_each_level_divides_more(level: int, at_rest: Any, slot: Any, gradient: Any) -> None:
    placement = sharded(level, 1, 4)
    assert placement.resting_layout(KERNEL) == at_rest
    assert placement.slot_layout(KERNEL) == slot
    assert placement.gradient_layout(KERNEL) == gradient
    assert placement.step_layout(KERNEL) == (None, None)


def test_what_is_small_or_divides_nowhere_stays_whole() -> None:
    placement = sharded(3, 1, 4)
    assert placement.resting_layout(BIAS) == (None,)
    assert placement.resting_layout(ODD) == (None, None)
    placement.check_divides([BIAS, KERNEL])
    with pytest.raises(ConfigurationError, match=r"replica=1, shard=4.*'odd' of shape \(63, 33\)"):
        placement.check_divides([BIAS, ODD])


def test_a_batch_is_divided_over_all_axes_of_the_data_or_not_at_all() -> None:
    placement = sharded(3, 2, 2)
    assert placement.batch_layout((8, 3)) == ((REPLICA, SHARD),)
    assert placement.batch_layout((9, 3)) == placement.batch_layout(()) == placement.batch_layout((0, 3)) == ()
    assert laid_out().batch_layout((6,)) == ((DATA,),)


def test_layouts_of_the_program_are_those_of_the_variables_and_their_slots() -> None:
    placement = laid_out(**{".*/kernel": (None, MODEL), "mlp/up/bias": (MODEL,)})
    assert placement.resting_layout(KERNEL) == placement.slot_layout(KERNEL) == (None, MODEL)
    assert placement.resting_layout(BIAS) == (MODEL,)
    assert placement.resting_layout(ODD) == (None, None)
    placement.check_names([KERNEL, BIAS])


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"odd": (None, MODEL)}, r"axis 1 of 'odd', shape \(63, 33\), over the axis 'model' of the mesh \(data=2, "),
        ({"odd": (None, None, MODEL)}, r"'odd' the layout \(None, None, 'model'\) of 3 axes, but its shape is"),
    ],
)
def test_a_layout_that_does_not_fit_names_the_variable_and_the_mesh(layouts: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        laid_out(**layouts).resting_layout(ODD)


def test_a_key_that_matches_nothing_is_answered_with_the_nearest_paths() -> None:
    placement = laid_out(**{"mlp/upp/kernel": (None, MODEL), "mlp/output": (DATA,)})
    with pytest.raises(ConfigurationError, match=r"'mlp/upp/kernel'.*nearest are 'mlp/up/kernel'"):
        placement.check_names([BIAS, KERNEL, ODD])


@pytest.mark.parametrize(
    ("shape", "message"), [((2, 3), r"needs 6 devices, and JAX sees 4: cpu:0"), ((4,), "2 positive"), ((0, 4), "2 pos")]
)
def test_a_mesh_that_does_not_fit_the_devices(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_mesh(shape, (DATA, MODEL), devices(4))


def test_the_same_on_other_devices() -> None:
    placement = laid_out(**{".*kernel": (None, MODEL)})
    other = placement.on_devices([f"tpu:{number}" for number in range(4)])
    assert other.mesh.devices.tolist() == [["tpu:0", "tpu:1"], ["tpu:2", "tpu:3"]]
    assert other.resting_layout(KERNEL) == (None, MODEL)
    with pytest.raises(ConfigurationError, match="has 4 devices, and there are 2"):
        placement.on_devices(devices(2))


@pytest.mark.parametrize(
    ("path", "shape", "layout"),
    [
        ("block/up/kernel", (64, 256), (None, MODEL)),
        ("block/down/kernel", (256, 64), (MODEL, None)),
        ("attention/query/kernel", (64, 8, 8), (None, MODEL, None)),
        ("attention/attention_output/kernel", (8, 8, 64), (MODEL, None, None)),
        ("embedding/embeddings", (128, 32), (MODEL, None)),
        ("attention/query/kernel", (64, 3, 8), (MODEL, None, None)),
        ("conv/kernel", (3, 3, 16, 32), (None, None, None, MODEL)),
        ("norm/gamma", (64,), (None,)),
        ("odd/kernel", (63, 33), (None, None)),
    ],
)
def test_automatic_layouts(path: str, shape: tuple[int, ...], layout: tuple[Any, ...]) -> None:
    assert automatic_layout(path, shape, MODEL, 4, 1024) == layout
