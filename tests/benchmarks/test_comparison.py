"""What the comparison makes of its measurements. Nothing is timed here."""

from __future__ import annotations

import json

import pytest

from benchmarks import report
from benchmarks.comparison import Comparison, Measurement
from benchmarks.run import select
from benchmarks.tools import ALL_REDUCE, ALL_REDUCE_BARS, SPEED_BARS, START_BARS, TOOLS
from benchmarks.work import APART, TOGETHER, WORKS


def comparison(*measurements: Measurement) -> Comparison:
    machine = {
        "processor": "a processor",
        "cores_used": 2,
        "cores": 4,
        "memory_gib": 8,
        "system": "a system",
        "matmul_gflops_per_core": 100,
        "load_before": 0.1,
    }
    return Comparison("2026-01-01", machine, {"keras": "3"}, {"rounds": 3, "windows": 3}, list(measurements))


def test_a_job_counts_with_the_median_of_its_windows_and_a_tool_with_the_median_of_its_rounds() -> None:
    found = comparison(
        Measurement(0, "ddp", "mlp64", [1.0, 2.0, 9.0]),
        Measurement(1, "ddp", "mlp64", [4.0]),
        Measurement(2, "ddp", "mlp64", [3.0]),
    ).ms("ddp", "mlp64")
    assert found is not None
    assert (found.median, found.least, found.greatest, found.count) == (3.0, 2.0, 4.0, 3)


def test_a_ratio_is_formed_within_each_round_so_that_a_slow_machine_cancels_out() -> None:
    found = comparison(
        Measurement(0, "phalanx-jax", "mlp64", [1.0]),
        Measurement(0, "ddp", "mlp64", [4.0]),
        Measurement(1, "phalanx-jax", "mlp64", [10.0]),
        Measurement(1, "ddp", "mlp64", [40.0]),
        Measurement(2, "ddp", "mlp64", [7.0]),
    ).ratio("phalanx-jax", "ddp", "mlp64")
    assert found is not None
    assert (found.median, found.count) == (4.0, 2)


@pytest.mark.parametrize(("ddp_ms", "met"), [(3.4, False), (3.6, True)])
def test_a_speed_bar_is_met_from_its_factor_on(ddp_ms: float, met: bool) -> None:
    verdicts = comparison(
        Measurement(0, "phalanx-jax", "mlp64", [1.0]), Measurement(0, "ddp", "mlp64", [ddp_ms])
    ).verdicts()
    assert [(each.tool, each.against, each.met) for each in verdicts] == [("phalanx-jax", "ddp", met)]


def test_a_start_bar_is_met_up_to_its_seconds() -> None:
    late = comparison(Measurement(0, "phalanx-jax", "mlp64", [1.0], first_step_s=3.1)).verdicts()
    assert [(each.unit, each.met) for each in late] == [("s", False)]


def test_a_bar_without_a_measurement_has_no_verdict() -> None:
    assert comparison(Measurement(0, "phalanx-jax", "mlp512", [1.0])).verdicts() == []


def test_every_bar_names_tools_and_works_that_are_measured() -> None:
    pairs = {tool.paired_with for tool in TOOLS.values()}
    for bar in SPEED_BARS:
        assert {bar.tool, bar.against} <= {*TOOLS, *pairs}
        assert bar.work in WORKS
    assert all(bar.tool in TOOLS and bar.work in WORKS for bar in START_BARS)
    assert all(bar.factor > 0 for bar in (*SPEED_BARS, *ALL_REDUCE_BARS))


def test_results_survive_their_file() -> None:
    before = comparison(Measurement(0, "ddp", "mlp64", [1.0], first_step_s=2.0))
    after = Comparison.from_dict(json.loads(json.dumps(before.as_dict())))
    assert after == before


def test_words_narrow_works_and_tools() -> None:
    pairs = select(["mlp", "phalanx-jax", "ddp"])
    assert {work for _, work in pairs} == {"mlp64", "mlp512"}
    assert {tool.name for tool, _ in pairs} == {"phalanx-jax", "no-phalanx-jax", "ddp", "keras-ddp"} & set(TOOLS)


def test_no_words_select_everything_but_the_works_of_parameter_servers() -> None:
    assert {work for _, work in select([])} == {*TOGETHER, ALL_REDUCE}
    assert {tool.name for tool, _ in select([*APART, *TOGETHER, ALL_REDUCE])} == set(TOOLS)


def test_an_unknown_word_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--only mlx.*mlp64.*phalanx-jax"):
        select(["mlx"])


def test_the_page_shows_measurements_verdicts_and_what_is_missing() -> None:
    found = comparison(
        Measurement(0, "phalanx-jax", "mlp64", [1.0], first_step_s=2.5),
        Measurement(0, "ddp", "mlp64", [3.0], first_step_s=2.9),
        Measurement(0, "shared memory", "4096", [0.01]),
        Measurement(0, "gloo", "4096", [0.5]),
    )
    found.failures.append("tf.distribute: not installed\nmore")
    page = report.markdown(found)
    assert "| Phalanx, Keras fit on JAX | a core each | 1.00 | 1.00 | 1.00 | 64,000 |" in page
    assert "| 3.00 x | 3.00 x | 3.00 x | >= 3.5 x | NO |" in page
    assert "| 4,096 bytes | 0.010 | 0.500 |" in page
    assert "- tf.distribute: not installed\n" in page
