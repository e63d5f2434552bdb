"""Memory that a worker and a server share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from phalanx.collectives.host.shared_segment import SegmentOffer, SharedSegment
from phalanx.errors import FrameError
from phalanx.parameter_server import shared_memory_channel
from phalanx.parameter_server.shared_memory_channel import MAX_BYTES, TO_SERVER, TO_WORKER, SharedMemoryChannel

ARRAYS = [
    np.arange(10_000, dtype=np.float32).reshape(100, 100),
    np.zeros((0, 3), np.float32),
    np.float64(3.5).reshape(()),
    np.arange(21, dtype=np.int8)[::2],  # not contiguous
    np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
]


@pytest.fixture
def pair() -> Iterator[tuple[SharedMemoryChannel, SharedMemoryChannel]]:
    """Both sides, here in one process: worker's and server's."""
    others: list[SharedMemoryChannel | None] = []

    def accepts(offer: SegmentOffer) -> bool:
        others.append(SharedMemoryChannel.accept(offer))
        return others[-1] is not None

    own = SharedMemoryChannel.offer(sum(array.nbytes for array in ARRAYS), accepts)
    assert own is not None
    assert others[-1] is not None
    yield own, others[-1]
    own.close()
    others[-1].close()


def filled(channel: SharedMemoryChannel, arrays: list[np.ndarray]) -> tuple[int, ...]:
    """The lengths of what is sent next: these arrays."""
    room = channel.send_buffers(tuple((array.shape, array.dtype) for array in arrays))
    if room is None:
        return ()
    for target, array in zip(room, arrays, strict=True):
        np.copyto(target, array)
    return channel.lengths_of(room)


def test_arrays_arrive_as_they_were_sent(pair: tuple[SharedMemoryChannel, SharedMemoryChannel]) -> None:
    worker, server = pair
    lengths = filled(worker, ARRAYS)
    assert lengths == tuple(array.nbytes for array in ARRAYS)
    for array, memory in zip(ARRAYS, server.read(TO_SERVER, lengths), strict=True):
        np.testing.assert_array_equal(np.frombuffer(memory, array.dtype).reshape(array.shape), array)


def test_buffers_are_aligned_as_backends_want_it(pair: tuple[SharedMemoryChannel, SharedMemoryChannel]) -> None:
    worker, _ = pair
    views = [np.frombuffer(memory, np.uint8) for memory in worker.read(TO_SERVER, [1, 30, 65, 8])]
    assert all(view.ctypes.data % 64 == 0 for view in views)


def test_values_stay_until_those_after_the_next_come(pair: tuple[SharedMemoryChannel, SharedMemoryChannel]) -> None:
    worker, server = pair
    first, second = np.full(5000, 1.0, np.float32), np.full(5000, 2.0, np.float32)
    written = [server.write_values([first]), server.write_values([second])]
    regions = {region for region, _ in written}
    assert len(regions) == 2
    assert TO_SERVER not in regions
    assert server.write_values([])[1] == (), "nothing new"
    filled(worker, [second])
    for (region, lengths), sent in zip(written, (first, second), strict=True):
        (memory,) = worker.read(region, lengths)
        np.testing.assert_array_equal(np.frombuffer(memory, np.float32), sent)
    assert server.write_values([first])[0] == written[0][0]


def test_copies_lie_where_they_are_sent_from(pair: tuple[SharedMemoryChannel, SharedMemoryChannel]) -> None:
    worker, server = pair
    values = [np.full(5000, 1.0, np.float32), np.full((), 2.0, np.float32)]
    sent = server.copy_values(values)
    values[0][:] = 3.0
    rows = np.full(7, 4.0, np.float32)
    for more in [], [rows]:  # what goes with them leaves them where they are
        region, lengths = server.write_values([*sent, *more])
        memories = worker.read(region, lengths)
        for memory, expected in zip(memories, [1.0, 2.0, 4.0], strict=False):
            np.testing.assert_array_equal(np.frombuffer(memory, np.float32), expected)
        sent = server.copy_values([np.full(5000, 1.0, np.float32), values[1]])
    (small,) = server.copy_values([values[1]])
    values[1][...] = 5.0
    assert small == 2.0


def test_what_is_too_little_or_too_much_goes_with_the_message(
    pair: tuple[SharedMemoryChannel, SharedMemoryChannel],
) -> None:
    worker, _ = pair
    assert filled(worker, [np.zeros(10, np.float32)]) == ()
    assert filled(worker, []) == ()
    assert filled(worker, [np.zeros(worker.region_bytes, np.uint8), np.zeros(1, np.uint8)]) == ()


def test_what_others_have_left_in_a_room_is_not_taken_for_its_contents(
    pair: tuple[SharedMemoryChannel, SharedMemoryChannel],
) -> None:
    worker, _ = pair
    large = (((6000,), np.dtype(np.float32)),)
    room = worker.send_buffers(large)
    assert room is not None
    room[0][:] = 1
    assert worker.send_buffers(large) is room
    assert room[0].all(), "what was not filled stays"
    assert worker.lengths_of(room) == (24_000,)
    filled(worker, [np.full(24_000, 7, np.uint8)])
    assert worker.lengths_of(room) == ()
    assert worker.send_buffers(large) is room
    assert not room[0].any()


@pytest.mark.parametrize(("region", "lengths"), [(-1, [64]), (3, [64]), (TO_WORKER, [-64, 128]), (0, [1 << 60])])
def test_a_place_that_is_not_there_is_refused(
    pair: tuple[SharedMemoryChannel, SharedMemoryChannel], region: int, lengths: list[int]
) -> None:
    with pytest.raises(FrameError, match="in region"):
        pair[0].read(region, lengths)


def test_without_shared_memory_there_are_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int, method: str) -> SharedSegment:
        raise OSError("no space left on device")

    asked: list[SegmentOffer] = []
    assert SharedMemoryChannel.offer(MAX_BYTES, lambda offer: not asked.append(offer)) is None, "too large"
    assert SharedMemoryChannel.offer(100_000, lambda offer: bool(asked.append(offer))) is None, "not accepted"
    assert len(asked) == len(shared_memory_channel.METHODS)
    assert not any(os.path.exists(offer.path) for offer in asked)
    monkeypatch.setattr(shared_memory_channel.SharedSegment, "create", fail)
    assert SharedMemoryChannel.offer(100_000, lambda offer: True) is None
    assert SharedMemoryChannel.accept(SegmentOffer("/nowhere", 1, b"")) is None
    assert SharedMemoryChannel.accept(SegmentOffer("/dev/null", 0, b"")) is None
