"""`phalanx plan --topology`: a step is compiled for devices that are not there, and nothing is trained."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from phalanx.config.plan_request import PlanRequest
from phalanx.errors import ConfigurationError, PhalanxError, UnsupportedError
from phalanx.planning.accelerators import CUDA_PLUGINS, check_compiler, parse_topology
from phalanx.planning.examined_program import examine
from phalanx.planning.hlo_collectives import HloCollective
from phalanx.planning.program_measurement import ProgramMeasurement
from phalanx.planning.program_report import bounds, fits, render
from tests.support import compilation
from tests.support.backends import BACKENDS
from tests.support.commands import ROOT
from tests.support.programs import environment

BOUND_S = 400.0
PROGRAM = str(ROOT / "tests/planning/divided_program.py")
needs_jax = pytest.mark.skipif("jax" not in BACKENDS, reason="BACKENDS leaves out jax")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def compile_for(topology: str, strategy: str, width: int, folder: Path) -> ProgramMeasurement:
    """What the program's step needs; it leaves no file behind."""
    target = parse_topology(topology)
    settings = environment("jax") | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    for variable in compilation.CHEAP:
        settings.pop(variable, None)
    files = folder / "files"
    files.mkdir()
    request = PlanRequest(folder / "result", target.devices, target.name)
    measured = examine([PROGRAM, strategy, str(width), str(files)], request, ProgramMeasurement, settings, BOUND_S)
    assert not list(files.iterdir()), "the program has trained, or gone on"
    return measured


def kinds(measured: ProgramMeasurement) -> set[str]:
    """Of collectives that move more than biases and metrics: a hundredth of the weights."""
    return {each.kind for each in measured.collectives if each.nbytes > measured.weights * 4 / 100}


@needs_jax
@pytest.mark.timeout(450)
def test_a_sharded_step_on_parts_of_a_cpu(tmp_path: Path) -> None:
    measured = compile_for("cpu:4", "sharded", 256, tmp_path)
    assert measured.weights == 2 * (256 * 256 + 256)
    assert (measured.devices, measured.global_batch) == (4, 16)
    assert measured.mesh == "(replica=1, shard=4)"
    # Weights and Adam's two moments in shards, and this device's part of x and y.
    state = 12 * measured.weights / 4
    assert measured.argument_bytes == pytest.approx(state + 2 * 4 * 256 * 4, rel=0.05)
    assert measured.output_bytes - measured.alias_bytes < 4096
    assert "all-gather" in kinds(measured)
    assert measured.host_calls == ()
    assert measured.flops > 0


@needs_jax
@needs_libtpu
@pytest.mark.timeout(450)
def test_a_mirrored_step_for_tpus_merges_gradients_and_gathers_nothing(tmp_path: Path) -> None:
    measured = compile_for("v5e:2x2", "whole", 256, tmp_path)
    assert kinds(measured) == {"all-reduce"}
    assert measured.host_calls == ()
    assert sum(each.nbytes for each in measured.collectives) == pytest.approx(4 * measured.weights, rel=0.01)
    assert measured.argument_bytes == pytest.approx(12 * measured.weights + 2 * 4 * 256 * 4, rel=0.05)


@needs_jax
@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strategy", "bytes_of_weight", "collectives"),
    [
        ("whole", 12.0, {"all-reduce"}),
        ("optimizer", 4 + 8 / 8, {"all-gather", "reduce-scatter"}),
        ("sharded", 12 / 8, {"all-gather", "reduce-scatter"}),
        ("parallel", 12 / 4, {"all-reduce", "all-gather", "reduce-scatter"}),
    ],
)
def test_what_each_strategy_needs_on_eight_tpus(
    strategy: str, bytes_of_weight: float, collectives: set[str], tmp_path: Path
) -> None:
    measured = compile_for("v5e:2x4", strategy, 2048, tmp_path)
    assert measured.argument_bytes == pytest.approx(bytes_of_weight * measured.weights, rel=0.05)
    assert kinds(measured) <= collectives
    assert measured.host_calls == ()
    assert fits(measured, parse_topology("v5e:2x4"))


@needs_jax
@pytest.mark.skipif(
    all(importlib.util.find_spec(plugin) is None for plugin in CUDA_PLUGINS), reason="JAX with CUDA is not installed"
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("topology", "strategy", "bytes_of_weight", "collectives"),
    [
        ("h200:4", "optimizer", 4 + 8 / 4, {"all-gather", "reduce-scatter"}),
        ("h100:8", "sharded", 12 / 8, {"all-gather", "reduce-scatter"}),
        ("a100:4", "sharded", 12 / 4, {"all-gather", "reduce-scatter"}),
    ],
)
def test_what_strategies_need_on_gpus(
    topology: str, strategy: str, bytes_of_weight: float, collectives: set[str], tmp_path: Path
) -> None:
    measured = compile_for(topology, strategy, 1024, tmp_path)
    assert measured.argument_bytes == pytest.approx(bytes_of_weight * measured.weights, rel=0.05)
    assert kinds(measured) == collectives
    samples = measured.global_batch / measured.devices
    assert measured.flops == pytest.approx(
        6 * measured.weights * samples, rel=0.25
    )  # the first layer has no input gradient
    assert fits(measured, parse_topology(topology))


@needs_jax
@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dividing_the_state_moves_what_data_parallel_training_moves(tmp_path: Path) -> None:
    """ZeRO-1 and the first two stages of FSDP: a reduce-scatter and an all-gather are an all-reduce."""

    def sent(strategy: str) -> float:
        (tmp_path / strategy).mkdir()
        return sum(each.sent_bytes for each in compile_for("v5e:2x4", strategy, 2048, tmp_path / strategy).collectives)

    plain = sent("whole")
    assert sent("optimizer") == pytest.approx(plain, rel=0.05)
    assert sent("sharded") <= 1.5 * plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "v9:2x2",
            r"not a topology that .* knows.*v5e:2x4, v5p:2x2x2, v6e:4x4, a100:8, h100:8, h200:8, cpu:4",
        ),
        ("v5e", "arranged in 2 dimensions"),
        ("v5e:2x2x2", r"arranged in 2 dimensions.*v5e:2x4"),
        ("v5e:0x4", "v5e:2x4"),
        ("h100:16", r"1 dimension\..*h100:8, with 8 devices at most"),
        ("cpu:2x2", r"1 dimension\..*cpu:4"),
        ("cpu:99999", "at most"),
    ],
)
def test_an_unknown_topology_names_those_that_are_known(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_topology(text)


def test_the_variables_that_stand_for_a_tpu_host() -> None:
    assert parse_topology("v5e:2x4").tpu_variables == {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    assert parse_topology("v5p:2x2x2").tpu_variables["TPU_ACCELERATOR_TYPE"] == "v5p-16"
    assert parse_topology("cpu:4").tpu_variables == {}


def test_another_backend_and_a_missing_compiler_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"only on JAX.*'torch'.*KERAS_BACKEND=jax"):
        check_compiler(parse_topology("cpu:4"), "torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_compiler(parse_topology("cpu:4"), "jax")
    with pytest.raises(ConfigurationError, match=r"jax\[tpu\]"):
        check_compiler(parse_topology("v5e:2x4"), None)
    with pytest.raises(ConfigurationError, match=r"h100:8 needs JAX with CUDA.*jax\[cuda13\].*needs no GPU"):
        check_compiler(parse_topology("h100:8"), None)


def measurement(**figures: object) -> ProgramMeasurement:
    fields = {"devices": 8, "mesh": "(data=8)", "weights": 1000, "global_batch": 64} | figures
    return ProgramMeasurement(**fields)  # type: ignore[arg-type]


def test_the_bound_is_what_takes_longest() -> None:
    topology = parse_topology("v5e:2x4")
    merge = HloCollective("all-reduce", "f32", nbytes=8 * 10**9, group=8)
    measured = measurement(flops=197e12, accessed_bytes=819e8, collectives=(merge,))
    assert [(each.what, round(each.seconds, 3)) for each in bounds(measured, topology)] == [
        ("compute", 1.0),
        ("interconnect", 0.28),  # 2 x 7/8 x 8 GB at 50 GB/s
        ("memory", 0.1),
    ]
    assert bounds(measured, parse_topology("cpu:8")) == []
    report = render(measured, topology)
    assert "Limited by: compute." in report
    assert "all-reduce" in report
    assert "it fits" in report


def test_a_step_that_does_not_fit() -> None:
    topology = parse_topology("v5e:2x4")
    large = measurement(
        argument_bytes=12 * 2**30, output_bytes=12 * 2**30, alias_bytes=8 * 2**30, temporary_bytes=2**30
    )
    assert large.needed_bytes == 17 * 2**30
    assert fits(large, topology) is False
    assert "it does not fit" in render(large, topology)
    refused = measurement(refusal="Ran out of memory in memory space hbm.")
    assert fits(refused, topology) is False
    assert "Ran out of memory" in render(refused, topology)
    assert fits(large, parse_topology("cpu:8")) is None


def test_a_step_that_waits_for_the_host_is_told() -> None:
    assert "xla_python_callback" in render(measurement(host_calls=("xla_python_callback",)), parse_topology("cpu:8"))


@needs_jax
@pytest.mark.slow
@pytest.mark.timeout(450)
def test_a_mesh_that_does_not_fit_the_topology_is_an_error_of_the_strategy(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match=r"mesh_shape.*needs"):
        compile_for("cpu:3", "parallel", 256, tmp_path)
