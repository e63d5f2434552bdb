"""Steps on machines that are not there, predicted from measured ones: arithmetic that can be done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.collectives.host.recording_algorithm import RecordedCall
from phalanx.collectives.host.ring_algorithm import CHUNK_BYTES, PACK_BYTES
from phalanx.errors import ConfigurationError
from phalanx.planning.collective_costs import CollectiveCosts, Machines, NetworkLink, SoftwareCosts
from phalanx.planning.scaling import ScalingModel, interpolate, machine_counts, measured_counts
from phalanx.planning.scaling_report import byte_count, milliseconds, plot, render_table
from phalanx.planning.step_measurement import StepMeasurement

FREE = SoftwareCosts(0.0, 0.0, 0.0, 0.0, 0.0)
MB = 10**6


def merge(nbytes: int, arrays: int = 1) -> RecordedCall:
    return RecordedCall("all_reduce", nbytes, ((arrays, nbytes),))


def costs(bytes_per_s: float = 100 * MB, latency_s: float = 0.0, software: SoftwareCosts = FREE) -> CollectiveCosts:
    return CollectiveCosts(NetworkLink(bytes_per_s, latency_s), software)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_large_ring_takes_the_bytes_that_each_rank_must_send(ranks: int) -> None:
    """2 (n - 1) / n of the vector (Patarasuk and Yuan 2009), if latency and processors cost nothing."""
    nbytes = ranks * 4 * CHUNK_BYTES
    expected = 2 * (ranks - 1) / ranks * nbytes / (100 * MB)
    assert costs().seconds(merge(nbytes), Machines(ranks)) == pytest.approx(expected)


def test_a_ring_of_small_shares_takes_a_latency_for_each_step() -> None:
    predicted = costs(latency_s=0.01).seconds(merge(64_000), Machines(16))
    assert predicted == pytest.approx(2 * 15 * (0.01 + 64_000 / 16 / (100 * MB)))


def test_a_few_bytes_go_directly_to_all_others() -> None:
    assert costs(latency_s=0.01).seconds(merge(1000), Machines(16)) == pytest.approx(0.01 + 15 * 1000 / (100 * MB))


def test_the_slower_of_link_and_processor_is_the_bound_and_not_their_sum() -> None:
    slow_core = SoftwareCosts(link_byte_s=1 / (50 * MB), pack_byte_s=0.0, message_s=0.0, hop_s=0.0, local_byte_s=0.0)
    nbytes = 16 * CHUNK_BYTES
    assert costs(software=slow_core).seconds(merge(nbytes), Machines(2)) == pytest.approx(nbytes / (50 * MB))


def test_packing_adds_to_the_ring_of_many_arrays_alone() -> None:
    packing = SoftwareCosts(0.0, pack_byte_s=1e-9, message_s=0.0, hop_s=0.0, local_byte_s=0.0)
    model = costs(software=packing)
    one, many = (model.seconds(merge(2 * PACK_BYTES, arrays), Machines(2)) for arrays in (1, 7))
    assert many - one == pytest.approx(2 * PACK_BYTES * 1e-9)


def test_workers_of_a_machine_merge_in_memory_and_send_once() -> None:
    memory = SoftwareCosts(0.0, 0.0, 0.0, 0.0, local_byte_s=1e-9)
    model, nbytes = costs(software=memory), 64 * CHUNK_BYTES
    between = model.seconds(merge(nbytes), Machines(4))
    assert model.seconds(merge(nbytes), Machines(1, workers=2)) == pytest.approx(nbytes * 1e-9)
    assert model.seconds(merge(nbytes), Machines(4, workers=2)) == pytest.approx(between + 2 * nbytes * 1e-9)


@pytest.mark.parametrize("kind", ["broadcast", "all_gather", "all_to_all"])
def test_more_machines_never_make_another_collective_cheaper(kind: str) -> None:
    call = RecordedCall(kind, 3 * MB)
    seconds = [costs(latency_s=1e-4).seconds(call, Machines(count)) for count in (1, 2, 4, 8)]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)


def test_ethernet_carries_less_payload_than_its_rate() -> None:
    assert NetworkLink.of_ethernet(10e9, 0.0).bytes_per_s == pytest.approx(1.177e9, rel=1e-3)


def measured(replicas: int, local: int, batch: int, seconds: float, **changes: object) -> StepMeasurement:
    fields = {"steps": 60, "cycle": 1, "collectives": (merge(4 * CHUNK_BYTES),), "overlaps": False}
    fields |= {"weights": 1000, "backend": "jax"}
    return StepMeasurement(replicas, local, batch, seconds, **(fields | changes))  # type: ignore[arg-type]


def test_a_fixed_batch_is_divided_and_its_time_interpolated() -> None:
    model = ScalingModel([measured(1, 512, 512, 0.1), measured(8, 64, 512, 0.03)], costs())
    four = model.predict(Machines(4))
    assert (four.global_batch, four.local_batch) == (512, 128)
    assert four.computed_s == pytest.approx(0.03 + 0.07 * 64 / 448)
    assert four.step_s == pytest.approx(four.computed_s + 2 * 3 / 4 * 4 * CHUNK_BYTES / (100 * MB))


def test_a_batch_that_grows_with_the_replicas_keeps_the_time_of_one() -> None:
    model = ScalingModel([measured(1, 32, 32, 0.1), measured(8, 32, 256, 0.12)], costs())
    sixteen = model.predict(Machines(16))
    assert (sixteen.global_batch, sixteen.local_batch) == (512, 32)
    assert sixteen.computed_s == pytest.approx(0.11)


def test_an_overlapped_exchange_costs_only_what_the_steps_do_not_hide() -> None:
    calls = (merge(100 * CHUNK_BYTES),)
    whole = ScalingModel([measured(2, 32, 64, 0.05, cycle=4, collectives=calls)], costs()).predict(Machines(2))
    hidden = ScalingModel([measured(2, 32, 64, 0.05, cycle=4, collectives=calls, overlaps=True)], costs()).predict(
        Machines(2)
    )
    assert hidden.merged_s == pytest.approx(max(0.0, whole.merged_s - 0.05))


def test_counts_and_lines() -> None:
    assert machine_counts(1) == [1]
    assert machine_counts(6) == [1, 2, 4, 6]
    assert measured_counts(1) == [1]
    assert measured_counts(64) == [1, 8, 64]
    assert interpolate([(1, 5)], 9) == 5
    assert interpolate([(1, 1), (2, 2), (4, 8)], 3) == 5
    assert interpolate([(1, 1), (2, 2), (4, 8)], 6) == 14


def test_a_plot_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = ScalingModel([measured(1, 64, 64, 1.0)], costs())
    (tmp_path / "plan.svg").mkdir()
    with pytest.raises(ConfigurationError, match="the file cannot be written: Is a directory"):
        plot([model.predict(Machines(count)) for count in (1, 2)], 2, tmp_path / "plan.svg", "title")


def test_the_table_compares_samples_per_second_with_one_machine() -> None:
    model = ScalingModel([measured(1, 32, 32, 0.1), measured(4, 32, 128, 0.1)], costs(bytes_per_s=1e15))
    *_, last = render_table([model.predict(Machines(count)) for count in (1, 2, 4)]).splitlines()
    assert last.split() == ["4", "128", "32", "100", "ms", "0.00", "ms", "100", "ms", "1,280", "4.0", "100%"]
    assert byte_count(1_080_000) == "1.08 MB"
    assert byte_count(117) == "117 B"
    assert milliseconds(0.01234) == "12.3 ms"
